"""One rank of a training in which one rank alone meets faults: ``recover_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from rank_environment import Ranks
from recovered import Batches, Fragile, digest_of, fit_fragile

from genlight.adapter import RecoveryError
from genlight.callbacks import Recover, ReplicaGuard

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
STEPS = 24


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
        "used up": outcome("used up", range(11, 80)),
    }
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
