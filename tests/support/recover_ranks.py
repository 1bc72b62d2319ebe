"""One rank of a training in which only one rank meets faults: ``recover_ranks.py RANK WORLD_SIZE RANK.folder``."""

from __future__ import annotations

import torch
from recovered import Batches, Fragile, digest_of, fit_fragile
from torch import nn
from torch.optim.lr_scheduler import StepLR

from genlight.adapter import RecoveryError
from genlight.callbacks import Recover, ReplicaGuard
from support.rank import Rank

RANK = Rank.of_command_line()
STEPS = 24


class Sharded(Fragile):
    """A model of layers that can be sharded."""

    def configure(self, ctx):
        state = super().configure(ctx)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {**state, "model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 7)}


def sharded(name: str, *rungs: str) -> dict:
    """Return this rank's results of a training with FSDP 2."""
    strategy = RANK.strategy("sharded", save_distributed_checkpoint=False)
    recover = Recover(rungs, ["nonfinite", "loss_spike"])
    batches = Batches({5} if RANK.number == 1 else (), seed=RANK.number)
    error = ""
    with RANK.group(f"store {name}"):
        try:
            fit_fragile(
                *(RANK.folder / name, recover, batches),
                trainer=Sharded(),
                steps=8,
                every=5,
                devices=2,
                strategy=strategy,
            )
        except RecoveryError as raised:
            error = str(raised)
    return {"ladder": recover.state_dict(), "next": batches.next, "calls": 0, "error": error, "digest": ""}


def outcome(name: str, faults: object, *, steps: int = STEPS, resumes: bool = False, kinds=("nonfinite",)) -> dict:
    """Return this rank's results of a training."""
    recover = Recover(faults=kinds, good_steps=4, lower_lr_steps=3)
    batches = Batches(faults if RANK.number == 1 else (), seed=RANK.number)
    trainer, error, digest = Fragile(), "", ""
    with RANK.group(f"store {name} {steps}"):
        try:
            module = fit_fragile(
                *(RANK.folder / name, recover, batches),
                trainer=trainer,
                steps=steps,
                resumes=resumes,
                callbacks=[ReplicaGuard(1)],
                devices=RANK.world_size,
                strategy=RANK.strategy(),
            )
            digest = digest_of(module)
        except RecoveryError as raised:
            error = str(raised)
    return {
        "ladder": recover.state_dict(),
        "next": batches.next,
        "calls": trainer.calls,
        "error": error,
        "digest": digest,
    }


def main() -> None:
    found = {
        "nan": outcome("nan", (12, 13, 15)),
        "nan, cut": outcome("cut", (12, 13, 15), steps=14),
        "nan, resumed": outcome("cut", (12, 13, 15), resumes=True),
        "spike": outcome("spike", {40: 1e3}, steps=46, kinds=("loss_spike",)),
        "sharded": sharded("sharded", "skip", "lower_lr"),
        "sharded, refused": sharded("refused", "roll_back"),
        "used up": outcome("used up", range(11, 80)),
    }
    RANK.leave(found)


if __name__ == "__main__":
    main()
