"""A callback that notices when replicas drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..adapter.contract.exceptions import ReplicaDriftError
from .hook.cadence import Boundaries, StepCadence
from .hook.hook import Hook
from .hook.listeners import skippable

__all__ = ["ReplicaGuard"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaGuard(Hook):
    """Compares parameters and buffers across the ranks, bit by bit, and ends the run when they differ.

    Data parallel ranks must hold equal weights. When they do not, training goes on, silently, with as many models as
    there are ranks. The usual causes: gradients that were not averaged, random numbers that differ in a place that
    must not (weight noise, say), an update that only one rank made, faulty hardware.

    A check reads each tensor once, on its device, and sends 8 bytes a tensor and rank: on one CPU core 0.05 ms for a
    million fp32 parameters in one tensor, and 5 µs a tensor. Sharded tensors are not replicas and are left out. With
    one rank nothing is done.

    Args:
        every_n_steps: Check when the step crosses a multiple of this; 0 is off. The end of training is always checked,
            unless this is off.

    Raises:
        ValueError: `every_n_steps` is negative.
    """

    critical = True
    ranks = "all"
    every_n_steps = StepCadence()

    def __init__(self, every_n_steps: int = 1000) -> None:
        self.every_n_steps = every_n_steps
        self._checked_step = 0
        self._boundaries = Boundaries(self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checked_step = trainer.global_step
        self._boundaries = Boundaries(self, trainer.global_step)

    @skippable
    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._boundaries.crosses(trainer.global_step):
            self._check(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every_n_steps and trainer.global_step > self._checked_step:
            self._check(trainer, pl_module)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checked_step = trainer.global_step
        if trainer.world_size > 1:
            check_replicas(pl_module, trainer.global_step)


def check_replicas(module: torch.nn.Module, step: int) -> None:
    """Compare the parameters and buffers of `module` across all ranks; to be called by all of them.

    Raises:
        ReplicaDriftError: On every rank; names the first tensor that differs and the ranks that hold each version.
    """
    tensors = dict(_replicated(module))
    if not tensors:
        return
    device = next(iter(tensors.values())).device
    mine = torch.stack([digest(t).to(device) for t in tensors.values()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    all_ranks = torch.stack(everyone).cpu()
    differs = (all_ranks != all_ranks[0]).any(0)
    if not differs.any():
        return
    first = int(differs.nonzero()[0])
    versions: dict[int, list[int]] = {}
    for rank, value in enumerate(all_ranks[:, first].tolist()):
        versions.setdefault(value, []).append(rank)
    groups = " and ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in versions.values())
    raise ReplicaDriftError(
        f"after step {step} {int(differs.sum())} of {len(tensors)} tensors differ between ranks, the first is "
        f"{list(tensors)[first]}: {groups} hold different values. Likely {_cause(list(tensors), differs)}."
    )


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit number of a tensor's bits, on its device; NaNs compare by their bits, too."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0:
        # Whole words need no conversion, which is most of the cost; a view of them must begin at one.
        flat = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
        return flat.view(torch.int64).sum()
    return flat.view(_BITS[size]).sum(dtype=torch.int64)


def _replicated(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, DTensor) and tensor.layout is torch.strided:
            yield name, tensor


def _cause(names: list[str], differs: Tensor) -> str:
    drifted = [name for name, differ in zip(names, differs.tolist(), strict=True) if differ]
    if all(name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in drifted):
        return "statistics of a norm layer that each rank computes from its own rows; SyncBatchNorm makes them equal"
    if 2 * len(drifted) > len(names):
        return "gradients that are not averaged: a backward outside of `train_step`, or ranks that began differently"
    return "an update that not every rank made, or random numbers that differ between ranks, in that module"
