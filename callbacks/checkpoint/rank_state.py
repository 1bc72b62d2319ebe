"""What each rank keeps over a resume: random states, gradients of an open accumulation window, loader positions."""

from __future__ import annotations

import functools
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.tensor import DTensor

from ...adapter.plumbing.devices import random_states, restore_random_states
from .codec.tensor_bytes import bytes_of
from .format.record_file import digest_of
from .sharded.boxes import sharded_like
from .sharded.lazy_tensor import unsharded

__all__ = [
    "SHARDED_GRADIENTS",
    "capture_rng",
    "HoldsBareParameters",
    "clear_gradients",
    "capture_rng_of_ranks",
    "gather_gradients",
    "gradients_of",
    "gradients_of_rank",
    "loader_generators",
    "restore_gradients",
    "restore_rng",
    "restore_rng_of_rank",
    "sharded_gradients_of",
    "warn_of_lost_rng",
    "warn_of_loaders_without_position",
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


def capture_rng_of_ranks(generators: Sequence[torch.Generator] = ()) -> list[Any]:
    """The random state of every rank on rank zero, with those of its `generators`. Collective."""
    return gather(capture_rng(generators))


def restore_rng_of_rank(states: list[Any], rank: int, generators: Sequence[torch.Generator] = ()) -> list[str]:
    """Take over this rank's random state; one that the checkpoint does not have keeps its own.

    Returns:
        What could not be restored here, in words.
    """
    return restore_rng(states[rank], generators) if rank < len(states) else []


def warn_of_lost_rng(lost: Sequence[str], saved_by: int, rank: int, world_size: int) -> None:
    """Say once what of the random states is lost, by devices that are not here or by another number of ranks."""
    if saved_by != world_size and rank == 0:
        ranks = "1 rank" if saved_by == 1 else f"{saved_by} ranks"
        kept = "others begin with their own" if saved_by < world_size else "the others' are lost"
        log.warning(
            "The checkpoint was saved by %s and is resumed by %d: the ranks that both have keep their random states, "
            "%s, and the run will not be bit-equal to one that was never interrupted",
            ranks,
            world_size,
            kept,
        )
    for what in lost:
        log.warning("The checkpoint holds %s; the run will not be bit-equal to one that was never interrupted", what)


def loader_generators(trainer: pl.Trainer) -> list[torch.Generator]:
    """The generators that the training loaders were given, each once, in the order of the loaders.

    A loader of torchdata keeps its position, but not what its iterator drew from such a generator beside the order.
    """
    loaders = [] if trainer.train_dataloader is None else CombinedLoader(trainer.train_dataloader).flattened
    holders = (holder for loader in loaders for holder in (loader, getattr(loader, "sampler", None)))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def capture_rng(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The random state of this process and of `generators`, as plain values and tensors."""
    version, words, gauss = random.getstate()
    # The 625 words as one tensor, which is stored far faster than as many numbers.
    python = {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss}
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    state["devices"] = random_states()
    if generators:
        state["generators"] = [generator.get_state() for generator in generators]
    return state


def restore_rng(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> list[str]:
    """Take over a captured state; that of generators where as many are given as were captured.

    Returns:
        What could not be restored here, in words, such as a device that this process does not have.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    saved = state.get("generators", [])
    for generator, generator_state in zip(generators, saved if len(saved) == len(generators) else (), strict=False):
        generator.set_state(generator_state.cpu())
    return restore_random_states(state.get("devices", {}))


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
        name: _by_itself(gradient)
        for name, gradient in gradients.items()
        if digests[name] is None or digests[name] != of_rank_zero[0].get(name)
    }
    parts: list[dict[str, torch.Tensor]] = gather({} if dist.get_rank() == 0 else differing)
    return [gradients, *parts[1:]] if parts else []


def _by_itself(gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` in memory of its own: a tensor that is sent takes all memory along that it is a part of."""
    is_part = gradient.layout == torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.detach().clone() if is_part else gradient


def _digest(gradient: torch.Tensor) -> str | None:
    """Equal for equal gradients; None for one whose bytes are not all there is to it."""
    return digest_of(bytes_of(gradient.detach())) if gradient.layout == torch.strided else None


def gradients_of_rank(parts: list[dict[str, torch.Tensor]], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What this rank puts back: its own part, and of sharded parameters what rank zero holds.

    With another number of ranks it is the mean over those that saved: the gradients of an open window are averaged over
    the ranks in the end, and no rank's part of it may be lost or count twice.
    """
    if not parts or len(parts) == world_size:
        return parts[0] | parts[rank] if parts else {}
    wholes = [parts[0] | part for part in parts]
    names = dict.fromkeys(name for whole in wholes for name in whole)
    found = {name: [whole[name] for whole in wholes if name in whole] for name in names}
    return {name: functools.reduce(torch.add, of_ranks) / len(wholes) for name, of_ranks in found.items()}


def clear_gradients(module: pl.LightningModule) -> None:
    """Have no parameter hold a gradient."""
    for _, parameter in _trained(module):
        parameter.grad = None


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


def warn_of_loaders_without_position(trainer: pl.Trainer) -> None:
    """Name the training loaders that have no state, so that they begin with their first batch again.

    One whose ``begins_anew`` is true does so on purpose; its ``told_on_resume``, where it has that, says what is lost.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:  # a list of batches is one loader
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if getattr(loader, "begins_anew", False):
            told = getattr(loader, "told_on_resume", None)
            if told is not None:
                log.warning("%s", told)
        elif not is_stateful:
            log.warning(
                "The run goes on within an epoch, but its %s keeps no position: it begins with its first batch again. "
                "Use torchdata.stateful_dataloader.StatefulDataLoader (`pip install torchdata`), which takes the same "
                "arguments, give yours `state_dict` and `load_state_dict`, or save between epochs.",
                type(loader).__name__,
            )
