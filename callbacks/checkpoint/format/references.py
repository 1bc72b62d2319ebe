"""References of a state tree to stored tensors and arrays: what they may say, and whether the file has those bytes.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from .safetensors_header import ELEMENT_BYTES, TORCH_TYPES

__all__ = ["ShardedFacts", "Stored", "array_type", "check_array", "check_tensor"]

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_MOST_ELEMENTS = 2**62
_DEEPEST_SPARSE = 2
_OTHER_ELEMENT_BYTES = {
    "complex128": 16,
    "complex32": 4,
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Of types of torch that the format does not know, so that their bytes are stored raw."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    dtype: str
    """As the format calls it."""
    shape: tuple[int, ...]
    nbytes: int


class ViewFacts(msgspec.Struct, frozen=True):
    """Which part of a stored tensor's bytes a view has."""

    dtype: str
    shape: list[_Size]
    stride: list[_Size]
    offset: _Size
    span: _Size


class ShardedFacts(msgspec.Struct, frozen=True):
    """A tensor that was saved in slices."""

    dtype: str
    shape: list[_Size]


class TensorReference(msgspec.Struct, frozen=True):
    """What a reference to a tensor may say; the value of a device is for torch to judge."""

    file: str = ""
    key: str = ""
    dtype: str | None = None
    shape: list[_Size] | None = None
    stride: list[_Size] | None = None
    device: Annotated[str, msgspec.Meta(pattern="^[a-z]{1,32}(:[0-9]{1,9})?$")] = "cpu"
    requires_grad: bool = False
    parameter: bool = False
    view: ViewFacts | None = None
    sharded: ShardedFacts | None = None
    sparse: tuple[dict[str, Any], dict[str, Any], list[_Size], bool] | None = None


class ArrayReference(msgspec.Struct, frozen=True):
    """What a reference to a NumPy array may say."""

    file: str
    key: str
    dtype: str | list[Any]
    shape: list[_Size]
    order: str = "C"


def check_tensor(reference: Any, stored: Mapping[tuple[str, str], Stored], *, depth: int = 0) -> ShardedFacts | None:
    """Compare a reference to a tensor with what is stored.

    Args:
        reference: As the state tree has it.
        stored: What the files hold, by file and key.
        depth: How many sparse tensors it is a part of.

    Returns:
        What it says of a tensor in slices, which are for the caller to look at; None for any other.

    Raises:
        ValueError: It is malformed, or the file has other bytes.
    """
    facts = msgspec.convert(reference, TensorReference)
    if facts.sparse is not None:
        if depth >= _DEEPEST_SPARSE:
            raise ValueError("a sparse tensor is made of sparse tensors")
        for part in facts.sparse[:2]:
            if check_tensor(part, stored, depth=depth + 1) is not None:
                raise ValueError("a sparse tensor is made of slices")
        return None
    if facts.sharded is not None:
        _elements(facts.sharded.shape)
        return facts.sharded
    where = f"{facts.file}:{facts.key}"
    found = stored.get((facts.file, facts.key))
    if found is None:
        raise ValueError(f"there is no tensor {where}")
    shape = list(found.shape) if facts.dtype is None else facts.shape or []
    element = ELEMENT_BYTES[found.dtype] if facts.dtype is None else _element_bytes(facts.dtype)
    if element is not None and _elements(shape) * element != found.nbytes:
        raise ValueError(f"{where} has {found.nbytes} bytes, but its reference needs {_elements(shape) * element}")
    if facts.stride is not None and _extent(shape, facts.stride) > _elements(shape):
        raise ValueError(f"the strides of {where} leave its bytes")
    if facts.view is not None:
        _check_view(facts.view, found, where)
    return None


def check_array(reference: Any, stored: Mapping[tuple[str, str], Stored]) -> None:
    """Compare a reference to an array with what is stored.

    Raises:
        ValueError: It is malformed, or the file has other bytes.
    """
    facts = msgspec.convert(reference, ArrayReference)
    found = stored.get((facts.file, facts.key))
    if found is None:
        raise ValueError(f"there is no array {facts.file}:{facts.key}")
    kind = array_type(facts.dtype)
    if kind.hasobject or _elements(facts.shape) * kind.itemsize != found.nbytes:
        raise ValueError(f"{facts.file}:{facts.key} has {found.nbytes} bytes, but its reference is to others")


def array_type(description: str | list[Any]) -> Any:
    """The NumPy type of a reference: its name, or the fields of a structured one, whose tuples JSON made lists."""
    import numpy as np

    return np.dtype(description) if isinstance(description, str) else np.lib.format.descr_to_dtype(_tuples(description))


def _check_view(view: ViewFacts, found: Stored, where: str) -> None:
    element = _element_bytes(view.dtype) or 1
    _elements(view.shape)
    if view.offset + view.span > found.nbytes or _extent(view.shape, view.stride) * element > view.span:
        raise ValueError(f"a view of {where} leaves its bytes")


def _element_bytes(dtype: str) -> int | None:
    """Size of an element of a torch type; None for one that is not known here."""
    return ELEMENT_BYTES[TORCH_TYPES[dtype]] if dtype in TORCH_TYPES else _OTHER_ELEMENT_BYTES.get(dtype)


def _elements(shape: Sequence[int]) -> int:
    count = math.prod(shape)
    if count > _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {list(shape)}")
    return count


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, both included; 0 for an empty tensor."""
    if len(shape) != len(stride):
        raise ValueError(f"the shape {list(shape)} and the strides {list(stride)} have other lengths")
    if 0 in shape:
        return 0
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def _tuples(description: list[Any]) -> list[Any]:
    return [
        tuple(
            _tuples(part) if isinstance(part, list) and index == 1 else _tuple(part) for index, part in enumerate(field)
        )
        for field in description
    ]


def _tuple(part: Any) -> Any:
    return tuple(part) if isinstance(part, list) else part
