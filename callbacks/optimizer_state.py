"""Access to the state of any optimizer, and its restoration with the stored types and devices.

An optimizer usually keeps a mapping for each parameter, but torch accepts anything, under any key: MADGRAD counts its
steps in ``state["k"]``, a tensor; others keep a single tensor for a parameter.

``Optimizer.load_state_dict`` casts every tensor except ``step`` to the type of its parameter, and Lightning then moves
it to the device of the run. This changes NAdam's running product, moments in bfloat16 and fp32 masters of bfloat16
weights. `restore_as_stored` restores the stored values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .checkpoint.sharded.slices import sharded_like, unsharded

Place = tuple[Any, ...]
"""Number of a parameter, or another key of ``optimizer.state``, followed by keys and indices below it."""


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the tensors of `optimizer` in the order of its groups; a tensor in two groups appears twice."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def named_values(entry: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an entry of ``optimizer.state`` with their names; a single value has the name ``state``."""
    if isinstance(entry, Mapping):
        yield from entry.items()
    else:
        yield "state", entry


def map_values(function: Callable[[Any], Any], entry: Any) -> Any:
    """Return a copy of `entry` with `function` applied to each of its values."""
    if isinstance(entry, Mapping):
        return {name: function(value) for name, value in entry.items()}
    return function(entry)


def settings_and_counters(path: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the settings in an optimizer's groups, and of the integers in its state.

    Args:
        path: Prefix of the names.
        optimizer: Any optimizer.
    """
    for g, group in enumerate(optimizer.param_groups):
        yield from ((f"{path}.param_groups[{g}].{key}", value) for key, value in group.items() if key != "params")
    state: Mapping[Any, Any] = optimizer.state
    for i, (key, entry) in enumerate(state.items()):
        place = key if isinstance(key, str) else f"parameter {i}"
        for name, value in named_values(entry):
            if isinstance(value, int):
                yield f"{path}.state[{place}].{name}", value


def with_step_hooks(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose ``step`` calls step hooks; a wrapper without hooks is replaced by what it wraps.

    A wrapper that does not call the constructor of `torch.optim.Optimizer`, like opacus' DPOptimizer, has no hooks.
    """
    found: list[Optimizer] = []
    for optimizer in optimizers:
        if "_optimizer_step_pre_hooks" in vars(optimizer):
            found.append(optimizer)
        else:
            found += with_step_hooks(_inner(optimizer))
    return found


def unusual_devices(optimizer: Optimizer) -> list[tuple[Place, bool]]:
    """Find tensors of the state that torch and Lightning would load to a different device.

    Returns:
        Place of each tensor, and whether it is on the host; empty if the parameters are on the host.
    """
    parameters = list(parameters_of(optimizer))
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return []
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    on_device = {id(p) for g in optimizer.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    found = []
    for key, entry in optimizer.state.items():
        for place, tensor in _tensors(entry, (numbers.get(id(key), key),)):
            is_on_host = tensor.device.type == "cpu"
            # A load moves all but ``step`` to the device, and in a capturable or fused group ``step``, too.
            if is_on_host != (place[1:] == ("step",) and id(key) not in on_device):
                found.append((place, is_on_host))
    return found


def restore_as_stored(
    optimizer: Optimizer, stored: Mapping[str, Any], devices: Iterable[tuple[Sequence[Any], bool]] = ()
) -> None:
    """Give the state of `optimizer` the types, shapes and devices of the state dict that it has loaded.

    Args:
        optimizer: An optimizer that has loaded `stored`.
        stored: The state dict. Without a mapping ``state`` in it, nothing changes: only the optimizer's class knows
            how to restore such a state.
        devices: The result of `unusual_devices` when the state was saved.
    """
    entries, state = stored.get("state"), optimizer.state
    if not isinstance(entries, Mapping):
        return
    parameters, on_host = dict(enumerate(parameters_of(optimizer))), {tuple(place): flag for place, flag in devices}
    for number, entry in entries.items():
        parameter = parameters.get(number)
        key = number if parameter is None else parameter
        if key in state:
            like = parameter if parameter is not None else next(iter(parameters.values()), None)
            state[key] = _as_stored(entry, state[key], (number,), like, on_host)


def has_separate_state(optimizer: Optimizer) -> bool:
    """Whether `optimizer` wraps another one and both have a state; a state dict may then belong to either."""
    return any(inner.state is not optimizer.state for inner in _inner(optimizer))


def put_setting(group: dict[str, Any], name: str, value: Any) -> None:
    """Change a setting in a group of an optimizer."""
    if isinstance(group.get(name), Tensor):  # a step in a CUDA graph keeps reading this tensor
        group[name].fill_(value)
    else:
        group[name] = value


def restore_groups(optimizer: Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Copy the settings of `groups` to the groups of `optimizer`; parameters stay."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for name, value in saved.items():
            if name != "params":
                put_setting(group, name, value)


def _as_stored(stored: Any, loaded: Any, place: Place, parameter: Tensor | None, on_host: Mapping[Place, bool]) -> Any:
    """Return `loaded` with the type, shape and device of `stored`; see `restore_as_stored`."""
    if isinstance(stored, Tensor) and isinstance(loaded, Tensor):
        device = loaded.device
        if place in on_host and parameter is not None and parameter.device.type != "cpu":
            device = torch.device("cpu") if on_host[place] else parameter.device
        if (loaded.dtype, loaded.shape, loaded.device) == (stored.dtype, stored.shape, device):
            return loaded
        if isinstance(parameter, DTensor) and stored.shape == parameter.shape:
            return sharded_like(stored, parameter)
        return unsharded(stored).to(device)
    if isinstance(stored, dict) and isinstance(loaded, dict):  # in place, as it may be referenced elsewhere
        for key in stored.keys() & loaded.keys():
            loaded[key] = _as_stored(stored[key], loaded[key], (*place, key), parameter, on_host)
        return loaded
    if type(stored) in (list, tuple) and type(loaded) is type(stored) and len(stored) == len(loaded):
        pairs = enumerate(zip(stored, loaded, strict=True))
        return type(stored)(_as_stored(old, new, (*place, at), parameter, on_host) for at, (old, new) in pairs)
    return stored if isinstance(stored, str) else loaded  # `load_state_dict` breaks strings (`<generator …>`)


def _tensors(value: Any, place: Place) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(member, (*place, key))


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that `optimizer` wraps."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
