"""One rank of a training in which only one rank meets faults: ``recover_ranks.py RANK WORLD_SIZE RANK.folder``."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from genlight.adapter import RecoveryError
from genlight.callbacks import Recover, ReplicaGuard
from support.rank import Rank
from support.recovered import Batches, Fragile, digest_of, fit_fragile

RANK = Rank.of_command_line()
STEPS = 24


class Sharded(Fragile):
    """A model of layers that can be sharded."""

    def configure(self, ctx):
        state = super().configure(ctx)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {**state, "model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 7)}


def outcome(
    name: str, faults: object, *, recover: Recover | None = None, steps: int = STEPS, shards: bool = False, **settings
) -> dict:
    """Return this rank's results of a training, with FSDP 2 if it `shards`."""
    recover = recover or Recover(good_steps=4, lower_lr_steps=3)
    batches = Batches(faults if RANK.number == 1 else (), seed=RANK.number)
    trainer, error, digest = Sharded() if shards else Fragile(), "", ""
    strategy = RANK.strategy("sharded", save_distributed_checkpoint=False) if shards else RANK.strategy()
    settings |= {"steps": steps, "devices": RANK.world_size, "strategy": strategy}
    with RANK.group(f"store {name} {steps}"):
        try:
            guards = [] if shards else [ReplicaGuard(1)]
            module = fit_fragile(RANK.folder / name, recover, batches, trainer=trainer, callbacks=guards, **settings)
            digest = "" if shards else digest_of(module)
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
    skips, rolls_back = (Recover(rungs, ["nonfinite", "loss_spike"]) for rungs in (["skip", "lower_lr"], ["roll_back"]))
    spikes = Recover(faults=["loss_spike"], good_steps=4, lower_lr_steps=3)
    found = {
        "nan": outcome("nan", (12, 13, 15)),
        "nan, cut": outcome("cut", (12, 13, 15), steps=14),
        "nan, resumed": outcome("cut", (12, 13, 15), resumes=True),
        "spike": outcome("spike", {40: 1e3}, steps=46, recover=spikes),
        "sharded": outcome("sharded", {5}, steps=8, shards=True, recover=skips),
        "sharded, refused": outcome("refused", {5}, steps=8, shards=True, recover=rolls_back),
        "used up": outcome("used up", range(11, 80)),
    }
    RANK.leave(found)


if __name__ == "__main__":
    main()
