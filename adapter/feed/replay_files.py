"""A replay buffer in a folder: rows in files that never change, of which later saves have links.

``replay.json`` is written last and says what belongs to the save; ``rows-<first>-<last>.safetensors`` have the rows of
these numbers, ``sampling-<digest>.safetensors`` priorities and the state of the generator. Only this module knows that
format; the buffer knows no files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load as load_safetensors, save as to_safetensors
from torch import Tensor

from ..contract.exceptions import BrokenCheckpointError
from ..plumbing.durable import write_bytes_durably
from ..plumbing.safe_open import read_regular

__all__ = ["ReplayFiles", "SavedReplay"]

META = "replay.json"
VERSION = 1
MOST_BYTES_OF_META = 64 << 20
MOST_BYTES_OF_FILE = 64 << 20
"""About how much of new rows goes into a file; what is written at once is in memory twice."""


@dataclass(frozen=True)
class SavedReplay:
    """The parts of a save other than its rows."""

    layout: dict[str, Any]
    oldest: int
    written: int
    generator: Tensor
    priorities: Tensor | None
    largest_priority: float


@dataclass(frozen=True)
class RowFile:
    """Rows from `first` to below `last`."""

    first: int
    last: int
    nbytes: int
    digest: str

    @property
    def name(self) -> str:
        return f"rows-{self.first:015d}-{self.last:015d}.safetensors"


class ReplayFiles:
    """Knows which rows the last save or load has in which files, so that the next save links them.

    The folder stays open: a checkpoint is renamed when it is whole.
    """

    def __init__(self) -> None:
        self._folder = -1
        self._files: list[RowFile] = []
        self.written_bytes = 0
        """Of rows, by all saves."""

    def close(self) -> None:
        """Forget the folder of the last save."""
        folder, self._folder, self._files = self._folder, -1, []
        if folder >= 0:
            os.close(folder)

    def save(self, folder: Path, saved: SavedReplay, rows: Callable[[int, int], dict[str, Tensor]]) -> None:
        """Write `saved` and the rows that it counts; `rows` gives those of a range of numbers."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self._linked(folder, saved)
        first = max(saved.oldest, files[-1].last if files else 0)
        for begin, end in _ranges(first, saved.written, rows):
            files.append(self._write(folder, begin, end, rows(begin, end)))
        sampling = {"generator": saved.generator}
        if saved.priorities is not None:
            sampling["priorities"] = saved.priorities
        packed = to_safetensors(sampling)
        digest = xxhash.xxh3_128_hexdigest(packed)
        write_bytes_durably(folder / _sampling_name(digest), packed)
        meta = {
            "version": VERSION,
            "layout": saved.layout,
            "oldest": saved.oldest,
            "written": saved.written,
            "largest_priority": saved.largest_priority,
            "sampling": [len(packed), digest],
            "rows": [[file.first, file.last, file.nbytes, file.digest] for file in files],
        }
        write_bytes_durably(folder / META, json.dumps(meta).encode())
        named = {_sampling_name(digest), *(file.name for file in files)}
        for earlier in (*folder.glob("rows-*.safetensors"), *folder.glob("sampling-*.safetensors")):
            if earlier.name not in named:
                earlier.unlink()
        self._remember(folder, files)

    def _linked(self, folder: Path, saved: SavedReplay) -> list[RowFile]:
        """The files of the last save that have rows of this one, linked into `folder`; none where one cannot be."""
        needed = [file for file in self._files if file.last > saved.oldest and file.last <= saved.written]
        linked = []
        try:
            for file in needed:
                with contextlib.suppress(FileNotFoundError):  # of a save that was broken off, or of this very folder
                    if not os.path.samestat(os.fstat(self._folder), folder.stat()):
                        (folder / file.name).unlink()
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, folder / file.name, src_dir_fd=self._folder)
                linked.append(file)
        except OSError:  # pruned, or on another file system: the rows are in memory as well
            return []
        return linked

    def _write(self, folder: Path, first: int, last: int, rows: dict[str, Tensor]) -> RowFile:
        packed = to_safetensors({name: column.contiguous() for name, column in rows.items()})
        file = RowFile(first, last, len(packed), xxhash.xxh3_128_hexdigest(packed))
        write_bytes_durably(folder / file.name, packed)
        self.written_bytes += len(packed)
        return file

    def _remember(self, folder: Path, files: list[RowFile]) -> None:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close()
        self._folder, self._files = opened, files

    def look(self, folder: Path, layout: Mapping[str, Any]) -> SavedReplay:
        """The parts of the save in `folder` other than its rows; raises as `ReplayBuffer.load` does."""
        meta = _meta(folder)
        if different := [
            f"{name} {meta['layout'].get(name)!r}, not {value!r}"
            for name, value in layout.items()
            if meta["layout"].get(name) != value
        ]:
            raise ValueError(f"the replay buffer in {folder} has {'; '.join(different)}")
        path = folder / _sampling_name(meta["sampling"][1])
        sampling = _proven(path, *meta["sampling"])
        priorities, count = sampling.get("priorities"), meta["written"] - meta["oldest"]
        if "generator" not in sampling or count > layout["capacity"] or (priorities is None) == layout["prioritised"]:
            raise BrokenCheckpointError(str(path), f"it does not have what {META} says")
        if priorities is not None and (priorities.shape != (count,) or priorities.dtype != torch.float64):
            raise BrokenCheckpointError(str(path), f"it does not have the priorities of {count} rows")
        return SavedReplay(
            dict(layout), meta["oldest"], meta["written"], sampling["generator"], priorities, meta["largest_priority"]
        )

    def load(
        self, folder: Path, saved: SavedReplay, row: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The rows of a save, each part with the number of its first; proven, but for those that are gone."""
        self.close()
        files = [RowFile(*entry) for entry in _meta(folder)["rows"]]
        expected = saved.oldest
        for file in files:
            rows = _proven(folder / file.name, file.nbytes, file.digest)
            is_sound = rows.keys() == row.keys() and all(
                rows[name].dtype == value.dtype and rows[name].shape == (file.last - file.first, *value.shape)
                for name, value in row.items()
            )
            if not is_sound or file.first > expected or file.last <= expected:
                raise BrokenCheckpointError(str(folder / file.name), "it does not have the rows that its name says")
            skipped = expected - file.first
            yield expected, {name: column[skipped:] for name, column in rows.items()}
            expected = file.last
        if expected != saved.written:
            raise BrokenCheckpointError(str(folder), f"it has rows up to {expected}, and {META} says {saved.written}")
        self._remember(folder, files)


def _ranges(first: int, last: int, rows: Callable[[int, int], dict[str, Tensor]]) -> Iterator[tuple[int, int]]:
    if first >= last:
        return
    row_bytes = sum(column.nbytes for column in rows(first, first + 1).values())
    most = max(1, MOST_BYTES_OF_FILE // max(1, row_bytes))
    for begin in range(first, last, most):
        yield begin, min(begin + most, last)


def _sampling_name(digest: str) -> str:
    return f"sampling-{digest}.safetensors"


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(read_regular(path, limit=MOST_BYTES_OF_META))
        is_sound = meta["version"] == VERSION and isinstance(meta["layout"], dict)
        is_sound &= type(meta["oldest"]) is int and type(meta["written"]) is int
        is_sound &= 0 <= meta["oldest"] <= meta["written"] and type(meta["largest_priority"]) is float
        size, digest = meta["sampling"]
        for first, last, nbytes, file_digest in [*meta["rows"], (0, 1, size, digest)]:
            is_sound &= all(type(number) is int for number in (first, last, nbytes)) and isinstance(file_digest, str)
            is_sound &= len(file_digest) == 32 and file_digest.isalnum()
            is_sound &= 0 <= first < last and nbytes >= 0
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no saved replay buffer in {folder}: it has no {META}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it does not describe a saved replay buffer: {error}") from None
    if not is_sound:
        raise BrokenCheckpointError(str(path), "it does not describe a saved replay buffer")
    checked: dict[str, Any] = meta
    return checked


def _proven(path: Path, nbytes: int, digest: str) -> dict[str, Tensor]:
    try:
        packed = read_regular(path, limit=nbytes)
    except (OSError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it cannot be read: {error}") from error
    if len(packed) != nbytes or xxhash.xxh3_128_hexdigest(packed) != digest:
        raise BrokenCheckpointError(str(path), "it is not what was saved: its size or digest differs")
    return load_safetensors(packed)
