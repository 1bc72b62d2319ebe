"""A training that waits for scores computed in another process."""

import time

from genlight.callbacks import EvaluateCommand, Hook

PATIENCE_S = 120.0


class WaitsForScores(Hook):
    """Holds training up after each step until a command that was begun has ended, so that its scores come then."""

    def __init__(self, evaluate: EvaluateCommand) -> None:
        self.evaluate = evaluate

    def on_train_batch_start(self, *_):
        end = time.monotonic() + PATIENCE_S
        while self.evaluate._running is not None and not self.evaluate._running.is_over():
            assert time.monotonic() < end
            time.sleep(0.01)
