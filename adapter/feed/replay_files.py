"""A replay buffer in a folder: rows in files that never change, of which later saves have links.

``replay.json`` is written last and says what belongs to the save; ``rows-<first>-<last>.safetensors`` have the rows of
these numbers, ``sampling-<digest>.safetensors`` priorities and the state of the generator. Only this module knows that
format; the buffer knows no files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import xxhash
from safetensors.torch import load as load_safetensors, save as to_safetensors
from torch import Tensor

from ..contract.exceptions import BrokenCheckpointError
from ..plumbing.durable import write_bytes_durably
from ..plumbing.safe_open import read_regular

__all__ = ["ReplayFiles", "ReplayMeta"]

META = "replay.json"
MOST_BYTES_OF_META = 64 << 20
MOST_BYTES_OF_FILE = 64 << 20
"""About how much of new rows goes into a file; what is written at once is in memory twice."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class RowFile(msgspec.Struct, frozen=True, array_like=True):
    """Rows from `first` to below `last`."""

    first: _Count
    last: _Count
    nbytes: _Count
    digest: _Digest

    @property
    def name(self) -> str:
        return f"rows-{self.first:015d}-{self.last:015d}.safetensors"


class ReplayMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `META`: which rows there are, of which buffer, and in which files."""

    layout: dict[str, Any]
    oldest: _Count
    written: _Count
    largest_priority: float
    sampling: tuple[_Count, _Digest] = (0, "")
    """Size and digest of the file of priorities and the generator."""
    rows: tuple[RowFile, ...] = ()
    version: Literal[1] = 1


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

    def save(
        self,
        folder: Path,
        meta: ReplayMeta,
        sampling: dict[str, Tensor],
        rows: Callable[[int, int], dict[str, Tensor]],
    ) -> None:
        """Write what `meta` says: `sampling`, and its rows, of which `rows` gives those of a range of numbers."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self._linked(folder, meta)
        first = max(meta.oldest, files[-1].last if files else 0)
        row_bytes = sum(column.nbytes for column in rows(first, first + 1).values()) if first < meta.written else 0
        most = max(1, MOST_BYTES_OF_FILE // max(1, row_bytes))
        for begin in range(first, meta.written, most):
            end = min(begin + most, meta.written)
            files.append(self._write(folder, begin, end, rows(begin, end)))
        packed = to_safetensors(sampling)
        digest = xxhash.xxh3_128_hexdigest(packed)
        write_bytes_durably(folder / _sampling_name(digest), packed)
        meta = msgspec.structs.replace(meta, sampling=(len(packed), digest), rows=tuple(files))
        write_bytes_durably(folder / META, msgspec.json.encode(meta))
        named = {_sampling_name(digest), *(file.name for file in files)}
        for earlier in (*folder.glob("rows-*.safetensors"), *folder.glob("sampling-*.safetensors")):
            if earlier.name not in named:
                earlier.unlink()
        self._remember(folder, files)

    def _linked(self, folder: Path, meta: ReplayMeta) -> list[RowFile]:
        """The files of the last save that have rows of this one, linked into `folder`; none where one cannot be."""
        needed = [file for file in self._files if meta.oldest < file.last <= meta.written]
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

    def look(self, folder: Path, layout: Mapping[str, Any]) -> tuple[ReplayMeta, dict[str, Tensor]]:
        """The save in `folder` without its rows; raises as `ReplayBuffer.load` does."""
        meta = _meta(folder)
        if different := [
            f"{name} {meta.layout.get(name)!r}, not {value!r}"
            for name, value in layout.items()
            if meta.layout.get(name) != value
        ]:
            raise ValueError(f"the replay buffer in {folder} has {'; '.join(different)}")
        path = folder / _sampling_name(meta.sampling[1])
        sampling = _proven(path, *meta.sampling)
        priorities, count = sampling.get("priorities"), meta.written - meta.oldest
        if "generator" not in sampling or count > layout["capacity"] or (priorities is None) == layout["prioritised"]:
            raise BrokenCheckpointError(str(path), f"it does not have what {META} says")
        if priorities is not None and (priorities.shape != (count,) or priorities.dtype != torch.float64):
            raise BrokenCheckpointError(str(path), f"it does not have the priorities of {count} rows")
        return meta, sampling

    def load(
        self, folder: Path, meta: ReplayMeta, row: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The rows of a save, each part with the number of its first; proven, but for those that are gone."""
        self.close()
        expected = meta.oldest
        for file in meta.rows:
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
        if expected != meta.written:
            raise BrokenCheckpointError(str(folder), f"it has rows up to {expected}, and {META} says {meta.written}")
        self._remember(folder, list(meta.rows))


def _sampling_name(digest: str) -> str:
    return f"sampling-{digest}.safetensors"


def _meta(folder: Path) -> ReplayMeta:
    path = folder / META
    try:
        return msgspec.json.decode(read_regular(path, limit=MOST_BYTES_OF_META), type=ReplayMeta)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no saved replay buffer in {folder}: it has no {META}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(str(path), f"it does not describe a saved replay buffer: {error}") from None


def _proven(path: Path, nbytes: int, digest: str) -> dict[str, Tensor]:
    try:
        packed = read_regular(path, limit=nbytes)
    except (OSError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it cannot be read: {error}") from error
    if len(packed) != nbytes or xxhash.xxh3_128_hexdigest(packed) != digest:
        raise BrokenCheckpointError(str(path), "it is not what was saved: its size or digest differs")
    return load_safetensors(packed)
