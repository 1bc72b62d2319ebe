"""Arguments that may be one value or several."""

from __future__ import annotations

from typing import Any

__all__ = ["listed"]


def listed(value: Any) -> list[Any]:
    """An argument that may be a single value, as a list; None is none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
