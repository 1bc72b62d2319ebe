"""One rank of a job on the simulated accelerator, in which one rank is killed or stops answering.

Usage: ``python -m device.lost RANK WORLD_SIZE PORT JOB``.
"""

import os
import sys
from typing import Any

from genlight.adapter.contract.types import StepResult
from support.trainer_class import Trains

LAST_STEP = 12
"""Step in which the rank is lost; a checkpoint was saved before it."""


class Loses(Trains):
    """Trains a network until one rank sends itself the signal that its hyperparameters name."""

    steps = 0

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        import torch

        return torch.full((4, 2), raw / 1000, device=ctx.device)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.steps += 1
        plan = ctx.job.hyperparams
        if self.steps == LAST_STEP and ctx.rank == plan["lost"]:
            os.kill(os.getpid(), plan["signal"])
        return super().train_step(batch, state, ctx)


def main(rank: str, world_size: str, port: str, job: str) -> int:
    """Run the job as torchrun would start it."""
    from support.device import load

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    place = {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "lost"}
    os.environ.update(numbers | place)
    load()
    import support.device.training  # noqa: F401 - registers the accelerator
    from genlight.adapter.cli import main as run_command

    return run_command(["run", job])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
