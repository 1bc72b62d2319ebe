"""Parts that the programs of single ranks share: rank, process group, strategy and trainer.

`support.rank_processes` starts them: ``PROGRAM RANK WORLD_SIZE FOLDER ARGUMENTS…``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from genlight.callbacks import Checkpoint


class Ranks(LightningEnvironment):
    """Tells Lightning which rank this process is: the ranks are there already and know each other by a file."""

    creates_processes_externally = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._size = rank, world_size

    def local_rank(self) -> int:
        return self._rank

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size

    def set_global_rank(self, rank: int) -> None: ...

    def set_world_size(self, size: int) -> None: ...


@dataclass(frozen=True)
class Rank:
    """One of the ranks that work on a test together."""

    number: int
    world_size: int
    folder: Path
    """Folder of their store and their results."""

    @classmethod
    def of_command_line(cls) -> Rank:
        """This process, with one thread for torch and without warnings."""
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        return cls(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

    @contextlib.contextmanager
    def group(self, store: str = "store") -> Iterator[None]:
        """The process group of all ranks; `store` is another name for each group of a program."""
        meeting = dist.FileStore(str(self.folder / store), self.world_size)
        dist.init_process_group("gloo", store=meeting, rank=self.number, world_size=self.world_size)
        yield
        dist.destroy_process_group()

    def strategy(self, kind: str = "ddp", tensor_parallel: int = 1, **settings: Any) -> Strategy:
        """Lightning's strategy: ``ddp``, or ``sharded`` for a module that shards itself."""
        environment = Ranks(self.number, self.world_size)
        if kind == "ddp":
            return DDPStrategy(cluster_environment=environment, process_group_backend="gloo", **settings)
        sizes = (self.world_size // tensor_parallel, tensor_parallel)
        strategy = ModelParallelStrategy(*sizes, process_group_backend="gloo", **settings)
        strategy.cluster_environment = environment
        return strategy

    def trainer(self, *callbacks: pl.Callback, strategy: str | Strategy = "ddp", **settings: Any) -> pl.Trainer:
        """A quiet one of Lightning, on this rank."""
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.world_size,
            "strategy": self.strategy(strategy) if isinstance(strategy, str) else strategy,
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "default_root_dir": self.folder,
        }
        return pl.Trainer(**{**defaults, **settings})

    def leave(self, found: Any) -> None:
        """Write down what was found, as JSON, in ``rank<number>.json``."""
        (self.folder / f"rank{self.number}.json").write_text(json.dumps(found))
