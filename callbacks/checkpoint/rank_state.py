"""The state of each rank in a checkpoint: random states, gradients, and all values that differ from rank zero's.

Rank zero writes the checkpoint. Nearly all state is equal on all ranks and is stored once. Ranks compare digests of
the entries of ``state_dict``, of the weights and of the optimizers. An entry that differs (a generator seeded by rank,
a replay buffer, a hidden state) is sent to rank zero as a whole. If nothing differs, only digests are sent.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.devices import random_states, restore_random_states
from ...adapter.plumbing.generators import set_state, state_of
from ..optimizer_state import has_separate_state, restore_as_stored, unusual_devices
from ..rank_channel import Channel
from .codec.state_tree import Path, decode, encode, format_path
from .codec.tensors import TensorTable, content_digests, restore_flags
from .format.record import digest_of
from .loader_position import warn_of_lost_positions
from .positioned_loader import generators_of
from .sharded.slices import sharded_like, unsharded

log = logging.getLogger(__name__)

SHARDED_GRADIENTS = "sharded_gradients"
"""Member of a checkpoint's genlight part that holds sharded gradients."""
OPTIMIZER_DEVICES = "optimizer_devices"
"""Member that lists, for each optimizer, the tensors of its state that are on an unusual device."""

WITNESS = "witness"
"""Member of a checkpoint's genlight part with the identity of the training, which its witness file has as well."""


def loader_generators(trainer: pl.Trainer) -> list[torch.Generator]:
    """Return the generators of the training loaders."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else generators_of(CombinedLoader(loaders).flattened)


def capture_rng(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the random state of this process and of `generators`, as plain values and tensors."""
    return {
        "python": state_of(random),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "devices": random_states(),
        "generators": [generator.get_state() for generator in generators],
    }


def restore_rng(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> list[str]:
    """Restore a captured state. Generators are restored only if there are as many as were captured.

    Returns:
        The parts that could not be restored here, in words, such as a device that this process does not have.
    """
    set_state(random, state["python"])
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(state["numpy"])
    _restore_generators(state, generators)
    return restore_random_states(state["devices"])


def _restore_generators(state: dict[str, Any], generators: Sequence[torch.Generator]) -> None:
    saved = state["generators"]
    for generator, generator_state in zip(generators, saved if len(saved) == len(generators) else (), strict=False):
        generator.set_state(generator_state.cpu())


def restore_rng_of_rank(states: list[Any], rank: int, generators: Sequence[torch.Generator] = ()) -> list[str]:
    """Call `restore_rng` with this rank's state in `states`; a rank without a saved state keeps its own."""
    return restore_rng(states[rank], generators) if rank < len(states) else []


def _warn_of_lost_rng(lost: Sequence[str], saved_by: int, rank: int, world_size: int) -> None:
    """Warn once of random states that are lost because of missing devices or another number of ranks."""
    if saved_by != world_size and rank == 0:
        log.warning(
            "The checkpoint was saved by %s and is resumed by %d: ranks in both runs keep their random states, "
            "%s, and the run will not be bit-equal to one that was never interrupted",
            "1 rank" if saved_by == 1 else f"{saved_by} ranks",
            world_size,
            "others begin with new ones" if saved_by < world_size else "the others' are lost",
        )
    for what in lost:
        log.warning("The checkpoint holds %s; the run will not be bit-equal to one that was never interrupted", what)


def _warn_of_buckets(trainer: pl.Trainer) -> None:
    """Warn of torch's DDP, whose first step in a process sums gradients in other buckets than later steps.

    A sum of two ranks does not depend on their order. With `find_unused_parameters`, the buckets stay as they are.
    """
    ddp = trainer.strategy.model
    if not isinstance(ddp, DistributedDataParallel) or trainer.world_size <= 2 or not trainer.global_step:
        return
    if ddp.static_graph or not ddp.find_unused_parameters:
        log.warning(
            "The first step of this run will not be bit-equal to that of an uninterrupted run: DDP sorts gradients "
            "into new buckets after the first step of a process, and the order in which %d ranks add them up depends "
            "on their place in a bucket. The strategy `ddp_find_unused_parameters_true` keeps the buckets as they are",
            trainer.world_size,
        )


def _trained_tensors(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the trained tensors that submodules yield in `named_bare_parameters`."""
    yield from module.named_parameters()
    for prefix, holder in module.named_modules():
        for name, tensor in getattr(holder, "named_bare_parameters", tuple)():
            yield f"{prefix}.{name}", tensor


def _gather_gradients(
    gradients: dict[str, torch.Tensor | None], channel: Channel
) -> list[dict[str, torch.Tensor] | dict[str, torch.Tensor | None]]:
    """Return, on rank zero, its own gradients, and those in which each other rank differs from it. Collective.

    After an update the gradients of replicas are equal, and bringing all of them to rank zero would multiply the memory
    by the number of ranks. None stands for a gradient that a rank does not have.
    """
    by_rank: list[dict[str, torch.Tensor | None]] = [{}]
    for differing in differences_of_ranks({"gradients": gradients}, channel)[1:]:
        tree: dict[str, Any] = {"gradients": {}}
        apply_differences(tree, differing)
        by_rank.append(tree["gradients"])
    by_rank += [{} for _ in range(channel.size - len(by_rank))]
    return [_without_none(gradients), *by_rank[1:]] if channel.rank == 0 else []


def _without_none(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def gradients_of_rank(
    parts: Sequence[Mapping[str, torch.Tensor | None]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """Return the gradients that this rank restores: rank zero's, replaced by this rank's own if they differ.

    If another number of ranks saved them, return the mean over those ranks. The end of the accumulation window averages
    gradients over the ranks anyway, so no rank's share is lost or counts twice.
    """
    complete = [_without_none({**parts[0], **part}) for part in parts]
    if not parts or len(parts) == world_size:
        return complete[rank] if parts else {}
    names = dict.fromkeys(name for gradients in complete for name in gradients)
    by_name = {name: [gradients[name] for gradients in complete if name in gradients] for name in names}
    return {name: functools.reduce(torch.add, tensors) / len(complete) for name, tensors in by_name.items()}


def uncompiled_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that compiled modules add."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def restore_gradients(
    module: pl.LightningModule, gradients: dict[str, torch.Tensor], *, clears_others: bool = False
) -> None:
    """Restore saved gradients; with `clears_others`, remove the gradients of parameters for which none was saved.

    The values are copied into an existing gradient: `configure` may have made it a view into one tensor of all
    gradients.
    """
    parameters = {uncompiled_name(name): parameter for name, parameter in _trained_tensors(module)}
    gradients = {uncompiled_name(name): gradient for name, gradient in gradients.items()}
    for name in parameters.keys() - gradients.keys() if clears_others else ():
        parameters[name].grad = None
    for name, gradient in gradients.items():
        parameter = parameters.get(name)
        if parameter is None:
            log.warning("The checkpoint holds a gradient of %s, which this model does not have", name)
            continue
        gradient = gradient.to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.grad = sharded_like(gradient, parameter)
        elif parameter.grad is not None and parameter.grad.layout == gradient.layout:
            parameter.grad.detach().copy_(unsharded(gradient))
        else:
            parameter.grad = unsharded(gradient)


def restore_optimizers_as_stored(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], devices: Sequence[Any]
) -> None:
    """Call `restore_as_stored` for each of `optimizers`, with its state and the devices that `capture_parts` noted."""
    for at, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        if not has_separate_state(optimizer):
            restore_as_stored(optimizer, state, devices[at] if devices else ())


def _is_between_batches_now(trainer: pl.Trainer) -> bool:
    """Whether no batch is being trained and the epoch is not over; also true before the first batch."""
    # Lightning declares the counters as a base class with fewer fields.
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # For Lightning, an epoch also ends if ``max_steps`` ends the run within it; a longer run continues that epoch.
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_epoch_over = is_last and epochs.processed == epochs.started
    return bool(batches.ready == batches.processed and not is_epoch_over)


def capture_parts(
    trainer: pl.Trainer, pl_module: pl.LightningModule, parts: dict[str, Any], *, has_trained: bool, channel: Channel
) -> None:
    """Add the state that `ResumeState` restores to `parts` of a checkpoint. Collective.

    Args:
        trainer: The trainer that saves.
        pl_module: The module that it trains.
        parts: The genlight part of the checkpoint.
        has_trained: Whether a batch was completed since training began.
        channel: Brings each rank's own state to rank zero.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_between_batches = has_trained and _is_between_batches_now(trainer)
    parts |= {"is_between_batches": is_between_batches, "is_last_batch": progress.is_last_batch}
    if "rng" not in parts:
        parts["rng"] = channel.gather(capture_rng(loader_generators(trainer)))
    if any(unusual := [unusual_devices(optimizer) for optimizer in trainer.optimizers]):
        parts[OPTIMIZER_DEVICES] = unusual
    # With manual optimization only the module knows when it accumulates; after an update it may have no gradients.
    is_open = progress.current.ready % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    held: dict[str, torch.Tensor | None] = {}
    if not pl_module.automatic_optimization or (is_open and is_between_batches):
        held = {name: tensor.grad for name, tensor in _trained_tensors(pl_module)}
    # Include parameters without a gradient: ranks whose dictionaries have different keys would send all gradients.
    gradients = {name: gradient for name, gradient in held.items() if not isinstance(gradient, DTensor)}
    has_some = any(gradient is not None for gradient in gradients.values())
    if trainer.strategy.reduce_boolean_decision(has_some, all=False):
        parts["gradients"] = _gather_gradients(gradients, channel)
    if sharded := {name: gradient for name, gradient in held.items() if isinstance(gradient, DTensor)}:
        parts[SHARDED_GRADIENTS] = sharded  # each rank saves its slice of these


class ResumeState:
    """Loaded state that is restored later, at the points from which an uninterrupted run would use it."""

    def __init__(self) -> None:
        self._gradients: dict[str, Any] = {}
        self._optimizer_states: Sequence[Mapping[str, Any]] = ()
        self._optimizer_devices: Sequence[Any] = ()
        self._rng: list[Any] = []
        """Random states of all ranks, until `restore_generators` or `restore_rng` has restored them."""
        self._is_between_batches = False
        self.is_within_epoch = False
        """Whether the run resumes between two batches of an epoch.

        After the last batch, Lightning's loop begins a new epoch, whose iterator draws the same numbers as without a
        resume.
        """
        self.run = ""
        """Identity of the training that the checkpoint belongs to; empty if it keeps no witness."""
        self._elapsed_before_s = 0.0
        self._started_at_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all attempts."""
        here = 0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s
        return self._elapsed_before_s + here

    def load(self, trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
        """Take the state that `capture_parts` added; restore random states now, and again in `restore_rng`."""
        self._optimizer_states = checkpoint.get("optimizer_states", ())
        self._optimizer_devices = parts.get(OPTIMIZER_DEVICES, ())
        self._elapsed_before_s = parts.get("elapsed_s", 0.0)
        self.run = str(parts.get(WITNESS, ""))
        gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
        self._gradients = gradients | parts.get(SHARDED_GRADIENTS, {})
        self._is_between_batches = bool(parts.get("is_between_batches"))
        self.is_within_epoch = self._is_between_batches and not parts.get("is_last_batch")
        if "rng" in parts:
            # Restore now for code that draws before the first batch. If batches were trained before, restore again at
            # the next one: creating the loader's iterator again draws numbers that the interrupted epoch already drew.
            self._rng = parts["rng"]
            lost = restore_rng_of_rank(self._rng, trainer.global_rank)
            _warn_of_lost_rng(lost, len(self._rng), trainer.global_rank, trainer.world_size)

    def begin_training(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore gradients and optimizer states; rank zero warns of loaders that cannot be restored."""
        self._started_at_s = time.monotonic()
        restore_optimizers_as_stored(trainer.optimizers, self._optimizer_states, self._optimizer_devices)
        self._optimizer_states = self._optimizer_devices = ()
        gradients, self._gradients = self._gradients, {}
        restore_gradients(pl_module, gradients)
        if trainer.ckpt_path is not None and trainer.is_global_zero:
            warn_of_lost_positions(trainer, is_within_epoch=self.is_within_epoch)
            _warn_of_buckets(trainer)

    def restore_generators(self, trainer: pl.Trainer) -> None:
        """Restore the generators of loaders when a new epoch begins, before its iterators draw from them."""
        if not self.is_within_epoch:
            states, self._rng = self._rng, []
            for state in states[trainer.global_rank : trainer.global_rank + 1]:
                _restore_generators(state, loader_generators(trainer))

    def restore_rng(self, trainer: pl.Trainer) -> None:
        """Restore random states, once, at the point from which an uninterrupted run would draw from them."""
        if self._is_between_batches:
            restore_rng_of_rank(self._rng, trainer.global_rank, loader_generators(trainer))
        self._rng = []


Sources = dict[tuple[str, str], torch.Tensor]
Digests = dict[Path, str]
"""Digests of the entries of a tree, by path."""


@dataclass(frozen=True)
class RankDifference:
    """A value on a rank that differs from rank zero's."""

    path: Path
    """The member, and the key or index of the entry; only the member if the ranks have different entries in it."""
    value: Any

    def __str__(self) -> str:
        return format_path(self.path)


def differences_of_ranks(tree: dict[str, Any], channel: Channel) -> list[list[RankDifference]]:
    """Return the differences of each rank's `tree` from rank zero's, in the order of ranks, on rank zero. Collective.

    The entries of the members of `tree` are compared, each as a whole. All ranks have the same members. Sharded tensors
    are ignored: each rank stores its own slices of them anyway.

    Returns:
        An empty list if nothing differs, and on other ranks.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
        CheckpointError: An entry that differs between ranks holds a sharded tensor.
    """
    if channel.size == 1:
        return []
    digests = digests_of(tree)
    own = digest_of(json.dumps([[repr(path), digest] for path, digest in digests.items()]).encode())
    if len(set(channel.gather_everywhere(own))) == 1:
        return []
    digests_of_zero: Digests = channel.share(digests)
    differences = [] if channel.rank == 0 else list(_iterate_differences(tree, digests, digests_of_zero))
    packed = [_pack(path, value) for path, value in differences]
    return [[_unpack(*one) for one in sent] for sent in channel.gather(packed)]


def apply_differences(tree: dict[str, Any], differences: list[RankDifference]) -> None:
    """Set the values of one rank in the loaded `tree`, in place of rank zero's.

    Raises:
        BrokenCheckpointError: `tree` has no such place.
    """
    for differing in differences:
        *member, key = differing.path
        try:
            (tree[member[0]] if member else tree)[key] = differing.value
        except (LookupError, TypeError) as error:
            raise BrokenCheckpointError("the checkpoint", f"rank 0's state has no {differing}: {error!r}") from error


def _entries_of(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """Return the entries of dicts and lists in `tree`, by member and key or index; other members by their names."""
    entries: dict[Path, Any] = {}
    for name, member in tree.items():
        if type(member) in (dict, OrderedDict) and all(type(key) in (str, int) for key in member):
            entries |= {(name, key): value for key, value in member.items()}
        elif type(member) is list:
            entries |= {(name, index): value for index, value in enumerate(member)}
        else:
            entries[name,] = member
    return entries


def digests_of(tree: Mapping[str, Any]) -> Digests:
    """Return a digest of every entry of `tree`, by its path; values of tensors are hashed on their devices."""
    apart: dict[Path, tuple[Any, list[Any]]] = {}
    for path, value in _entries_of(tree).items():
        stored, table = _take_apart(path, value)
        apart[path] = (
            stored,
            [source for entry, source in zip(table.entries, table.sources, strict=True) if entry.box is None],
        )
    digests = iter(content_digests([source for _, sources in apart.values() for source in sources]))
    return {
        path: digest_of(json.dumps([stored, [next(digests) for _ in sources]]).encode())
        for path, (stored, sources) in apart.items()
    }


def _take_apart(path: Path, value: Any) -> tuple[Any, TensorTable]:
    table = TensorTable()
    return encode(value, table, root=path), table


def _iterate_differences(tree: Mapping[str, Any], own: Digests, digests_of_zero: Digests) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of each entry that differs from rank zero's."""
    entries = _entries_of(tree)
    other_members = {path[0] for path in own.keys() ^ digests_of_zero.keys()}
    for name in tree:
        if name in other_members:
            yield (name,), tree[name]
    for path, value in entries.items():
        if path[0] not in other_members and own[path] != digests_of_zero[path]:
            yield path, value


def _pack(path: Path, value: Any) -> tuple[Path, Any, Sources]:
    """Encode a value as for a file, to send it to rank zero. Unlike a pickle, it runs no code there."""
    stored, table = _take_apart(path, value)
    for _, key in table.sharded_tensors:
        raise CheckpointError(
            f"{key} is sharded, and {format_path(path)} differs between ranks: put sharded tensors and values that "
            "differ by rank into different entries of state_dict, or into different optimizers"
        )
    # Without the copy, a view would be sent with all of its memory.
    return (
        path,
        stored,
        {(e.file, e.key): source.cpu().clone() for e, source in zip(table.entries, table.sources, strict=True)},
    )


def _unpack(path: Path, stored: Any, sources: Sources) -> RankDifference:
    """Decode a value that another rank has packed."""
    return RankDifference(path, decode(stored, lambda of: restore_flags(sources[of["file"], of["key"]], of)))
