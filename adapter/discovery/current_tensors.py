"""Bare tensors as they are now: a trainer may put another one into the place of one that was found.

As in an update by hand, ``state["w"] = (state["w"] - rate * gradient).detach().requires_grad_()``, or a
``load_state_dict`` that takes the tensors of its payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .children import below
from .discover import Discovered, Found

__all__ = ["current", "currently_trained"]


def current(discovered: Discovered, found: Iterable[Found[Tensor]]) -> list[Found[Tensor]]:
    """Each of `found` with the tensor that is kept in its place now; where there is none, as it was found."""
    children: dict[str, dict[str, Any]] = {}
    now = []
    for each in found:
        value = _look_up(each.path, dict(discovered.roots), children)
        now.append(Found(each.path, each.name, value) if isinstance(value, Tensor) else each)
    return now


def currently_trained(discovered: Discovered) -> list[Found[Tensor]]:
    """The bare tensors of no optimizer that want a gradient, as they are now."""
    return [f for f in current(discovered, discovered.tensors) if f.value.requires_grad and f.value.is_leaf]


def _look_up(path: str, named: dict[str, Any], children: dict[str, dict[str, Any]]) -> Any:
    """What is at `path`, below one of the objects that are `named` by the beginning of it; None where nothing is."""
    while path not in named:
        where = next((start for start in named if path.startswith((f"{start}.", f"{start}["))), None)
        if where is None:
            return None
        if where not in children:
            children[where] = dict(below(where, named[where]))
        named = children[where]
    return named[path]
