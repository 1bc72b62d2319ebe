"""Snapshots of everything that a trainer class keeps, by path, with digests; the distance between two snapshots.

``genlight check`` and ``genlight compare`` compare two trainings only by their snapshots.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks.optimizer_state import named_values
from ...callbacks.witness.state import digest, values_in
from ..discovery.children import uncompiled
from ..discovery.discover import Discovered, Found, discover, walk_both
from ..plumbing.text import key_text, shortened

KINDS: Final = ("metric", "setting", "optimizer state", "weight")
"""Kinds compared between two loops, in the order in which a step makes them, so that a cause precedes its effects."""

EVERYTHING: Final = ("weight", "optimizer state", "setting", "value")
"""Kinds that a resume has to restore; a "value" is anything else that the class keeps: averages, counters, strings."""

_LONGEST = 100
"""Maximum length of a text in a description, in characters."""
_PLACE = re.compile(r"\[state|\[trainer|\[param_groups| \[")
"""Beginning of a parameter's place in the name of an optimizer state; the name of the optimizer is before it."""
NOISE = 1e-5
"""A weight whose first moment (``exp_avg``) is below this share of the largest in its optimizer has a gradient that
consists only of rounding errors around zero."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of the state of a trainer class at one moment, on the CPU."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tensors, arrays, numbers and strings, by kind and path."""

    def __getitem__(self, kind: str) -> Mapping[str, Any]:
        """Return the values of a kind, by path."""
        return self.values.get(kind, {})

    @functools.cached_property
    def digests(self) -> Mapping[str, str]:
        """Digest of type, shape and bits of each value, by path."""
        return {path: digest(value) for values in self.values.values() for path, value in values.items()}

    def differences(self, other: Snapshot) -> list[str]:
        """Return the paths at which the snapshots are not bit-equal, or that only one of them has, in order."""
        return differing_paths(self.digests, other.digests)


def differing_paths(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the paths with unequal digests, or that only one of the two has, in order."""
    return [path for path in dict.fromkeys([*first, *second]) if first.get(path) != second.get(path)]


def snapshot(
    state: Any,
    trainer: object,
    metrics: Mapping[str, float] | None = None,
    *,
    kinds: Iterable[str] = EVERYTHING,
    gather: bool = False,
    host: nn.Module | None = None,
) -> Snapshot:
    """Return copies of everything reachable from `state` and `trainer`.

    Args:
        state: The state that ``configure`` returned.
        trainer: The trainer instance.
        metrics: Metrics of the last step, under their reported names.
        kinds: The kinds to include, of `KINDS` and `EVERYTHING`.
        gather: Whether to gather sharded tensors (collective); otherwise only this rank's part is copied.
        host: The module that hosts the trainer; it is not part of the state.
    """
    discovered = discover(state, trainer, host=host)
    weights = live_weights(discovered)
    names = {id(tensor): name for name, tensor in weights.items()}
    values: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}

    def add(kind: str, path: str, value: Any) -> None:
        if kind in values:
            for name, leaf, is_code in leaves(path, value, gather=gather):
                values.setdefault("code" if is_code else kind, {})[name] = leaf

    for name, value in (metrics or {}).items():
        add("metric", name, value)
    for name, tensor in weights.items():
        add("weight", name, tensor)
    for found in discovered.optimizers:
        for kind, path, value in values_of_optimizer(found, names):
            # The `state` of a wrapper may belong to the optimizer it wraps; its `state_dict` follows as a "value".
            if not (kind == "optimizer state" and "value" in values and _has_own_state_dict(found.value)):
                add(kind, path, value)
    if "value" in values:
        for path, node in walk_both(state, trainer, host=host):
            if isinstance(node, LRScheduler | GradScaler) or _has_own_state_dict(node):
                values["value"] |= flatten(node.state_dict(), path)["value"]
            elif id(node) not in names and not isinstance(node, Mapping | list | tuple | deque):
                add("value", path, node)
    return Snapshot(values)


def flatten(value: Any, path: str) -> Snapshot:
    """Return the leaves of a storable payload by path; a shared object appears at each of its paths."""
    return Snapshot({"value": {name: leaf for name, leaf, _ in leaves(path, value)}})


def live_weights(discovered: Discovered) -> dict[str, Tensor]:
    """Return parameters and buffers of all discovered modules, and bare parameters, by path."""
    tensors = {
        f"{found.path}.{name}": tensor
        for found in discovered.modules
        for module in [_unwrap(found.value)]
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    bare = list(discovered.parameters)
    if not discovered.optimizers:
        bare += discovered.currently_trained()
    return tensors | {found.path: found.value for found in bare}


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside the trainer's own DistributedDataParallel, if it uses one."""
    return uncompiled(module.module if isinstance(module, DistributedDataParallel) else module)


def values_of_optimizer(found: Found[Optimizer], names: Mapping[int, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, path and value of settings and states.

    A parameter that is not in `names` is named by its place, such as ``param_groups[0][3]``.
    """
    places: dict[int, str] = {}
    for g, group in enumerate(found.value.param_groups):
        for i, parameter in enumerate(group["params"]):
            places.setdefault(id(parameter), names.get(id(parameter), f"param_groups[{g}][{i}]"))
        yield from (
            ("setting", f"{found.path}.param_groups[{g}].{key}", value)
            for key, value in group.items()
            if key != "params"
        )
    state: Mapping[Any, Any] = found.value.state
    for i, (key, entry) in enumerate(state.items()):
        place = places.get(id(key), f"state {i}" if isinstance(key, Tensor) else key_text(key))
        for name, value in named_values(entry):
            yield "optimizer state", f"{found.path}[{place}].{name}", value


def _has_own_state_dict(node: Any) -> bool:
    return isinstance(node, Optimizer) and type(node).state_dict is not Optimizer.state_dict


def leaves(path: str, value: Any, *, gather: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield the values of `values_in` as copies on the CPU; with `gather`, sharded tensors are complete."""
    for name, leaf, is_code in values_in(path, value):
        yield name, _copy(leaf, gather=gather), is_code


def _copy(value: Any, *, gather: bool) -> Any:
    """Return a dense copy; of a sharded tensor this rank's part or, with `gather`, all of it (collective)."""
    if not isinstance(value, Tensor):
        return copy.copy(value)
    if isinstance(value, DTensor):
        value = value.full_tensor() if gather else value.to_local()
    return value.to_dense().cpu().clone() if value.is_sparse else value.cpu().clone()


def compare_snapshots(
    plain: Snapshot, hosted: Snapshot, *, kinds: Iterable[str] = KINDS, exact: bool = True, floor: float = 0.0
) -> dict[str, dict[str, float]]:
    """Return the relative distances between the values of two loops, by kind and name.

    The distance of a weight, gradient, setting or metric is relative to its own norm. The distance of an optimizer
    state, such as ``exp_avg``, is relative to the largest norm of this state in the optimizer, because a gradient that
    is zero except for rounding differs in any two computations.

    Args:
        plain: The snapshot of the plain loop.
        hosted: The snapshot under genlight.
        kinds: The kinds to compare.
        exact: Whether both compute in the same order and precision. If not, weights whose gradient is nothing but
            rounding are skipped, because Adam makes full steps even from these.
        floor: Smallest norm that a distance is relative to.
    """
    scales = _scales(plain["optimizer state"])
    noise = frozenset[str]() if exact else _noisy_weights(plain["optimizer state"], scales)
    distances = {}
    for kind in kinds:
        a, b, sizes = plain[kind], hosted[kind], scales if kind == "optimizer state" else {}
        names = [name for name in dict.fromkeys([*a, *b]) if kind != "weight" or name not in noise]
        distances[kind] = {name: distance(a.get(name), b.get(name), at_least=sizes.get(name, floor)) for name in names}
    return distances


def distance(a: Any, b: Any, *, at_least: float = 0.0) -> float:
    """Return ‖b - a‖ / ‖a‖ in double precision; infinite if one is missing or not finite, or if shapes differ.

    Args:
        a: The reference: a tensor, a number or a string. Equal strings have the distance 0, others an infinite one.
        b: The value to compare.
        at_least: Smallest value used for ``‖a‖``.
    """
    if isinstance(a, str | bytes) or isinstance(b, str | bytes):
        return 0.0 if a == b else math.inf
    if a is None or b is None:
        return math.inf
    a, b = as_numbers(a), as_numbers(b)
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    if a.is_complex() or b.is_complex():
        a, b = a.to(torch.cdouble), b.to(torch.cdouble)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    apart = float((b - a).norm())
    if apart == 0.0:
        return 0.0
    size = max(float(a.norm()), at_least)
    return apart / size if size > 0 else math.inf


def is_real(value: Any) -> bool:
    """Whether `value` is a floating-point number or tensor; for others, such as counters, a distance means nothing."""
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def as_numbers(value: Any) -> Tensor:
    """Return a tensor or a number in double precision on the CPU; complex values stay complex."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    return tensor.to(torch.cdouble if tensor.is_complex() else torch.double)


def describe(value: Any) -> str:
    """Describe a value in a few words: a number or a string, or shape and norm of a tensor."""
    if value is None:
        return "absent"
    if isinstance(value, str | bytes) or (isinstance(value, np.ndarray) and value.dtype.kind not in "biufc"):
        return shortened(repr(value), _LONGEST)
    tensor = as_numbers(value)
    if tensor.numel() == 1:
        return str(tensor.item()) if tensor.is_complex() else f"{tensor.item():.8g}"
    return f"{'x'.join(map(str, tensor.shape))}, norm {float(tensor.norm()):.8g}"


def _scales(states: Mapping[str, Any]) -> dict[str, float]:
    """Return for each state the largest norm of that state in the same optimizer."""
    largest: dict[tuple[str, str], float] = {}
    tensors = {name: as_numbers(state) for name, state in states.items() if not isinstance(state, str | bytes)}
    norms = {name: float(state.norm()) for name, state in tensors.items() if not state.is_complex()}
    for name, norm in norms.items():
        if math.isfinite(norm):
            key = _optimizer_and_key(name)
            largest[key] = max(largest.get(key, 0.0), norm)
    return {name: largest.get(_optimizer_and_key(name), 0.0) for name in norms}


def _optimizer_and_key(name: str) -> tuple[str, str]:
    """Split a name: ``state.opt[state.model.0.weight].exp_avg`` gives ``state.opt`` and ``exp_avg``."""
    inner, _, key = name.rpartition(".")
    return _PLACE.split(inner)[0], key


def _noisy_weights(states: Mapping[str, Any], scales: Mapping[str, float]) -> frozenset[str]:
    """Return the weights whose first moment is negligible compared with the largest one."""
    found: set[str] = set()
    for name, state in states.items():
        if name.endswith(".exp_avg") and float(as_numbers(state).norm()) <= NOISE * scales[name]:
            place = name.removesuffix(".exp_avg")
            optimizer, _ = _optimizer_and_key(name)  # its name may contain brackets: ``state["opt"]``
            # The weight's name in a comparison of updates, and its name in a comparison of steps.
            found |= {place, place[len(optimizer) + 1 : place.rindex("]")]}
    return frozenset(found)


class Recording:
    """The snapshots of one loop, in a temporary folder so that a large model does not fill the memory."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="genlight-compare-")
        self._count = 0

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def add(self, state: Snapshot) -> None:
        """Store the snapshot of the next step; the first one is the snapshot before the first step."""
        torch.save(dict(state.values), self._file(self._count))
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> Snapshot:
        return Snapshot(torch.load(self._file(step), weights_only=True))

    def _file(self, step: int) -> Path:
        return Path(self._folder.name) / f"{step}.pt"
