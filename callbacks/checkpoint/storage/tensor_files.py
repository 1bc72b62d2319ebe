"""Safetensors files of tensors in memory: in which order they lie, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..codec.tensor_table import Entry
from ..format.safetensors_header import build_header
from .write_file import write_file

__all__ = ["header_of", "in_order", "write_tensors"]


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries as they follow each other in a file: large elements first, so that every tensor is aligned."""
    return sorted(entries, key=lambda entry: -_alignment(entry))


def write_tensors(path: Path, entries: Iterable[Entry], buffers: Iterable[memoryview]) -> tuple[int, str]:
    """Write a safetensors file of `entries`, whose bytes `buffers` gives `in_order`; its size and digest."""
    return write_file(path, _chained(header_of(entries), buffers))


def header_of(entries: Iterable[Entry]) -> bytes:
    """The start of the file that `write_tensors` writes."""
    return build_header([(e.key, e.dtype, e.shape, e.nbytes) for e in in_order(entries)], {"format": "pt"})


def _alignment(entry: Entry) -> int:
    """Bytes of one element, also of those that are stored as raw bytes."""
    return int(entry.source.dtype.itemsize)


def _chained(first: bytes, rest: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield first
    yield from rest
