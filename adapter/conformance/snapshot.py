"""Everything that a trainer keeps, by path, for a bit-by-bit comparison."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.checkpoint.codec.tensor_bytes import as_uint8
from ...callbacks.checkpoint.codec.wrapper_tensors import is_wrapper, wrapped_tensors
from ..discovery.children import uncompiled
from ..discovery.discover import walk
from ..discovery.parameter_aliases import key_text

__all__ = ["differences", "flatten", "snapshot"]


def snapshot(state: Any, trainer: object) -> dict[str, Any]:
    """Copies of all tensors, arrays, numbers, texts and random generators that `state` and `trainer` lead to."""
    seen: dict[int, Any] = {}
    out: dict[str, Any] = {}
    nodes = [*walk(state, "state", seen=seen, without=trainer), *walk(trainer, "trainer", seen=seen)]
    for path, value in nodes:
        out.update(_leaves(path, value))
    return out


def flatten(value: Any, path: str) -> dict[str, Any]:
    """The leaves of a payload that could be stored, by path; of what stands at two places, those of both."""
    return dict(_flat(path, value))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    # Not by `walk` alone, which visits an object once: two groups of an optimizer hold one and the same pair of betas.
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(f"{path}[{key_text(key)}]", entry)
    elif isinstance(value, list | tuple | deque):
        for i, entry in enumerate(value):
            yield from _flat(f"{path}[{i}]", entry)
    else:
        for where, node in walk(value, path):
            yield from _leaves(where, node)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Paths at which two snapshots are not bit-equal, or of which only one has something; in order."""
    paths = [*a, *(path for path in b if path not in a)]
    return [path for path in paths if path not in a or path not in b or not _same(a[path], b[path])]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield from _of_tensor(path, value)
    elif isinstance(value, np.ndarray):
        yield path, value.copy()
    elif isinstance(value, nn.Module):
        for name, tensor in (*uncompiled(value).named_parameters(), *uncompiled(value).named_buffers()):
            yield from _of_tensor(f"{path}.{name}", tensor)
    elif isinstance(value, Optimizer | LRScheduler | GradScaler):
        yield from _of_state_dict(path, value.state_dict())
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, np.random.Generator):
        yield path, repr(value.bit_generator.state)
    elif isinstance(value, random.Random | np.random.RandomState):
        yield path, repr(value.getstate() if isinstance(value, random.Random) else value.get_state())
    elif isinstance(value, bool | int | float | complex | str | bytes):
        yield path, value


def _of_state_dict(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _of_state_dict(f"{path}.{key}", entry)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            yield from _of_state_dict(f"{path}[{i}]", entry)
    elif isinstance(value, Tensor):
        yield from _of_tensor(path, value)
    elif isinstance(value, bool | int | float | str):
        yield path, value


def _of_tensor(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if is_lazy(tensor) or tensor.is_meta:  # of a lazy module before its first batch, or of a skeleton
        return
    if is_wrapper(tensor):
        for name, part in wrapped_tensors(path, tensor):
            yield from _of_tensor(name, part)
        return
    tensor = tensor.detach()
    if tensor.is_sparse:  # which `torch.equal` does not take
        yield f"{path}.indices", tensor._indices().cpu().clone()
        yield f"{path}.values", tensor._values().cpu().clone()
    else:
        yield path, tensor.cpu().clone()


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b) or (a != a and b != b)  # NaN is the same as itself here


def _bits(tensor: Tensor) -> Tensor:
    """NaNs are unequal to themselves, and torch compares not every type; a run that reproduces the bits is exact."""
    return as_uint8(tensor.resolve_conj().resolve_neg().contiguous())
