"""Several ranks that train a stack of linear layers, of any number and width, under DDP and FSDP 2.

A few wide layers have millions of parameters; many narrow ones have thousands of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from genlight.adapter import FSDP2Strategy, StepResult
from genlight.callbacks import LogMetrics, ReplicaGuard

from .alternating import Alternation
from .hosts import Host, hosted_as
from .ranks import Environment

ROWS = 16


class MeanSquare:
    """A trainer class that brings the mean square of the outputs down, by plain SGD, and stores nothing itself."""

    def setup(self, ctx: Any) -> None: ...

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        state["optimizer"].zero_grad()
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
        return StepResult()

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Layers(MeanSquare):
    """The trainer class: `layers` linear layers of `width`, plain SGD; `wrap` wraps or shards the network."""

    def __init__(self, layers: int, width: int, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        self.layers, self.width, self.wrap = layers, width, wrap
        self.rows = torch.randn(ROWS, width)

    def configure(self, ctx: Any) -> dict[str, Any]:
        model = self.wrap(nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.layers)]))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return self.rows


def hosts_with_layers(rank: int, ranks: int, layers: int, width: int) -> dict[str, Host]:
    """Return the hosts; the floor is a bare loop with `DistributedDataParallel`, or with ``fully_shard``."""

    def loop(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        trainer = Layers(layers, width, wrap)
        state = trainer.configure(None)
        return lambda: trainer.train_step(trainer.rows, state, None)

    def by_hand(wrap: Callable[[nn.Module], nn.Module]) -> Host:
        def run(batches: Alternation, _: Path) -> None:
            step = loop(wrap)
            for _, _ in zip(range(batches.steps), batches, strict=False):
                step()

        return Host(run, lambda: loop(wrap))

    def hosted(wrap: Callable[[nn.Module], nn.Module], make: Callable[[Any], Any], guard: int = 0, **more: Any) -> Host:
        def run(batches: Alternation, folder: Path) -> None:
            strategy = make(more)
            strategy.cluster_environment = Environment(rank, ranks)
            callbacks = [LogMetrics(0), ReplicaGuard(every_n_steps=guard)]
            hosted_as(Layers(layers, width), batches, folder, strategy=strategy, devices=ranks, callbacks=callbacks)

        return Host(run, lambda: loop(wrap))

    def ddp(more: Any) -> Any:
        return DDPStrategy(**more)

    def fsdp(more: Any) -> Any:
        return FSDP2Strategy(**more)

    return {
        "bare DDP loop": by_hand(DistributedDataParallel),
        "genlight, DDP": hosted(DistributedDataParallel, ddp),
        "genlight, DDP, ReplicaGuard in every step": hosted(DistributedDataParallel, ddp, guard=1),
        "bare fully_shard loop": by_hand(fully_shard),
        "genlight, FSDP 2": hosted(fully_shard, fsdp),
        "genlight, FSDP 2, reshard_after_forward=False": hosted(fully_shard, fsdp, reshard_after_forward=False),
        "genlight, FSDP 2, reshard_after_forward=True": hosted(fully_shard, fsdp, reshard_after_forward=True),
    }
