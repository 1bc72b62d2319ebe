"""Trains a run that recovers, once undisturbed and once for each moment at which it can be killed; started by a test.

Arguments: folder. Each run is a copy of this process (torch is loaded), is killed with SIGKILL, and continues from its
newest checkpoint to its end. Its results go into a separate file.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from genlight.callbacks import Hook, Recover
from support.recovered import Batches, Fragile, digest_of, fit_fragile

STEPS = 24
FAULTS = (12, 13, 15, 17)
"""Skipped, rate lowered, rolled back from step 16 to 10, and from step 12 once more; by then 18 steps were trained."""


class KillAtEvents(Hook):
    """Kills its process at the start of the roll-back, right after it, or when a checkpoint has become durable."""

    ranks = "all"

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.saves = 0

    def on_roll_back_due(self, trainer, pl_module):
        self.kill("roll_back_due")

    def on_roll_back(self, trainer, pl_module):
        self.kill("roll_back")

    def on_checkpoint_durable(self, trainer, pl_module, record):
        self.saves += 1
        self.kill(f"durable {self.saves}")

    def kill(self, moment: str) -> None:
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, moment: str | None, *, resumes: bool) -> None:
    def before_step(calls: int) -> None:
        if f"step {calls}" == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    recover = Recover(good_steps=4, lower_lr_steps=3, max_attempts=6)
    trainer = Fragile(before_step)
    callbacks = [] if moment is None else [KillAtEvents(moment)]
    module = fit_fragile(
        *(folder, recover, Batches(FAULTS)), trainer=trainer, steps=STEPS, callbacks=callbacks, resumes=resumes
    )
    (folder / "end").write_text(f"{digest_of(module)} {trainer.calls}")


def in_a_copy(run: Callable[[], None]) -> int:
    """The exit status of a copy of this process that does `run`."""
    child = os.fork()
    if not child:
        try:
            run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    peace = folder / "peace"
    assert in_a_copy(lambda: train(peace, None, resumes=False)) == 0
    calls = int((peace / "end").read_text().split()[1])
    saves = len([*(peace / "checkpoints").glob("*.json")]) + 1
    is_long = os.environ.get("GENLIGHT_LONG_FAULTS") == "1"
    kills = range(12, calls + 1) if is_long else (14, 17, 18, 19, 21, 28)
    moments = [f"step {call}" for call in kills]
    for moment in [*moments, "roll_back_due", "roll_back", *(f"durable {save}" for save in range(2, saves + 1))]:
        place = folder / moment
        assert in_a_copy(lambda: train(place, moment, resumes=False)) == signal.SIGKILL, moment  # noqa: B023
        assert in_a_copy(lambda: train(place, None, resumes=True)) == 0, moment  # noqa: B023


if __name__ == "__main__":
    main(Path(sys.argv[1]))
