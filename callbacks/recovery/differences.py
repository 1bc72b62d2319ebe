"""Where two trees of saved values differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["first_difference"]


def first_difference(expected: Any, actual: Any, again: Any, path: str = "") -> str | None:
    """The path of the first value of `actual` that is not the `expected` one; None where all are.

    Args:
        expected: What a checkpoint holds.
        actual: What there is, a list or a tuple alike, on any device.
        again: What there is a moment later: what differs between the two, such as a time, has no fixed value.
        path: Of all three.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if expected.keys() != actual.keys():
            return path
        names = ((f"{path}[{name!r}]", name) for name in expected)
        return next(
            filter(None, (first_difference(expected[n], actual[n], _at(again, n), at) for at, n in names)), None
        )
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(expected) != len(actual):
            return path
        pairs = enumerate(zip(expected, actual, strict=True))
        found = (first_difference(saved, now, _at(again, i), f"{path}[{i}]") for i, (saved, now) in pairs)
        return next(filter(None, found), None)
    return None if _are_equal(expected, actual) or not _are_equal(actual, again) else path


def _at(values: Any, key: Any) -> Any:
    try:
        return values[key]
    except (LookupError, TypeError):
        return None


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return _are_equal_tensors(one, other)
    numpy = sys.modules.get("numpy")
    if numpy is not None and (isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray)):
        one, other = numpy.asarray(one), numpy.asarray(other)
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if getattr(type(one), "__eq__", None) is object.__eq__:
        return True  # nothing but identity to go by
    return bool(one == other) or (bool(one != one) and bool(other != other))


def _are_equal_tensors(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    one, other = one.detach().cpu(), other.detach().cpu()
    return bool(((one == other) | ((one != one) & (other != other))).all())
