"""What a resumed run takes over beside weights and optimizers: random states and gradients of each rank, positions."""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.tensor import DTensor

from ...adapter.plumbing.devices import random_states, restore_random_states
from ..hook.events import run_state_of
from .codec.digest import content_digests
from .selection import find_checkpoint
from .sharded.boxes import sharded_like
from .sharded.lazy_tensor import unsharded

__all__ = [
    "HoldsBareParameters",
    "ResumeState",
    "capture_parts",
    "capture_rng",
    "clear_gradients",
    "gather_gradients",
    "gradients_of_rank",
    "restore_gradients",
    "restore_rng",
    "restore_rng_of_rank",
    "stands_between_batches",
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
    names = [name for name, gradient in gradients.items() if gradient.layout == torch.strided]
    digests = dict(zip(names, content_digests([gradients[name].detach() for name in names]), strict=True))
    of_rank_zero = [digests]
    dist.broadcast_object_list(of_rank_zero, src=0)
    differing = {
        name: _by_itself(gradient)
        for name, gradient in gradients.items()
        if name not in digests or digests[name] != of_rank_zero[0].get(name)
    }
    parts: list[dict[str, torch.Tensor]] = gather({} if dist.get_rank() == 0 else differing)
    return [gradients, *parts[1:]] if parts else []


def _by_itself(gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` in memory of its own: a tensor that is sent takes all memory along that it is a part of."""
    is_part = gradient.layout == torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.detach().clone() if is_part else gradient


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


def stands_between_batches(trainer: pl.Trainer) -> bool:
    """Whether no batch is being trained and the epoch is not over; before the first batch that is true as well."""
    # Lightning declares the counters as a base class with fewer fields.
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # An epoch also ends, for Lightning, where ``max_steps`` ends the run within it; a longer run goes on with that.
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_epoch_over = is_last and epochs.processed == epochs.started
    return bool(batches.ready == batches.processed and not is_epoch_over)


def capture_parts(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    parts: dict[str, Any],
    *,
    is_between_batches: bool,
) -> None:
    """Add what `ResumeState` takes over to `parts` of a checkpoint. Collective.

    Args:
        trainer: The trainer that saves.
        pl_module: The module that it trains.
        parts: The checkpoint's own part of genlight.
        is_between_batches: Whether a batch was trained to its end and the next one of its epoch not begun.
    """
    parts["is_between_batches"] = is_between_batches
    parts["is_last_batch"] = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    if "rng" not in parts:
        parts["rng"] = gather(capture_rng(loader_generators(trainer)))
    held = dict(_gradients(pl_module)) if _needs_gradients(trainer, pl_module, is_between_batches) else {}
    gradients = {name: gradient for name, gradient in held.items() if not isinstance(gradient, DTensor)}
    if trainer.strategy.reduce_boolean_decision(bool(gradients), all=False):
        parts["gradients"] = gather_gradients(gradients)
    if sharded := {name: gradient for name, gradient in held.items() if isinstance(gradient, DTensor)}:
        parts[SHARDED_GRADIENTS] = sharded  # of which each rank saves its slice


def _needs_gradients(trainer: pl.Trainer, pl_module: pl.LightningModule, is_between_batches: bool) -> bool:
    if not pl_module.automatic_optimization:
        return True  # Only the module knows its windows; one that clears its gradients has none to store.
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_open = progress.current.ready % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    return is_open and is_between_batches


class ResumeState:
    """What was loaded of a checkpoint and is put back later, at the points from which a run draws on it."""

    def __init__(self) -> None:
        self._gradients: dict[str, Any] = {}
        self._rng: list[Any] | None = None
        self.is_within_epoch = False
        """Whether the run goes on between two batches of an epoch."""
        self._elapsed_before_s = 0.0
        self._started_at_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all attempts."""
        here = 0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s
        return self._elapsed_before_s + here

    def load(self, trainer: pl.Trainer, parts: dict[str, Any]) -> None:
        """Take what `capture_parts` added; random states are put back at once, and once more by `restore_rng`."""
        self._elapsed_before_s = parts.get("elapsed_s", 0.0)
        gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
        self._gradients = gradients | parts.get(SHARDED_GRADIENTS, {})
        self.is_within_epoch = bool(parts.get("is_between_batches")) and not parts.get("is_last_batch")
        if "rng" in parts:
            # Now, for what draws before the first batch; where batches went before, once more at the next one,
            # because making the loader's iterator anew draws what the interrupted epoch had drawn already.
            lost = restore_rng_of_rank(parts["rng"], trainer.global_rank)
            warn_of_lost_rng(lost, len(parts["rng"]), trainer.global_rank, trainer.world_size)
            if parts.get("is_between_batches"):
                self._rng = parts["rng"]

    @property
    def restores_rng_at_first_batch(self) -> bool:
        """Whether random states are put back at the first batch.

        After the last batch Lightning's loop goes on with an epoch whose iterator draws as it would have.
        """
        return self._rng is not None and self.is_within_epoch

    def begin_training(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put gradients back, and say on rank zero which loaders begin with their first batch again."""
        self._started_at_s = time.monotonic()
        if trainer.ckpt_path is not None:  # the run state of a checkpoint names the one before it
            run_state_of(trainer).latest_checkpoint_uri = _uri_of(trainer.ckpt_path)
        gradients, self._gradients = self._gradients, {}
        restore_gradients(pl_module, gradients)
        if self.is_within_epoch and trainer.is_global_zero:
            warn_of_loaders_without_position(trainer)
        self.is_within_epoch = False

    def restore_rng(self, trainer: pl.Trainer) -> None:
        """Put random states back; once, at the point from which a run draws as it did before."""
        states, self._rng = self._rng, None
        if states is not None:
            restore_rng_of_rank(states, trainer.global_rank, loader_generators(trainer))


def _uri_of(ckpt_path: str | os.PathLike[str]) -> str:
    """The record that `ckpt_path` means, else itself."""
    try:
        return str(find_checkpoint(ckpt_path))
    except FileNotFoundError:  # a URL
        return os.fspath(ckpt_path)
