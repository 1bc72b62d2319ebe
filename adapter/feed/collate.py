"""Convert record batches to torch tensors, without a copy if possible.

The tensors share memory with Arrow, and Arrow treats that memory as constant: change them in place only after
``clone()``. Memory that is mapped from a file cannot be written at all.

This module is separate from `arrow_feed` because it imports torch, and a feed of record batches does not need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.dlpack import from_dlpack

from ..contract.exceptions import InputError


def to_torch(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return the columns of `batch` by name.

    Numbers become 1-d tensors, fixed-size lists of numbers (also nested) and fixed-shape tensors become n-d tensors,
    both without a copy; booleans become bool tensors. Times and dates become integers of the column's unit and width.
    Lists of varying length, such as token ids, become one tensor as long as the longest row of the batch; shorter rows
    are padded with zeros. A second tensor, the column's name with ``_lengths``, has the number of values of each row:
    ``torch.arange(x.shape[1]) < x_lengths[:, None]`` is the mask. Structs become a dictionary, anything else (text,
    bytes, decimals, lists of lists, …) a list of Python values. Dictionary-encoded columns become the same as columns
    of their values.

    Args:
        batch: The rows.

    Raises:
        InputError: A column of numbers or of lists has nulls, which a tensor cannot hold, or a column has the name of
            the lengths of another one.
    """
    return _columns("", batch.schema.names, batch.columns)


def _columns(prefix: str, names: Sequence[str], columns: Sequence[pa.Array]) -> dict[str, Any]:
    """Return the converted columns by name; `prefix` is the path of the struct that has them, for messages."""
    found: dict[str, Any] = {}
    for name, column in zip(names, columns, strict=True):
        converted = _convert(f"{prefix}{name}", column)
        if isinstance(converted, tuple):
            if f"{name}_lengths" in names:
                raise InputError(
                    f"The lengths of the lists in column {prefix + name!r} would be named as column "
                    f"'{prefix}{name}_lengths'. Leave one of the two out by `columns`, or rename it."
                )
            converted, found[f"{name}_lengths"] = converted
        found[name] = converted
    return found


def _convert(name: str, array: pa.Array) -> Any:
    """Return a tensor, Python values, or a pair: lists as one padded tensor, and their lengths."""
    kind = array.type
    if isinstance(array, pa.FixedShapeTensorArray):
        tensor: torch.Tensor = _convert(name, array.storage)
        return tensor.view(len(array), *kind.shape)
    if isinstance(array, pa.ExtensionArray):
        return _convert(name, array.storage)
    if pa.types.is_dictionary(kind):
        return _convert(name, array.dictionary_decode())
    if pa.types.is_struct(kind):
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        return _columns(f"{name}.", fields, array.flatten())
    if _is_tensor(kind):
        return _tensor(name, array)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_tensor(kind.value_type):
        return _pad(name, array)
    return array.to_pylist()


def _is_tensor(kind: pa.DataType) -> bool:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_primitive(kind) and not pa.types.is_interval(kind))


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise InputError(
            f"Column {name!r} has {array.null_count} nulls in a batch of {len(array)} rows, for which a tensor has no "
            "place. Fill them, or write the files without these rows."
        )


def _tensor(name: str, array: pa.Array) -> torch.Tensor:
    """Return a tensor of fixed-width values."""
    _refuse_nulls(name, array)
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        inner = _tensor(name, array.flatten())
        return inner.view(len(array), kind.list_size, *inner.shape[1:])
    if pa.types.is_boolean(kind):
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    if pa.types.is_temporal(kind):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if len(array) == 0:
        return torch.from_numpy(array.to_numpy().copy())
    tensor: torch.Tensor = from_dlpack(array)
    return tensor


def _pad(name: str, array: pa.Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of different lengths as one padded tensor, and their lengths."""
    _refuse_nulls(name, array)
    values = _tensor(name, array.flatten())
    lengths = torch.from_numpy(pc.list_value_length(array).to_numpy().astype(np.int64))
    longest = int(lengths.max()) if len(lengths) else 0
    if len(values) == longest * len(lengths):
        return values.view(len(lengths), longest, *values.shape[1:]), lengths
    padded = values.new_zeros(len(lengths), longest, *values.shape[1:])
    padded[torch.arange(longest) < lengths[:, None]] = values
    return padded, lengths
