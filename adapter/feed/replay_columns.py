"""Where the columns of a replay buffer are, and whether rows belong into them."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contract.exceptions import ReplayWriterError
from ..plumbing.file_lock import FileLock, LockHeldError
from ..plumbing.safe_open import make_directory, open_own

__all__ = ["allocate", "as_tensors", "is_whole_number", "row_faults"]


def allocate(
    capacity: int, row: Mapping[str, Tensor], directory: Path | None
) -> tuple[dict[str, Tensor], FileLock | None]:
    """Columns of zeros, in memory or in files of `directory`, with the lock that keeps others from these.

    Raises:
        ReplayWriterError: `directory` is in use.
    """
    if directory is None:
        return {
            name: torch.zeros((capacity, *value.shape), dtype=value.dtype, device="cpu") for name, value in row.items()
        }, None
    make_directory(directory)
    try:
        lock = FileLock(directory / "writer.lock")
    except LockHeldError as error:
        holder = "" if error.pid is None else f" of process {error.pid}"
        raise ReplayWriterError(
            f"{directory} is used by another replay buffer{holder}; name another directory"
        ) from None
    # Files are numbered: the name of a column may be any text.
    mapped = enumerate(row.items())
    return {name: _mapped(directory / f"column-{n}.bin", capacity, value) for n, (name, value) in mapped}, lock


def _mapped(path: Path, capacity: int, value: Tensor) -> Tensor:
    elements = capacity * math.prod(value.shape)
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, max(elements * value.element_size(), 1))
        memory = mmap.mmap(descriptor, max(elements * value.element_size(), 1))
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=value.dtype, count=elements).reshape(capacity, *value.shape)


def as_tensors(values: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Columns as tensors that keep no graph of what they were computed from, and what is wrong with the others."""
    if not isinstance(values, Mapping):
        return {}, [f"expected rows by column, but received a {type(values).__qualname__}"]
    tensors, faults = {}, []
    for name, value in values.items():
        try:
            tensors[name] = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError):
            faults.append(f"column {name!r} is not a tensor, and none can be made of a {type(value).__qualname__}")
    return tensors, faults


def is_whole_number(value: Any) -> bool:
    """Whether `value` counts something; a truth value does not."""
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def row_faults(given: Mapping[str, Tensor], row: Mapping[str, Tensor], capacity: int, streams: int) -> list[str]:
    """What is wrong with rows for a buffer of such a `row`; a phrase each."""
    faults = [f"there is no column {name!r}" for name in given if name not in row]
    faults += [f"column {name!r} is missing" for name in row if name not in given]
    lengths: dict[str, int] = {}
    for name in (name for name in row if name in given):
        column, wanted = given[name], row[name]
        if column.dtype != wanted.dtype:
            faults.append(f"column {name!r} is of {wanted.dtype}, not of {column.dtype}")
        if column.ndim == 0 or column.shape[1:] != wanted.shape:
            faults.append(f"column {name!r} has rows of shape {tuple(wanted.shape)}; received {tuple(column.shape)}")
        else:
            lengths[name] = len(column)
    if len(set(lengths.values())) > 1:
        faults.append(f"columns differ in length: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    elif lengths:
        count = next(iter(lengths.values()))
        if not 1 <= count <= capacity:
            faults.append(f"expected from 1 to {capacity} rows, but received {count}")
        elif count % streams:
            faults.append(f"{count} rows are not a multiple of {streams} streams")
    return faults
