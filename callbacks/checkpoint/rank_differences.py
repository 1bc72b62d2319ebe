"""What of a checkpoint differs from rank to rank: found by digests, stored once per rank, given back to each.

Rank zero writes the checkpoint. What the ranks have alike, nearly all of it, is stored once; what differs (a generator
seeded by rank, a replay buffer, a hidden state) is brought to rank zero by its place in the tree. Nothing but digests
travels where nothing differs.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from .codec.digest import content_digests
from .codec.state_tree import Path, decode, encode, format_path
from .codec.tensor_table import refuse_unknown
from .format.record_file import digest_of
from .sharded.boxes import is_sharded
from .sharded.lazy_tensor import WholeTensor, unsharded
from .sharded.rank_channel import Channel

__all__ = ["Differing", "apply_differences", "differences_of_ranks"]

_LARGEST_LIST = 1_000
"""A list with more items is compared and stored as one value: a digest for each would take longer than it saves."""
_PLAIN = (bool, int, float, str, type(None))

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


def differences_of_ranks(tree: dict[str, Any], channel: Channel) -> list[list[Differing]]:
    """What differs in `tree` on each rank from rank zero, in the order of ranks; on rank zero alone. Collective.

    Sharded tensors are left out: each rank stores its own slices of them anyway.

    Returns:
        An empty list where nothing differs, and on other ranks.

    Raises:
        UnstorableStateError: A value cannot be stored; names its path.
        CheckpointError: A container that differs between ranks holds a sharded tensor.
    """
    digests = _digests(tree)
    own = digest_of(json.dumps([[repr(path), digest] for path, digest in digests.items()]).encode())
    if len(set(channel.gather_everywhere(own))) == 1:
        return []
    of_zero: Digests = channel.share(digests)
    found = [] if channel.rank == 0 else list(_differing(tree, (), digests, of_zero))
    return [
        [Differing(path, decode(stored, _Unpacked(tensors))) for path, stored, tensors in sent]
        for sent in channel.gather([_packed(path, value) for path, value in found])
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
    """What is below a container that is compared member by member, by key or index; None for a leaf."""
    if type(value) in (dict, OrderedDict):
        return list(value.items()) if all(type(key) in (str, int) for key in value) else None
    if type(value) in (list, tuple) and len(value) <= _LARGEST_LIST:
        return list(enumerate(value)) if any(not isinstance(member, _PLAIN) for member in value) else None
    return None


def _digests(tree: Any) -> Digests:
    found: dict[Path, Any] = {}
    sink = _Digester()
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, value = stack.pop()
        members = _members(value)
        if members is None:
            found[path] = encode(value, sink, root=path)
        else:
            found[path] = [type(value).__name__, [key for key, _ in members]]
            stack.extend(((*path, key), member) for key, member in reversed(members))
    sink.complete()
    return {path: digest_of(json.dumps(content).encode()) for path, content in found.items()}


def _differing(value: Any, path: Path, own: Digests, of_zero: Digests) -> Iterator[tuple[Path, Any]]:
    if own[path] != of_zero.get(path):
        yield path, value
        return
    for key, member in _members(value) or ():
        yield from _differing(member, (*path, key), own, of_zero)


class _Digester:
    """A `TensorSink` that keeps a digest of each tensor and array in its place."""

    def __init__(self) -> None:
        self._by_memory: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._pending: list[tuple[dict[str, Any], Any]] = []

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        facts = [str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
        if is_sharded(tensor) or isinstance(tensor, WholeTensor):
            return {"sharded": facts}
        tensor = unsharded(tensor).detach()
        if tensor.layout == torch.sparse_coo:
            tensor = tensor.coalesce()
            return {"sparse": [self.add_tensor(tensor.indices(), path), self.add_tensor(tensor.values(), path), facts]}
        refuse_unknown(tensor, path)
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        reference = self._by_memory.get(memory)
        if reference is None:
            self._by_memory[memory] = reference = {}
            self._pending.append((reference, tensor))
        return {"tensor": facts, "values": reference}

    def add_array(self, array: Any, path: Path) -> dict[str, Any]:
        reference: dict[str, Any] = {}
        self._pending.append((reference, array))
        return {"array": reference}

    def complete(self) -> None:
        """Take the digests, of each device at once."""
        digests = content_digests([source for _, source in self._pending])
        for (reference, _), digest in zip(self._pending, digests, strict=True):
            reference["digest"] = digest


def _packed(path: Path, value: Any) -> tuple[Path, Any, list[Any]]:
    """A value on its way to rank zero: as in a file, so that no class of the user is looked up to receive it."""
    sink = _Packer()
    return path, encode(value, sink, root=path), sink.tensors


class _Packer:
    """A `TensorSink` that collects tensors and arrays on the host."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        if is_sharded(tensor) or isinstance(tensor, WholeTensor):
            raise CheckpointError(
                f"{format_path(path)} is sharded, and what holds it differs between ranks: a state_dict has to put the "
                "same sharded tensors in the same places on all ranks"
            )
        values = unsharded(tensor).detach().cpu()
        self.tensors.append(values if values.layout != torch.strided else values.clone())
        return {
            "index": len(self.tensors) - 1,
            "requires_grad": tensor.requires_grad,
            "parameter": isinstance(tensor, torch.nn.Parameter),
        }

    def add_array(self, array: np.ndarray[Any, Any], path: Path) -> dict[str, Any]:
        self.tensors.append(array)
        return {"index": len(self.tensors) - 1}


class _Unpacked:
    """A `TensorSource` over what a `_Packer` collected."""

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        values: torch.Tensor = self._tensors[reference["index"]]
        if reference["parameter"]:
            return torch.nn.Parameter(values, requires_grad=reference["requires_grad"])
        return values.requires_grad_(reference["requires_grad"])

    def array(self, reference: dict[str, Any]) -> Any:
        return self._tensors[reference["index"]]
