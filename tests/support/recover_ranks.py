"""One rank of a training in which one rank alone meets faults: ``recover_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from rank_environment import Ranks
from recovered import Batches, Fragile, digest_of, fit_fragile
from torch import nn
from torch.optim.lr_scheduler import StepLR

from genlight.adapter import RecoveryError
from genlight.callbacks import Recover, ReplicaGuard

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
STEPS = 24


class Sharded(Fragile):
    """Of layers that can be sharded."""

    def configure(self, ctx):
        state = super().configure(ctx)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return {**state, "model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 7)}


def sharded(name: str, *rungs: str) -> dict:
    """What this rank knows after a training with FSDP 2."""
    store = FOLDER / f"store {name}"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), WORLD_SIZE), rank=RANK, world_size=WORLD_SIZE)
    strategy = ModelParallelStrategy(WORLD_SIZE, 1, save_distributed_checkpoint=False, process_group_backend="gloo")
    strategy.cluster_environment = Ranks(RANK, WORLD_SIZE)
    recover = Recover(rungs, ["nonfinite", "loss_spike", "exploding_gradients"], path=FOLDER / f"{name}.jsonl")
    batches = Batches({5} if RANK == 1 else (), seed=RANK)
    error = ""
    try:
        fit_fragile(
            *(FOLDER / name, recover, batches), trainer=Sharded(), steps=8, every=5, devices=2, strategy=strategy
        )
    except RecoveryError as raised:
        error = str(raised)
    dist.destroy_process_group()
    return {"ladder": recover.ladder.state_dict(), "next": batches.next, "calls": 0, "error": error, "digest": ""}


def outcome(name: str, faults: object, *, steps: int = STEPS, resumes: bool = False, kinds=("nonfinite",)) -> dict:
    """What this rank knows after a training."""
    store = FOLDER / f"store {name} {steps}"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), WORLD_SIZE), rank=RANK, world_size=WORLD_SIZE)
    path = FOLDER / f"{name}.jsonl"
    recover = Recover(faults=kinds, good_steps=4, lower_lr_steps=3, path=path)
    batches = Batches(faults if RANK == 1 else (), seed=RANK)
    trainer, error, digest = Fragile(), "", ""
    try:
        module = fit_fragile(
            *(FOLDER / name, recover, batches),
            trainer=trainer,
            steps=steps,
            resumes=resumes,
            callbacks=[ReplicaGuard(1)],
            devices=WORLD_SIZE,
            strategy=DDPStrategy(cluster_environment=Ranks(RANK, WORLD_SIZE), process_group_backend="gloo"),
        )
        digest = digest_of(module)
    except RecoveryError as raised:
        error = str(raised)
    dist.destroy_process_group()
    return {
        "ladder": recover.ladder.state_dict(),
        "next": batches.next,
        "calls": trainer.calls,
        "error": error,
        "digest": digest,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        "nan": outcome("nan", (12, 13, 15)),
        "nan, cut": outcome("cut", (12, 13, 15), steps=14),
        "nan, resumed": outcome("cut", (12, 13, 15), resumes=True),
        "spike": outcome("spike", {40: 1e3}, steps=46, kinds=("loss_spike",)),
        "sharded": sharded("sharded", "skip", "lower_lr"),
        "sharded, refused": sharded("refused", "roll_back"),
        "used up": outcome("used up", range(11, 80)),
    }
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
