"""Rows of a replay buffer as Arrow has them: a schema for its columns, record batches in and out.

Columns are allocated once, so a row has a fixed size: numbers, booleans, times and dates, binary values of a fixed
length, and lists and tensors of a fixed shape. Text and lists of varying length have none. They would turn a ring that
is bounded in memory into a heap that has to be compacted while another thread samples, and no row of it could be drawn,
saved or linked without copying its neighbours. Store what trains instead: token ids in a list of a fixed size and the
number of tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import torch
from torch import Tensor

from ..contract.exceptions import InputError
from .collate import to_torch

__all__ = ["arrow_layout", "batch_of", "row_of", "rows_of"]

_DTYPES = {
    pa.bool_(): torch.bool,
    pa.int8(): torch.int8,
    pa.int16(): torch.int16,
    pa.int32(): torch.int32,
    pa.int64(): torch.int64,
    pa.uint8(): torch.uint8,
    pa.uint16(): torch.uint16,
    pa.uint32(): torch.uint32,
    pa.uint64(): torch.uint64,
    pa.float16(): torch.float16,
    pa.float32(): torch.float32,
    pa.float64(): torch.float64,
}
_TYPES = {dtype: kind for kind, dtype in _DTYPES.items()}


def row_of(schema: pa.Schema) -> dict[str, Tensor]:
    """A row by column, for the dtypes and shapes that a schema stands for.

    Raises:
        ValueError: Rows of a column have no fixed size; names each.
    """
    faults, row = _repeated(schema), {}
    for field in schema:
        try:
            dtype, shape = _dtype_and_shape(field.type)
            row[field.name] = torch.zeros(shape, dtype=dtype, device="cpu")
        except TypeError as error:
            faults.append(f"column {field.name!r} is of {error}")
    if faults:
        raise ValueError(
            "ReplayBuffer: "
            + "; ".join(faults)
            + ". Columns are allocated once: use numbers, booleans, times, and lists, tensors or binary of a fixed size"
        )
    return row


def _repeated(schema: pa.Schema) -> list[str]:
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    return [f"there are {schema.names.count(name)} columns named {name!r}" for name in repeated]


def _dtype_and_shape(kind: pa.DataType) -> tuple[torch.dtype, tuple[int, ...]]:
    if isinstance(kind, pa.FixedShapeTensorType):
        return _dtype_and_shape(kind.value_type)[0], tuple(kind.shape)
    if pa.types.is_fixed_size_list(kind):
        dtype, shape = _dtype_and_shape(kind.value_type)
        return dtype, (kind.list_size, *shape)
    if pa.types.is_fixed_size_binary(kind):
        return torch.uint8, (kind.byte_width,)
    if pa.types.is_temporal(kind) and kind.bit_width in (32, 64):
        return (torch.int64 if kind.bit_width == 64 else torch.int32), ()
    if kind not in _DTYPES:
        raise TypeError(str(kind))
    return _DTYPES[kind], ()


def arrow_layout(schema: pa.Schema) -> dict[str, str]:
    """What a checkpoint says of the types of columns."""
    return {field.name: str(field.type) for field in schema}


def rows_of(batch: pa.RecordBatch, schema: pa.Schema | None) -> dict[str, Tensor]:
    """The columns of `batch` as tensors that share its memory, but for booleans: Arrow packs eight into a byte.

    Raises:
        ValueError: Columns are not those of `schema`, where there is one, have no fixed size, or have nulls; lists all
            of these.
    """
    faults, rows = _repeated(batch.schema), {}
    if schema is not None:
        faults += [f"there is no column {name!r}" for name in batch.schema.names if name not in schema.names]
        faults += [f"column {name!r} is missing" for name in schema.names if name not in batch.schema.names]
    for field, column in zip(batch.schema, batch.columns, strict=True):
        wanted = None if schema is None or field.name not in schema.names else schema.field(field.name).type
        if wanted is not None and field.type != wanted:
            faults.append(f"column {field.name!r} is of {wanted}, not of {field.type}")
            continue
        try:
            _dtype_and_shape(field.type)
            rows[field.name] = _tensor(column, field)
        except (InputError, TypeError) as error:
            faults.append(f"column {field.name!r} is of {error}" if isinstance(error, TypeError) else str(error))
    if faults:
        raise ValueError("ReplayBuffer.extend: " + "; ".join(faults))
    return rows


def _tensor(column: pa.Array, field: pa.Field) -> Tensor:
    if pa.types.is_fixed_size_binary(field.type):
        size = field.type.byte_width
        nulls = column.null_count
        # Bytes have no type of their own in torch; a list of them has the same memory.
        first, last = column.offset * size, (column.offset + len(column)) * size
        values = pa.Array.from_buffers(pa.uint8(), last - first, [None, column.buffers()[1]], offset=first)
        if nulls:
            raise InputError(f"Column {field.name!r} has {nulls} nulls, for which a tensor has no place")
        column = pa.FixedSizeListArray.from_arrays(values, size)
    tensor: Tensor = to_torch(pa.record_batch([column], names=[field.name]))[field.name]
    return tensor


def batch_of(drawn: Mapping[str, Tensor], schema: pa.Schema | None) -> pa.RecordBatch:
    """Rows as a record batch that shares the memory of the tensors, but for booleans.

    Args:
        drawn: Columns on the CPU.
        schema: Types of the columns that it names; others are of the type that their tensor suggests.

    Raises:
        ValueError: A column is of a dtype that Arrow does not have.
    """
    given = {field.name: field for field in schema or ()}
    fields = [given.get(name) or pa.field(name, _type_of(name, tensor)) for name, tensor in drawn.items()]
    arrays = [_array(tensor.contiguous(), field.type) for tensor, field in zip(drawn.values(), fields, strict=True)]
    return pa.record_batch(arrays, schema=pa.schema(fields, None if schema is None else schema.metadata))


def _type_of(name: str, tensor: Tensor) -> pa.DataType:
    if tensor.dtype not in _TYPES:
        raise ValueError(f"column {name!r} is of {tensor.dtype}, which Arrow does not have; sample it as tensors")
    kind = _TYPES[tensor.dtype]
    for size in reversed(tensor.shape[1:]):
        kind = pa.list_(kind, size)
    return kind


def _array(tensor: Tensor, kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.FixedShapeTensorType):
        return pa.ExtensionArray.from_storage(kind, _array(tensor.reshape(len(tensor), -1), kind.storage_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_array(tensor.flatten(0, 1), kind.value_type), type=kind)
    if pa.types.is_boolean(kind):
        return pa.array(tensor.numpy())
    return pa.Array.from_buffers(kind, len(tensor), [None, pa.py_buffer(tensor.numpy())])
