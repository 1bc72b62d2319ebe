"""Trainer classes on the device, and the parts of their runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from zoo.base import Trainer
from zoo.runs import precision_of

from genlight.adapter.contract.types import TrainingJobSpec
from genlight.adapter.module.module import ContractModule
from support.device import PROCESS_GROUP, Wait, waits
from support.device.training import SimDDPStrategy, one_device
from support.rank import Ranks
from support.trainers import quiet_trainer


class Regression(Trainer):
    """A network with dropout; its batches are copied to the device during training."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.Tanh(), nn.Linear(12, 1))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return {name: column.to(ctx.device, non_blocking=True) for name, column in raw.items()}


class Penalised(Regression):
    """Differentiates a gradient again, like critics of a GAN."""

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        inputs = batch["x"].requires_grad_()
        output = state["model"](inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return (output - batch["y"]).square().mean() + slope.square().sum(1).mean()


class Pinned:
    """A loader of this rank's rows in pinned memory, with a position."""

    def __init__(self, steps: int) -> None:
        self.steps, self.next_step = steps, 0

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        while self.next_step < self.steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.next_step))
            self.next_step += 1
            rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
            yield {"x": x[rows].pin_memory(), "y": x.sum(1, keepdim=True).tanh()[rows].pin_memory()}

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = state["next_step"]


def strategy_of(kind: str) -> dict[str, Any]:
    """Return the arguments of a trainer for ``one``, ``ddp``, ``ddp of one bucket`` or ``fsdp``."""
    if kind == "one":
        return one_device()
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    strategy: Any
    if kind == "fsdp":
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False, process_group_backend=PROCESS_GROUP)
        strategy.cluster_environment = ranks
    else:
        size = 25 if "one bucket" in kind else 1e-6
        strategy = SimDDPStrategy(cluster_environment=ranks, process_group_backend=PROCESS_GROUP, bucket_cap_mb=size)
    return {"accelerator": "sim", "devices": 2, "strategy": strategy}


def fit(
    plugin: Any, kind: str, *, steps: int, callbacks: Sequence[Any] = (), precision: str = "32-true", **more: Any
) -> ContractModule:
    """Train on the device; `more` goes to ``Trainer.fit``."""
    settings = {"use_distributed_sampler": False, **strategy_of(kind), **precision_of(precision, "sim")}
    trainer = quiet_trainer(*callbacks, max_steps=steps, **settings)
    module = ContractModule(plugin, TrainingJobSpec(run_id="device", max_steps=steps, metric_every=0))
    trainer.fit(module, Pinned(steps), **more)
    return module


class CountWaits(pl.Callback):
    """Lists the waits between two steps, including those in hooks."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.found: list[Wait] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.counting = waits()
            self.found = self.counting.__enter__()
        if batch_idx == self.last:
            self.counting.__exit__(None, None, None)


def standard_callbacks(folder: Path) -> list[Any]:
    """Return all callbacks of a job that need no input; no cadence is due during the tests."""
    from genlight import callbacks

    often = 1000
    return [
        callbacks.StopRequests(),
        callbacks.LogMetrics(every_n_steps=often),
        callbacks.JobProgress(),
        callbacks.Goodput(),
        callbacks.SystemMonitor(),
        callbacks.WatchNonfinite("stop", every_n_steps=often),
        callbacks.WatchHangs(directory=folder / "hangs"),
        callbacks.Checkpoint(folder / "checkpoints", every_n_steps=often, save_final=False),
        callbacks.ReplicaGuard(),
        callbacks.Heartbeat(),
        callbacks.Diagnosis(often),
    ]
