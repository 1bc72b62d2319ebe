"""The part of a checkpoint that one rank wrote: an index of its slices, beside the files that hold them.

``rank-00001/part.json`` says for each slice in ``rank-00001/*.safetensors`` which part of which tensor it is, where its
bytes lie, and the digest of every block of them, so that a rank which needs a few rows reads and proves just those.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import msgspec
import xxhash

from .safetensors_header import parse_json

__all__ = [
    "BLOCK",
    "PART_FILE",
    "SliceEntry",
    "block_digests",
    "parse_part",
    "part_folder",
    "rank_of",
    "serialise_part",
]

PART_FILE = "part.json"
BLOCK = 1 << 20
"""Bytes that have a digest of their own."""

_FORMAT = "genlight.checkpoint_part"
_FORMAT_VERSION = 1
_FOLDER_PREFIX = "rank-"


@dataclass(frozen=True)
class SliceEntry:
    """A slice of one tensor within one file."""

    file: str
    """The name of its file in the rank's folder, which is the tensor's file in its reference."""
    key: str
    dtype: str
    """As torch calls it."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the slice begins in the whole, in elements."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte within the file."""
    size: int
    """Bytes."""
    blocks: tuple[str, ...]
    """xxh3-128 of each `BLOCK` of its bytes, the last one shorter."""


def part_folder(rank: int) -> str:
    """``rank-00001`` for 1: the folder of a rank's part within the checkpoint's."""
    return f"{_FOLDER_PREFIX}{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose part the file `name`, as in ``rank-00001/part.json``, belongs to; None if to no rank's."""
    folder, slash, _ = name.partition("/")
    number = folder.removeprefix(_FOLDER_PREFIX)
    return int(number) if slash and number != folder and number.isdigit() else None


def block_digests(data: memoryview) -> tuple[str, ...]:
    """xxh3-128 in hexadecimal of each block."""
    return tuple(xxhash.xxh3_128_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


def serialise_part(rank: int, world_size: int, slices: Iterable[SliceEntry]) -> bytes:
    """The bytes of a part's index."""
    content = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "rank": rank,
        "world_size": world_size,
        "slices": [asdict(entry) for entry in slices],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def parse_part(data: bytes) -> list[SliceEntry]:
    """The slices of a part's index.

    Raises:
        ValueError: It is none, or one of a later version.
    """
    try:
        content = parse_json(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise ValueError("it is not the index of a part")
    if content.get("format_version") != _FORMAT_VERSION:
        raise ValueError(f"its version {content.get('format_version')!r} is not known to this genlight; upgrade it")
    return [_sound(entry) for entry in msgspec.convert(content.get("slices"), list[SliceEntry])]


def _sound(entry: SliceEntry) -> SliceEntry:
    """`entry`, whose numbers fit together; how many bytes its elements take, torch knows."""
    numbers = (*entry.whole, *entry.offset, *entry.shape, entry.begin, entry.size)
    if any(not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"a slice of {entry.key!r} has a number out of range")
    dimensions = len(entry.whole)
    if dimensions == 0 or len(entry.offset) != dimensions or len(entry.shape) != dimensions:
        raise ValueError(f"a slice of {entry.key!r} does not say which part of the tensor it is")
    if math.prod(entry.shape) == 0 or len(entry.blocks) != -(-entry.size // BLOCK):
        raise ValueError(f"a slice of {entry.key!r} has a size that does not fit its shape")
    return entry
