"""Placements of sharded optimizer state, stored in addition to the state in an optimizer's state dict.

State with the shape of its parameter, such as a moment, is sharded like the parameter. For other sharded state, its
placements are stored. Examples: one number for each row (row-wise Adagrad, Adam-mini), factors (Adafactor), projected
gradients (GaLore), and state that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ....adapter.contract.exceptions import UnstorableStateError
from ...optimizer_state import parameters_of
from .slices import shard_over, sharded_like

KEY = "placements"
"""Key in an optimizer's state dict, for the placements of each tensor, by its place in ``state``.

A list has, for each dimension of the mesh, the dimension of the tensor that is sharded over it; None if replicated.
"""


def with_placements(parameters: Sequence[torch.Tensor], state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with placements of the sharded state that does not follow its parameters.

    Args:
        parameters: The optimizer's parameters, by number.
        state_dict: Its state, in which sharded tensors are still sharded.
    """
    placements = {
        f"{key} {index}": [place.dim if isinstance(place, Shard) else None for place in leaf.placements]
        for key, index, leaf in _leaves(state_dict)
        if isinstance(leaf, DTensor) and not _follows(leaf, _parameter(parameters, key))
    }
    return {**state_dict, KEY: placements} if placements else state_dict


def complete_state(optimizer: Optimizer) -> None:
    """Replace the partial sums that ranks hold in the state of `optimizer`, such as a norm, by the sum. Collective.

    A checkpoint has the sum. If a run continued with partial sums, its rounding would differ from a resumed run's.

    Raises:
        UnstorableStateError: State is sharded in a way that a resume could not repeat.
    """

    def complete(value: Any) -> Any:
        if not _is_part(value):
            return value
        return value.redistribute(placements=[p if isinstance(p, Shard) else Replicate() for p in value.placements])

    for key, entry in list(optimizer.state.items()):
        if any(_is_part(leaf) for leaf in tree_flatten(entry)[0]):
            completed = tree_map(complete, entry)
            if isinstance(entry, MutableMapping):
                entry.update(completed)
            else:
                optimizer.state[key] = completed
    parameters = list(parameters_of(optimizer))
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for key, entry in optimizer.state.items():
        number = numbers.get(id(key), key)
        parameter = _parameter(parameters, number)
        for leaf in tree_flatten(entry)[0]:
            if isinstance(leaf, DTensor) and not (_follows(leaf, parameter) or _can_be_repeated(leaf, parameter)):
                how = f"{type(leaf).__name__} of {leaf.placements} over {leaf.device_mesh}"
                hint = "shard it over the mesh of its parameter, or keep it unsharded (`full_tensor()`)"
                raise UnstorableStateError(f"{type(optimizer).__name__}.state[{number!r}]", how, hint)


def _can_be_repeated(leaf: DTensor, parameter: torch.Tensor | None) -> bool:
    has_mesh = isinstance(parameter, DTensor) and parameter.device_mesh == leaf.device_mesh
    return has_mesh and all(type(place) in (Shard, Replicate) for place in leaf.placements)


def _is_part(value: Any) -> bool:
    return isinstance(value, DTensor) and any(place.is_partial() for place in value.placements)


def place_state(parameters: Sequence[torch.Tensor], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its tensors sharded again: by its placements, otherwise like their parameters."""
    placements = state_dict.get(KEY, {})
    state = {}
    for key, entry in state_dict["state"].items():
        leaves, structure = tree_flatten(entry)
        parameter = _parameter(parameters, key)
        placed = [_place(leaf, parameter, placements.get(f"{key} {index}")) for index, leaf in enumerate(leaves)]
        state[key] = tree_unflatten(placed, structure)
    return {**{name: value for name, value in state_dict.items() if name != KEY}, "state": state}


def _leaves(state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, int, Any]]:
    for key, entry in state_dict["state"].items():
        yield from ((key, index, leaf) for index, leaf in enumerate(tree_flatten(entry)[0]))


def _parameter(parameters: Sequence[torch.Tensor], key: Any) -> torch.Tensor | None:
    """Return the parameter with the number `key`; for state of no parameter, any sharded one, which has the mesh."""
    if type(key) is int and key < len(parameters):
        return parameters[key]
    return next((each for each in parameters if isinstance(each, DTensor)), None)


def _follows(leaf: DTensor, parameter: torch.Tensor | None) -> bool:
    return isinstance(parameter, DTensor) and leaf.shape == parameter.shape and leaf.placements == parameter.placements


def _place(value: Any, parameter: torch.Tensor | None, dimensions: Sequence[int | None] | None) -> Any:
    """Return a loaded value, sharded by `dimensions` or, without these, like its parameter."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if dimensions is None:
        return sharded_like(value, parameter) if value.shape == parameter.shape else value
    mesh = parameter.device_mesh
    if len(dimensions) != mesh.ndim:  # only the mesh of the save or the mesh of the load has a dimension for replicas
        sharded = next((each for each in dimensions if each is not None), None)
        dimensions = [sharded if isinstance(place, Shard) else None for place in parameter.placements]
    placements = [Replicate() if each is None else Shard(each) for each in dimensions]
    return shard_over(value, mesh, placements, parameter.device)
