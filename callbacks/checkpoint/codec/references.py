"""References of a state tree to stored tensors.

A reference is compared with the bytes in the file before memory is allocated for its tensor. The module imports neither
torch nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ..format.headers import ELEMENT_BYTES, TypedShape, element_bytes
from .state_tree import dtype_of

_WHOLE_NUMBERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
_MOST_ELEMENTS = 2**62
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

Stored = dict[tuple[str, str], TypedShape]
"""The tensors in a checkpoint's files, by file and key."""


class TensorReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The declared keys of a reference to a tensor."""

    file: str = ""
    key: str = ""
    dtype: str | None = None
    shape: list[_Size] | None = None
    stride: list[_Size] | None = None
    requires_grad: bool = False
    parameter: bool = False


def check_tensor(reference: Any, stored: Stored) -> TypedShape:
    """Compare a reference with the stored tensor; return the tensor's description, as the reference interprets it.

    Args:
        reference: The reference in the state tree.
        stored: The tensors in the files.

    Raises:
        ValueError: It is malformed, or does not match the bytes in the file.
    """
    facts = msgspec.convert(reference, TensorReference)
    where = f"{facts.file}:{facts.key}"
    entry = stored.get((facts.file, facts.key))
    if entry is None:
        raise ValueError(f"there is no tensor {where}")
    shape = list(entry.shape) if facts.dtype is None else facts.shape or []
    element = ELEMENT_BYTES[entry.dtype] if facts.dtype is None else element_bytes(facts.dtype)
    if element is None:  # a type that the format does not list; this torch may have it
        element = dtype_of(facts.dtype or "").itemsize
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {shape}")
    if math.prod(shape) * element != entry.nbytes:
        raise ValueError(f"{where} has {entry.nbytes} bytes, but its reference needs {math.prod(shape) * element}")
    if facts.stride is not None and not is_dense(shape, facts.stride):
        raise ValueError(f"the strides of {where} go beyond its bytes, or name some of them twice")
    if (facts.requires_grad or facts.parameter) and (facts.dtype or entry.dtype) in _WHOLE_NUMBERS:
        raise ValueError(f"{where} holds integers, which have no gradient")
    return entry if facts.dtype is None else TypedShape(facts.dtype, tuple(shape), entry.data_offsets)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their range without gaps or repetition, in any order of dimensions."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected and 0 not in shape:
            return False
        expected *= size
    return True
