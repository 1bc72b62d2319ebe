"""The state of each rank in a checkpoint: random states, gradients, and whatever differs from rank zero.

Rank zero writes the checkpoint. What the ranks have alike, nearly all of it, is stored once; what differs (a generator
seeded by rank, a replay buffer, a hidden state) is found by digests and brought to rank zero by its place in the tree.
Nothing but digests travels where nothing differs.
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
from torch.optim import Optimizer

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from ...adapter.plumbing.devices import random_states, restore_random_states
from ..optimizer_state import has_state_of_its_own, restore_as_stored, unusual_devices
from .codec.state_tree import Path, decode, encode, format_path
from .codec.tensors import TensorTable, content_digests, restore_flags
from .format.record import digest_of
from .loader_position import generators_of, warn_of_lost_positions
from .sharded.rank_channel import Channel
from .sharded.slices import sharded_like, unsharded

__all__ = [
    "Differing",
    "ResumeState",
    "apply_differences",
    "capture_parts",
    "capture_rng",
    "differences_of_ranks",
    "digests_of",
    "gradients_of_rank",
    "restore_gradients",
    "restore_optimizers_as_stored",
    "restore_rng",
    "restore_rng_of_rank",
    "uncompiled_name",
]

log = logging.getLogger(__name__)

SHARDED_GRADIENTS = "sharded_gradients"
"""The member of a checkpoint's own part that holds them."""
OPTIMIZER_DEVICES = "optimizer_devices"
"""The member that says, for each optimizer, which tensors of its state are on an unusual device."""


def loader_generators(trainer: pl.Trainer) -> list[torch.Generator]:
    """Those of the training loaders."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else generators_of(CombinedLoader(loaders).flattened)


def capture_rng(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The random state of this process and of `generators`, as plain values and tensors."""
    version, words, gauss = random.getstate()
    return {
        # The 625 words as one tensor, which is stored far faster than as many numbers.
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "devices": random_states(),
        "generators": [generator.get_state() for generator in generators],
    }


def restore_rng(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> list[str]:
    """Take over a captured state; that of generators where as many are given as were captured.

    Returns:
        What could not be restored here, in words, such as a device that this process does not have.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    np.random.set_state(state["numpy"])
    _restore_generators(state, generators)
    return restore_random_states(state["devices"])


def _restore_generators(state: dict[str, Any], generators: Sequence[torch.Generator]) -> None:
    saved = state["generators"]
    for generator, generator_state in zip(generators, saved if len(saved) == len(generators) else (), strict=False):
        generator.set_state(generator_state.cpu())


def restore_rng_of_rank(states: list[Any], rank: int, generators: Sequence[torch.Generator] = ()) -> list[str]:
    """As `restore_rng` with this rank's state of `states`; one that the checkpoint does not have keeps its own."""
    return restore_rng(states[rank], generators) if rank < len(states) else []


def _warn_of_lost_rng(lost: Sequence[str], saved_by: int, rank: int, world_size: int) -> None:
    """Say once what of the random states is lost, by devices that are not here or by another number of ranks."""
    if saved_by != world_size and rank == 0:
        log.warning(
            "The checkpoint was saved by %s and is resumed by %d: the ranks that both have keep their random states, "
            "%s, and the run will not be bit-equal to one that was never interrupted",
            "1 rank" if saved_by == 1 else f"{saved_by} ranks",
            world_size,
            "others begin with their own" if saved_by < world_size else "the others' are lost",
        )
    for what in lost:
        log.warning("The checkpoint holds %s; the run will not be bit-equal to one that was never interrupted", what)


def _trained(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and trained tensors that are none, where a part of `module` names some."""
    yield from module.named_parameters()
    for prefix, holder in module.named_modules():
        for name, tensor in getattr(holder, "named_bare_parameters", tuple)():
            yield f"{prefix}.{name}", tensor


def _gathered(
    gradients: dict[str, torch.Tensor | None], channel: Channel
) -> list[dict[str, torch.Tensor] | dict[str, torch.Tensor | None]]:
    """Gradients of every rank on rank zero; for other ranks only those that differ from its own. Collective.

    After an update the gradients of replicas are equal, and to bring them all to rank zero would take as much memory as
    there are ranks. None is a gradient that a rank does not have.
    """
    found: list[dict[str, torch.Tensor | None]] = [{}] * channel.size
    for rank, differing in enumerate(differences_of_ranks(gradients, channel)):
        found[rank] = {name: gradient for one in differing for name, gradient in one.members()}
    return [_present(gradients), *found[1:]] if channel.rank == 0 else []


def _present(gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def gradients_of_rank(
    parts: Sequence[Mapping[str, torch.Tensor | None]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The gradients that this rank restores: those of rank zero, but for what its own part has otherwise.

    With another number of ranks it is the mean over those that saved: the gradients of an open window are averaged over
    the ranks in the end, and no rank's part of it may be lost or count twice.
    """
    complete = [_present({**parts[0], **part}) for part in parts]
    if not parts or len(parts) == world_size:
        return complete[rank] if parts else {}
    names = dict.fromkeys(name for of_rank in complete for name in of_rank)
    found = {name: [of_rank[name] for of_rank in complete if name in of_rank] for name in names}
    return {name: functools.reduce(torch.add, of_ranks) / len(complete) for name, of_ranks in found.items()}


def uncompiled_name(name: str) -> str:
    """The name of a parameter or module without the parts that compiled modules add."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def restore_gradients(
    module: pl.LightningModule, gradients: dict[str, torch.Tensor], *, clears_others: bool = False
) -> None:
    """Put saved gradients back where they were; without a gradient on request where none was saved.

    One that `configure` has made, as a part of a tensor of all gradients say, gets the values and stays that part.
    """
    parameters = {uncompiled_name(name): parameter for name, parameter in _trained(module)}
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
    """`restore_as_stored` for each of `optimizers`, with its state and what `capture_parts` noted of it."""
    for at, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        if not has_state_of_its_own(optimizer):
            restore_as_stored(optimizer, state, devices[at] if devices else ())


def _stands_between_batches(trainer: pl.Trainer) -> bool:
    """Whether no batch is being trained and the epoch is not over; before the first batch that is true as well."""
    # Lightning declares the counters as a base class with fewer fields.
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # An epoch also ends, for Lightning, where ``max_steps`` ends the run within it; a longer run goes on with that.
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_epoch_over = is_last and epochs.processed == epochs.started
    return bool(batches.ready == batches.processed and not is_epoch_over)


def capture_parts(
    trainer: pl.Trainer, pl_module: pl.LightningModule, parts: dict[str, Any], *, has_trained: bool, channel: Channel
) -> None:
    """Add what `ResumeState` takes over to `parts` of a checkpoint. Collective.

    Args:
        trainer: The trainer that saves.
        pl_module: The module that it trains.
        parts: The checkpoint's own part of genlight.
        has_trained: Whether a batch was trained to its end since training began.
        channel: How the ranks bring to rank zero what they have for themselves.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_between_batches = has_trained and _stands_between_batches(trainer)
    parts |= {"is_between_batches": is_between_batches, "is_last_batch": progress.is_last_batch}
    if "rng" not in parts:
        parts["rng"] = channel.gather(capture_rng(loader_generators(trainer)))
    if any(unusual := [unusual_devices(optimizer) for optimizer in trainer.optimizers]):
        parts[OPTIMIZER_DEVICES] = unusual
    # Of manual optimization only the module knows its windows; one that clears its gradients has none to store.
    is_open = progress.current.ready % trainer.accumulate_grad_batches != 0 and not progress.is_last_batch
    held: dict[str, torch.Tensor | None] = {}
    if not pl_module.automatic_optimization or (is_open and is_between_batches):
        held = {name: tensor.grad for name, tensor in _trained(pl_module)}
    # A name for each parameter, or ranks that have other gradients would bring all of them to rank zero.
    gradients = {name: gradient for name, gradient in held.items() if not isinstance(gradient, DTensor)}
    has_some = any(gradient is not None for gradient in gradients.values())
    if trainer.strategy.reduce_boolean_decision(has_some, all=False):
        parts["gradients"] = _gathered(gradients, channel)
    if sharded := {name: gradient for name, gradient in held.items() if isinstance(gradient, DTensor)}:
        parts[SHARDED_GRADIENTS] = sharded  # of which each rank saves its slice


class ResumeState:
    """Loaded state that is restored later, at the points from which a run draws on it."""

    def __init__(self) -> None:
        self._gradients: dict[str, Any] = {}
        self._optimizer_states: Sequence[Mapping[str, Any]] = ()
        self._optimizer_devices: Sequence[Any] = ()
        self._rng: list[Any] = []
        """Random states of all ranks, until they were put back at such a point."""
        self._is_between_batches = False
        self.is_within_epoch = False
        """Whether the run goes on between two batches of an epoch.

        After the last batch Lightning's loop goes on with an epoch whose iterator draws as it would have.
        """
        self._elapsed_before_s = 0.0
        self._started_at_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all attempts."""
        here = 0.0 if self._started_at_s is None else time.monotonic() - self._started_at_s
        return self._elapsed_before_s + here

    def load(self, trainer: pl.Trainer, checkpoint: Mapping[str, Any], parts: dict[str, Any]) -> None:
        """Take what `capture_parts` added; random states are put back at once, and once more by `restore_rng`."""
        self._optimizer_states = checkpoint.get("optimizer_states", ())
        self._optimizer_devices = parts.get(OPTIMIZER_DEVICES, ())
        self._elapsed_before_s = parts.get("elapsed_s", 0.0)
        gradients = gradients_of_rank(parts.get("gradients", []), trainer.global_rank, trainer.world_size)
        self._gradients = gradients | parts.get(SHARDED_GRADIENTS, {})
        self._is_between_batches = bool(parts.get("is_between_batches"))
        self.is_within_epoch = self._is_between_batches and not parts.get("is_last_batch")
        if "rng" in parts:
            # Now, for what draws before the first batch; where batches went before, once more at the next one,
            # because making the loader's iterator anew draws what the interrupted epoch had drawn already.
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

    def restore_generators(self, trainer: pl.Trainer) -> None:
        """Put those of loaders back where a new epoch begins, before its iterators draw from them."""
        if not self.is_within_epoch:
            states, self._rng = self._rng, []
            for state in states[trainer.global_rank : trainer.global_rank + 1]:
                _restore_generators(state, loader_generators(trainer))

    def restore_rng(self, trainer: pl.Trainer) -> None:
        """Put random states back; once, at the point from which a run draws as it did before."""
        if self._is_between_batches:
            restore_rng_of_rank(self._rng, trainer.global_rank, loader_generators(trainer))
        self._rng = []


_LARGEST_LIST = 1_000
"""A list with more items is compared and stored as one value: a digest for each would take longer than it saves."""
_PLAIN = (bool, int, float, str, type(None))

Sources = dict[tuple[str, str], torch.Tensor]
Digests = dict[Path, str]
"""Of every node of a tree, by its path: of a container what its members are called, of a leaf what it holds."""


@dataclass(frozen=True)
class Differing:
    """A value that differs on a rank from that of rank zero."""

    path: Path
    """Keys and indices that lead to it."""
    value: Any

    def __str__(self) -> str:
        return format_path(self.path)

    def members(self) -> list[tuple[Any, Any]]:
        """Key and value of a member of the tree, or of all where the tree itself differs."""
        return list(self.value.items()) if not self.path else [(self.path[0], self.value)]


def differences_of_ranks(tree: dict[str, Any], channel: Channel) -> list[list[Differing]]:
    """The differences of each rank's `tree` from rank zero's, in the order of ranks; on rank zero alone. Collective.

    Sharded tensors are left out: each rank stores its own slices of them anyway.

    Returns:
        An empty list where nothing differs, and on other ranks.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
        CheckpointError: A container that differs between ranks holds a sharded tensor.
    """
    if channel.size == 1:
        return []
    digests = digests_of(tree)
    own = digest_of(json.dumps([[repr(path), digest] for path, digest in digests.items()]).encode())
    if len(set(channel.gather_everywhere(own))) == 1:
        return []
    of_zero: Digests = channel.share(digests)
    found = [] if channel.rank == 0 else list(_differing(tree, (), digests, of_zero))
    return [
        [_unpacked(*one) for one in sent] for sent in channel.gather([_packed(path, value) for path, value in found])
    ]


def apply_differences(tree: dict[str, Any], found: list[Differing]) -> None:
    """Put the values of one rank to their places in `tree`, which was loaded and has those of rank zero.

    Raises:
        BrokenCheckpointError: `tree` has no such place.
    """
    for differing in found:
        try:
            _with_value(tree, differing.path, differing.value)
        except (LookupError, TypeError) as error:
            raise BrokenCheckpointError("the checkpoint", f"it has no {differing} of rank 0: {error!r}") from error


def _with_value(node: Any, path: Path, value: Any) -> Any:
    """`node` with another value at `path`; changed in place where it can be."""
    if not path:
        return value
    key, *rest = path
    if isinstance(node, tuple):
        items = list(node)
        items[key] = _with_value(node[key], tuple(rest), value)
        return tuple(items)
    node[key] = _with_value(node[key], tuple(rest), value)
    return node


def _members(value: Any) -> list[tuple[Any, Any]] | None:
    """The members of a container, by key or index; None for a leaf."""
    if type(value) in (dict, OrderedDict):
        return list(value.items()) if all(type(key) in (str, int) for key in value) else None
    if type(value) in (list, tuple) and len(value) <= _LARGEST_LIST:
        return list(enumerate(value)) if any(not isinstance(member, _PLAIN) for member in value) else None
    return None


def digests_of(tree: Any) -> Digests:
    """A digest of every node of `tree`, by its path; values of tensors are compared on their devices."""
    found: dict[Path, tuple[Any, list[Any]]] = {}
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, value = stack.pop()
        members = _members(value)
        if members is None:
            stored, table = _taken_apart(path, value)
            found[path] = stored, [entry.source for entry in table.entries if entry.box is None]
        else:
            found[path] = [type(value).__name__, [key for key, _ in members]], []
            stack.extend(((*path, key), member) for key, member in reversed(members))
    digests = iter(content_digests([source for _, sources in found.values() for source in sources]))
    return {
        path: digest_of(json.dumps([content, [next(digests) for _ in sources]]).encode())
        for path, (content, sources) in found.items()
    }


def _taken_apart(path: Path, value: Any) -> tuple[Any, TensorTable]:
    table = TensorTable()
    return encode(value, table, root=path or ("checkpoint",)), table


def _differing(value: Any, path: Path, own: Digests, of_zero: Digests) -> Iterator[tuple[Path, Any]]:
    if own[path] != of_zero.get(path):
        yield path, value
        return
    for key, member in _members(value) or ():
        yield from _differing(member, (*path, key), own, of_zero)


def _packed(path: Path, value: Any) -> tuple[Path, Any, Sources]:
    """A value on its way to rank zero: as in a file, so that no class of the user is looked up to receive it."""
    stored, table = _taken_apart(path, value)
    for _, key in table.sharded_tensors:
        raise CheckpointError(
            f"{key} is sharded, and what holds it differs between ranks: a state_dict has to put the same sharded "
            "tensors in the same places on all ranks"
        )
    # A part of larger memory would be sent with all of it.
    return path, stored, {(entry.file, entry.key): entry.source.cpu().clone() for entry in table.entries}


def _unpacked(path: Path, stored: Any, sources: Sources) -> Differing:
    """A value that another rank has packed."""
    return Differing(path, decode(stored, lambda of: restore_flags(sources[of["file"], of["key"]], of)))
