"""A rank whose group Lightning makes with settings of `DDPStrategy`; started twice by ``test_process_groups.py``.

Arguments: rank, world size, folder. Writes the backend and the timeout of each group to ``rank<rank>.json``.
"""

import functools
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from zoo import runs

from genlight.adapter.gradients.torch_internals import group_timeout
from support.rank import Ranks

TIMEOUT_S = 77


class AtTheEnd(pl.Callback):
    """Records the settings of each group before the group of the buckets is destroyed."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        of_buckets = pl_module.hosted_trainer.router.averaging._parameters._bucket_group
        groups = {"all": dist.group.WORLD, "buckets": of_buckets}
        is_own = of_buckets is not None and of_buckets is not dist.group.WORLD
        found = {name: [dist.get_backend(g), group_timeout(g).total_seconds()] for name, g in groups.items()}
        self.path.write_text(json.dumps({**found, "is its own": is_own}))


def main(rank, world_size, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Lightning's own call, except for the store of the ranks.
    dist.init_process_group = functools.partial(dist.init_process_group, init_method=f"file://{folder}/store")
    strategy = DDPStrategy(
        cluster_environment=Ranks(rank, world_size),
        process_group_backend="gloo",
        timeout=timedelta(seconds=TIMEOUT_S),
        bucket_cap_mb=1e-6,
    )
    runs.hosted_run(
        "Base",
        rank=rank,
        world_size=world_size,
        devices=world_size,
        strategy=strategy,
        callbacks=[AtTheEnd(folder / f"rank{rank}.json")],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
