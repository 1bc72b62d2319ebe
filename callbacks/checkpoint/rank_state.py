"""What each rank adds to a checkpoint: its random state and the gradients of an unfinished accumulation window."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .codec.tensor_bytes import bytes_of
from .format.record import digest_of
from .rng import capture_rng, restore_rng
from .sharded.boxes import sharded_like
from .sharded.lazy_tensor import unsharded

__all__ = [
    "SHARDED_GRADIENTS",
    "HoldsBareParameters",
    "capture_rng_of_ranks",
    "gather_gradients",
    "gradients_of",
    "gradients_of_rank",
    "restore_gradients",
    "restore_rng_of_rank",
    "sharded_gradients_of",
]

log = logging.getLogger(__name__)

SHARDED_GRADIENTS = "sharded_gradients"
"""The member of a checkpoint's own part that holds them."""


@runtime_checkable
class HoldsBareParameters(Protocol):
    """A module with trained tensors that are none of its parameters."""

    def named_bare_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each with its name in the module's state dict."""
        ...


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in order, on rank zero; an empty list elsewhere. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, parts, dst=0)
    return parts or []


def capture_rng_of_ranks() -> list[Any]:
    """The random state of every rank on rank zero. Collective."""
    return gather(capture_rng())


def restore_rng_of_rank(states: list[Any], rank: int, world_size: int) -> None:
    """Take over this rank's random state; says what a change of the number of ranks loses."""
    if rank >= len(states):
        log.warning(
            "The checkpoint was saved by %d ranks: rank %d of %d has no random state in it and keeps its own",
            len(states),
            rank,
            world_size,
        )
        return
    if len(states) != world_size and rank == 0:
        log.warning(
            "The checkpoint was saved by %d ranks and is resumed by %d: random states are kept for the ranks that "
            "both have, and the run will not be bit-equal to one that was never interrupted",
            len(states),
            world_size,
        )
    for lost in restore_rng(states[rank]):
        log.warning("The checkpoint holds %s; the run will not be bit-equal to one that was never interrupted", lost)


def gradients_of(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Gradients of this rank that a coming update will still use, by parameter name; sharded ones left out."""
    return {name: gradient for name, gradient in _gradients(module) if not isinstance(gradient, DTensor)}


def sharded_gradients_of(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """The sharded ones, of which each rank saves its slice."""
    return {name: gradient for name, gradient in _gradients(module) if isinstance(gradient, DTensor)}


def _gradients(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in _trained(module):
        if parameter.grad is not None:
            yield name, parameter.grad


def _trained(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    for prefix, holder in module.named_modules():
        if isinstance(holder, HoldsBareParameters):
            for name, tensor in holder.named_bare_parameters():
                yield f"{prefix}.{name}", tensor


def gather_gradients(gradients: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Gradients of every rank on rank zero, of the others only those that differ from its own. Collective.

    After an update the gradients of replicas are equal, and to bring them all to rank zero would take as much memory as
    there are ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [gradients]
    digests = {name: _digest(gradient) for name, gradient in gradients.items()}
    of_rank_zero = [digests]
    dist.broadcast_object_list(of_rank_zero, src=0)
    differing = {
        name: gradient
        for name, gradient in gradients.items()
        if digests[name] is None or digests[name] != of_rank_zero[0].get(name)
    }
    parts: list[dict[str, torch.Tensor]] = gather({} if dist.get_rank() == 0 else differing)
    return [gradients, *parts[1:]] if parts else []


def _digest(gradient: torch.Tensor) -> str | None:
    """Equal for equal gradients; None for one whose bytes are not all there is to it."""
    return digest_of(bytes_of(gradient.detach())) if gradient.layout == torch.strided else None


def gradients_of_rank(parts: list[dict[str, torch.Tensor]], rank: int) -> dict[str, torch.Tensor]:
    """What this rank puts back: its own part, and of sharded parameters what rank zero holds."""
    return parts[0] | (parts[rank] if rank < len(parts) else {}) if parts else {}


def restore_gradients(module: pl.LightningModule, gradients: dict[str, torch.Tensor]) -> None:
    """Put saved gradients back where they were."""
    parameters = dict(_trained(module))
    for name, gradient in gradients.items():
        parameter = parameters.get(name)
        if parameter is None:
            log.warning("The checkpoint holds a gradient of %s, which this model does not have", name)
            continue
        gradient = gradient.to(parameter.device, parameter.dtype)
        parameter.grad = sharded_like(gradient, parameter) if isinstance(parameter, DTensor) else unsharded(gradient)
