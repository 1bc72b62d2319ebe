"""The states of optimizers that wrap others and of the wrapped ones, saved in a form that a resume can load.

Lookahead, SAM and similar optimizers often have a ``state_dict`` that skips the moments of the wrapped optimizer, or
that uses ``id`` as the key of slow weights, which another process cannot match. So both states are saved again, by the
index of each parameter. A wrapper may also share groups and states with the wrapped optimizer. Loading a state dict
ends this sharing, so it is restored here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...callbacks.checkpoint.sharded.slices import sharded_like, whole
from ...callbacks.optimizer_state import (
    map_values,
    named_values,
    parameters_of,
    restore_as_stored,
    restore_groups,
    unusual_devices,
)
from .children import Reference
from .discover import Discovered, Found, walk

_SETTINGS = (bool, int, float, complex, str, type(None), list, tuple, torch.Tensor)
"""Kinds of settings that a checkpoint can store."""


@dataclass(frozen=True)
class KeptByWrapper:
    """The state that `optimizer` keeps for each of its parameters, and the settings of its groups."""

    path: str
    optimizer: Optimizer
    wrapper: Optimizer
    """The optimizer that wraps `optimizer`; `optimizer` itself if none does."""
    shares_list: bool = False
    """Whether both had one list of groups after ``configure``: a schedule of `wrapper` then also drives `optimizer`."""
    shared_groups: tuple[int, ...] = ()
    """Indices of the groups that `optimizer` and `wrapper` shared after ``configure``."""
    shares_state: bool = False
    """Whether both shared one state after ``configure``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter index, and the settings of the groups.

        Values are not copied; only `whole` makes a full tensor from shards.
        """
        state = self.optimizer.state
        entries = {place: state[p] for place, p in enumerate(parameters_of(self.optimizer)) if p in state}
        groups = [
            {name: value for name, value in group.items() if name != "params" and isinstance(value, _SETTINGS)}
            for group in self.optimizer.param_groups
        ]
        stored = {"state": {place: map_values(whole, entry) for place, entry in entries.items()}, "groups": groups}
        devices = unusual_devices(self.optimizer)
        return {**stored, "devices": devices} if devices else stored

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the entries onto the devices that they had, sharded like their parameters."""
        state: dict[Any, Any] = self.optimizer.state
        named = {key: value for key, value in state.items() if isinstance(key, str)}  # entries of no parameter stay
        state.clear()
        state.update(named)
        for place, parameter in enumerate(parameters_of(self.optimizer)):
            if place in saved["state"]:
                entry = saved["state"][place]
                values = {name: _placed_like(parameter, name, value) for name, value in named_values(entry)}
                state[parameter] = values if isinstance(entry, Mapping) else values.popitem()[1]
        restore_as_stored(self.optimizer, saved, saved.get("devices", ()))
        restore_groups(self.optimizer, saved.get("groups", ()))
        if self.shares_list:
            self.optimizer.param_groups = self.wrapper.param_groups
        for at in self.shared_groups:
            self.optimizer.param_groups[at] = self.wrapper.param_groups[at]
        if self.shares_state and (other := cast("dict[Any, Any]", self.wrapper.state)) is not state:
            for key in [key for key in other if isinstance(key, str) and key not in state]:
                state[key] = other[key]
            self.wrapper.state = self.optimizer.state


def kept_by_wrappers(optimizers: tuple[Found[Optimizer], ...]) -> list[KeptByWrapper]:
    """Return the states to save in addition to the state dicts of `optimizers`; none for torch's own classes."""
    return [kept for found in optimizers for kept in _kept_by(found.path, found.value, set())]


def _kept_by(path: str, optimizer: Optimizer, seen: set[int]) -> Iterator[KeptByWrapper]:
    """Yield the state of `optimizer` if it wraps others, and the states of the optimizers that it wraps."""
    seen.add(id(optimizer))
    if type(optimizer).__module__.startswith("torch."):
        return
    inner = [
        (name, value)
        for name, value in vars(optimizer).items()
        if isinstance(value, Optimizer) and id(value) not in seen
    ]
    if inner:
        yield KeptByWrapper(f"{path}.<own>", optimizer, optimizer)
    for name, wrapped in inner:
        groups = zip(wrapped.param_groups, optimizer.param_groups, strict=False)
        shared = tuple(at for at, (one, other) in enumerate(groups) if one is other)
        shares_list, shares_state = wrapped.param_groups is optimizer.param_groups, wrapped.state is optimizer.state
        yield KeptByWrapper(f"{path}.{name}", wrapped, optimizer, shares_list, shared, shares_state)
        yield from _kept_by(f"{path}.{name}", wrapped, seen)


def _placed_like(parameter: torch.Tensor, name: str, value: Any) -> Any:
    """Return a saved value sharded like `parameter`, and on its device; a step counter keeps its own device."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return sharded_like(value, parameter)
    return value.clone() if name == "step" else value.to(parameter.device, copy=True)


def with_inner_optimizers(discovered: Discovered) -> list[Found[Optimizer]]:
    """Return the optimizers, and those that they wrap, as Lookahead wraps another optimizer."""
    optimizers = {id(each.value): each for each in discovered.optimizers}
    to_search = list(discovered.optimizers)
    while to_search:
        each = to_search.pop()
        for path, value in walk_optimizer(each):
            if isinstance(value, Optimizer) and id(value) not in optimizers:
                optimizers[id(value)] = inner = Found(path, each.name, value)
                to_search.append(inner)
    return list(optimizers.values())


def walk_optimizer(found: Found[Optimizer], *, tensors: list[Reference] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield everything that an optimizer holds, except for its groups and its state, with paths; see `walk`."""
    own = vars(found.value)
    skipped = {id(own[name]): own[name] for name in ("param_groups", "state", "defaults") if name in own}
    return walk(own, f"{found.path}.__dict__", seen=skipped, tensors=tensors)
