"""A fit that goes on from its newest checkpoint, and kills itself at a step where it is told to.

Arguments: folder, the step to be killed at (0 for none). Started again and again by ``test_goodput.py``.
"""

import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Goodput, LogMetrics
from genlight.callbacks.checkpoint import newest_valid
from genlight.reporters import EventLogger

STEPS = 50


class Trainer:
    """Sleeps, and is killed in the middle of a step."""

    def __init__(self, kill_at):
        self.kill_at = kill_at
        self.step = 0

    def setup(self, ctx): ...

    def configure(self, ctx):
        return {}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        self.step += 1
        if self.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return StepResult(metrics={"loss": 1.0})

    def state_dict(self, state):
        return {"step": self.step}

    def load_state_dict(self, state, payload, ctx):
        self.step = payload["step"]


def main(folder, kill_at):
    newest, _ = newest_valid(folder / "c")
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=EventLogger(run_id="r", save_dir=str(folder)),
        callbacks=[
            LogMetrics(1),
            Goodput(every_s=0.01),
            Checkpoint(folder / "c", every_n_steps=10, asynchronous=False),
        ],
        max_steps=STEPS,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = ContractModule(Trainer(kill_at), TrainingJobSpec(run_id="r", max_steps=STEPS))
    trainer.fit(module, list(range(STEPS)), ckpt_path=None if newest is None else str(newest.path))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
