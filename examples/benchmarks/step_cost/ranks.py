"""Several ranks over gloo, compared with a bare loop with ``DistributedDataParallel`` in the same processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from .alternating import Alternation
from .hosts import Host, hosted, standard, stock
from .workload import Manual, floor


class Environment(LightningEnvironment):
    """Ranks that this benchmark started itself."""

    creates_processes_externally = True

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks

    def local_rank(self) -> int:
        return self._rank

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._ranks

    def set_world_size(self, size: int) -> None: ...


def join(rank: int, ranks: int, store: str) -> None:
    """Make the process group of all ranks, for every host."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")


def start_ranks(command: list[str], ranks: int) -> int:
    """Run `command` once for each rank; the first rank prints. Return the highest exit code."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        started = [
            subprocess.Popen([sys.executable, *command, "--rank", str(rank), "--store", store]) for rank in range(ranks)
        ]
        return max(process.wait() for process in started)


def _replicated() -> Callable[[], None]:
    return floor(replicate=True)


def _bare(batches: Alternation, _: Path) -> None:
    step = _replicated()
    for _, _ in zip(range(batches.steps), batches, strict=False):
        step()


def hosts_of_ranks(rank: int, ranks: int) -> dict[str, Host]:
    """Return the hosts for several ranks."""

    def ddp() -> dict[str, Any]:
        return {"strategy": DDPStrategy(cluster_environment=Environment(rank, ranks)), "devices": ranks}

    return {
        "bare DDP loop": Host(_bare, _replicated),
        "genlight": Host(lambda b, f: hosted(b, f, **ddp()), _replicated),
        "genlight, standard": Host(lambda b, f: standard(b, f, **ddp()), _replicated),
        "Lightning, manual": Host(lambda b, f: stock(Manual, **ddp())(b, f), _replicated),
    }
