"""What optimizers keep: usually a mapping for each parameter, but torch takes anything, under any key.

MADGRAD counts its steps in ``state["k"]``, a tensor; others keep one tensor, and no mapping, for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["map_values", "named_values"]


def named_values(entry: Any) -> Iterator[tuple[str, Any]]:
    """The values of one entry of ``optimizer.state``, by name; one that is not a mapping has the name ``state``."""
    if isinstance(entry, Mapping):
        yield from entry.items()
    else:
        yield "state", entry


def map_values(function: Callable[[Any], Any], entry: Any) -> Any:
    """An entry like this one with `function` applied to each of its values."""
    if isinstance(entry, Mapping):
        return {name: function(value) for name, value in entry.items()}
    return function(entry)
