"""Experience of a policy: a ring of transitions, a loader of its samples, and minibatches of one rollout.

A saved ring is a folder. ``replay.bin`` is written last, complete or absent. It has the state of the generator, and
lists the files of rows: ``rows-<first>-<last>.safetensors`` has the rows whose numbers are from ``first`` to below
``last``. These files never change; later saves link them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors, save as to_safetensors
from torch import Tensor

from ..contract.exceptions import BrokenCheckpointError, InputError, ReplayWriterError
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import read_regular
from ..plumbing.text import shortened

META = "replay.bin"
MOST_BYTES_OF_META = 64 << 20
MOST_BYTES_OF_FILE = 64 << 20
"""Approximate size of a file of rows. While a file is written, its rows are in memory twice."""


class ReplayBuffer:
    """The newest `capacity` rows that were written, in columns that are allocated once.

    Only the thread that writes first may write. Any thread may sample meanwhile; it gets complete rows.

    Args:
        capacity: Maximum number of rows.
        row: An example of a row, by column: its names, dtypes and shapes are those of the columns.
        seed: Seed of the buffer's generator, which draws the samples.

    Raises:
        ValueError: `capacity` is below 1, or a column is named ``index``.
    """

    def __init__(self, capacity: int, row: Mapping[str, Tensor], *, seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"ReplayBuffer: expected `capacity` >= 1, but received {capacity}")
        self._row = _tensors(row)
        if "index" in self._row:
            raise ValueError("ReplayBuffer: a sample has a separate column named index; rename yours")
        self.capacity = capacity
        self._columns = {
            name: torch.zeros((capacity, *value.shape), dtype=value.dtype, device="cpu")
            for name, value in self._row.items()
        }
        self._generator = torch.Generator().manual_seed(seed)
        self._written = self._oldest = 0
        """The number of the next row, and the number of the oldest row that is not overwritten."""
        self._writer: tuple[int, int] | None = None
        self._changed = threading.Condition()
        self._saved = _SavedRows()

    def __len__(self) -> int:
        return self._written - self._oldest

    @property
    def written(self) -> int:
        """Number of rows that were ever written; the next one has this number."""
        return self._written

    def close(self) -> None:
        """Close the folder of the last save or load; the next save writes all rows."""
        self._saved.forget()

    # writing

    def extend(self, rows: Mapping[str, Any]) -> None:
        """Write rows: the first dimension of each column counts the rows.

        Nothing is changed if an error is raised.

        Raises:
            ReplayWriterError: Another thread or process is the writer.
            ValueError: Columns, dtypes or shapes differ from the buffer's, or there are no rows, or more than
                `capacity`.
        """
        self._claim()
        given = _tensors(rows)
        counts = {len(column) if column.ndim else 0 for column in given.values()}
        expected, received = _kinds(self._row), _kinds(given, rows=True)
        if received != expected or len(counts) > 1 or not 1 <= min(counts) <= self.capacity:
            raise ValueError(
                f"ReplayBuffer.extend: expected from 1 to {self.capacity} rows of {expected}, but received "
                f"{' and '.join(map(str, sorted(counts)))} rows of {received}"
            )
        count = min(counts)
        with self._changed:
            # Drop the oldest rows before they are overwritten. If an interrupt leaves one of them half written, it no
            # longer belongs to the buffer.
            self._oldest = max(self._oldest, self._written + count - self.capacity)
            self._put(given, self._written, count)
            self._written += count
            self._changed.notify_all()

    def _claim(self) -> None:
        """Make the calling thread the writer; raise `ReplayWriterError` if another one is."""
        me = (os.getpid(), threading.get_ident())
        with self._changed:
            if self._writer is None:
                self._writer = me
        if self._writer != me:
            pid, thread = self._writer
            raise ReplayWriterError(
                f"thread {me[1]} of process {me[0]} writes to a replay buffer whose writer is thread {thread} of "
                f"process {pid}: send it the rows, for example over a queue, or call `release_writer` there first"
            )

    def release_writer(self) -> None:
        """Let another thread become the writer.

        Raises:
            ReplayWriterError: The calling thread is not the writer.
        """
        self._claim()
        self._writer = None

    def _put(self, rows: Mapping[str, Tensor], first: int, count: int) -> None:
        begin = first % self.capacity
        fits = min(count, self.capacity - begin)
        for name, column in self._columns.items():
            column[begin : begin + fits] = rows[name][:fits]
            column[: count - fits] = rows[name][fits:]

    # sampling

    def wait_for(self, rows: int, seconds: float | None = None) -> bool:
        """Wait for `rows` rows, at most `seconds`; return whether there are that many."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self) >= rows, seconds)

    def sample(self, batch_size: int) -> dict[str, Tensor]:
        """Draw rows with replacement; return them as new tensors, with their numbers as the column ``index`` (int64).

        Raises:
            ValueError: `batch_size` is below 1 or above the number of rows.
        """
        with self._changed:
            if not 1 <= batch_size <= len(self):
                raise ValueError(
                    f"Invalid `batch_size`. Expected a number from 1 to the {len(self)} rows of the buffer, but "
                    f"received {batch_size}."
                )
            limits = self._oldest, self._written
            index = torch.randint(*limits, (batch_size,), generator=self._generator, device="cpu")
            return {**self._rows(index), "index": index}

    def _rows(self, index: Tensor) -> dict[str, Tensor]:
        places = index % self.capacity
        return {name: column[places] for name, column in self._columns.items()}

    # checkpoints

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the rows and the generator into `folder`, such as the ``output_dir`` of ``save_checkpoint``.

        Rows that were saved or loaded before are linked if their folder is on the same file system; only new rows are
        written. Threads that write or sample wait meanwhile.

        Raises:
            OSError: A file could not be written.
        """
        folder = Path(folder)
        make_directory(folder, shared=None)
        with self._changed:
            self._write_files(folder)

    def _write_files(self, folder: Path) -> None:
        files = self._saved.link_into(folder, self._oldest, self._written)
        first = max(self._oldest, files[-1].last if files else 0)
        row_bytes = sum(value.nbytes for value in self._row.values())
        most = max(1, MOST_BYTES_OF_FILE // max(1, row_bytes))
        for begin in range(first, self._written, most):
            end = min(begin + most, self._written)
            packed = to_safetensors(self._rows(torch.arange(begin, end, device="cpu")))
            files.append(_RowFile(begin, end, len(packed), xxhash.xxh3_128_hexdigest(packed)))
            write_bytes_durably(folder / files[-1].name, packed)
        state = self._generator.get_state().numpy().tobytes()
        packed = msgspec.msgpack.encode(_Meta(self._layout(), self._oldest, self._written, tuple(files), state))
        write_bytes_durably(folder / META, xxhash.xxh3_128_digest(packed) + packed)
        for earlier in {*folder.glob("rows-*.safetensors")} - {folder / file.name for file in files}:
            earlier.unlink()
        self._saved.remember(folder, files)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore a save. The following samples are the same as after that save.

        Afterwards any thread may become the writer, by writing first.

        Raises:
            FileNotFoundError: `folder` contains no save.
            BrokenCheckpointError: The save is damaged. The buffer may be empty afterwards.
            ValueError: The saved buffer had other arguments; the message has both. Nothing is changed.
        """
        folder = Path(folder)
        with self._changed:
            self._read_files(folder)

    def _read_files(self, folder: Path) -> None:
        saved = _read_meta(folder / META)
        if saved.layout != self._layout():
            raise ValueError(f"the replay buffer in {folder} has {saved.layout}, and this one {self._layout()}")
        self._saved.forget()
        self._written = self._oldest = 0
        reached = saved.oldest
        for file in saved.files:
            rows = _read_rows(folder / file.name, file)
            if _kinds(rows, rows=True) != _kinds(self._row) or not file.first <= reached < file.last:
                raise BrokenCheckpointError(str(folder / file.name), "it does not have the rows that its name says")
            fresh = {name: column[reached - file.first :] for name, column in rows.items()}
            self._put(fresh, reached, file.last - reached)
            reached = file.last
        if reached != saved.written:
            raise BrokenCheckpointError(str(folder), f"it has rows up to {reached}, and not to {saved.written}")
        try:
            self._generator.set_state(torch.frombuffer(bytearray(saved.generator), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise BrokenCheckpointError(str(folder / META), "it has no state of a generator") from error
        self._oldest, self._written, self._writer = saved.oldest, saved.written, None
        self._saved.remember(folder, list(saved.files))
        self._changed.notify_all()

    def _layout(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "columns": _kinds(self._row)}


def _tensors(values: Any) -> dict[str, Tensor]:
    """Return columns as tensors without an autograd graph."""
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"ReplayBuffer: expected rows by column, but received {shortened(repr(values), 200)}")
    tensors = {}
    for name, value in values.items():
        try:
            tensors[name] = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"ReplayBuffer: no tensor can be made of column {name!r}: {error}") from None
    return tensors


def _kinds(columns: Mapping[str, Tensor], *, rows: bool = False) -> dict[str, str]:
    """Return the dtype and the shape of each column of a row, or of `rows`."""
    return {name: f"{column.dtype} {list(column.shape[rows:])}" for name, column in columns.items()}


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _RowFile(msgspec.Struct, frozen=True, array_like=True):
    """A file with the rows from `first` to below `last`."""

    first: _Count
    last: _Count
    nbytes: _Count
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]

    @property
    def name(self) -> str:
        return f"rows-{self.first:015d}-{self.last:015d}.safetensors"


class _Meta(msgspec.Struct, frozen=True):
    """The content of ``replay.bin``: the buffer's columns, the files of its rows, and the state of its generator."""

    layout: dict[str, Any]
    oldest: _Count
    written: _Count
    files: tuple[_RowFile, ...]
    generator: bytes


class _SavedRows:
    """The files of the last save or load; the next save links them.

    Their folder stays open, because its path changes when the checkpoint is complete.
    """

    def __init__(self) -> None:
        self._folder = -1
        self._files: list[_RowFile] = []

    def remember(self, folder: Path, files: list[_RowFile]) -> None:
        """Remember the `files` of `folder`, so that the next save can link them."""
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.forget()
        self._folder, self._files = opened, files

    def forget(self) -> None:
        """Close the folder of the last save or load, and forget its files."""
        folder, self._folder, self._files = self._folder, -1, []
        if folder >= 0:
            os.close(folder)

    def link_into(self, folder: Path, oldest: int, written: int) -> list[_RowFile]:
        """Link the files with rows from `oldest` to below `written` into `folder`, and return these files.

        If one of them cannot be linked, return an empty list; the caller then writes all rows.
        """
        needed = [file for file in self._files if oldest < file.last <= written]
        try:
            if needed and not os.path.samestat(os.fstat(self._folder), folder.stat()):
                for file in needed:
                    (folder / file.name).unlink(missing_ok=True)  # an interrupted save may have left it
                    os.link(file.name, folder / file.name, src_dir_fd=self._folder)
        except OSError:  # they were pruned, or are on another file system; the rows are in memory as well
            return []
        return needed


def _read_meta(path: Path) -> _Meta:
    try:
        content = read_regular(path, limit=MOST_BYTES_OF_META)
        if xxhash.xxh3_128_digest(content[16:]) != content[:16]:
            raise ValueError("its digest differs")
        return msgspec.msgpack.decode(content[16:], type=_Meta)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no saved replay buffer in {path.parent}: it has no {META}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpointError(str(path), f"it does not describe a saved replay buffer: {error}") from error


def _read_rows(path: Path, file: _RowFile) -> dict[str, Tensor]:
    try:
        packed = read_regular(path, limit=file.nbytes)
    except (OSError, ValueError) as error:
        raise BrokenCheckpointError(str(path), f"it cannot be read: {error}") from error
    if len(packed) != file.nbytes or xxhash.xxh3_128_hexdigest(packed) != file.digest:
        raise BrokenCheckpointError(str(path), "it is not what was saved: its size or digest differs")
    try:
        rows: dict[str, Tensor] = load_safetensors(packed)
    except SafetensorError as error:
        raise BrokenCheckpointError(str(path), f"it has no rows: {error}") from error
    return rows


class ReplayFeed:
    """An endless loader of samples of `buffer`. Its position is the state of the buffer's generator.

    Args:
        buffer: The buffer; another thread writes it, or the training thread between two steps.
        batch_size: Rows of a batch.
        start_after: Number of rows that the buffer must have before the first batch; None means `batch_size`.
        wait_s: Maximum seconds to wait for `start_after` rows.

    Raises:
        ValueError: Arguments are out of range.
    """

    # So that `callbacks/checkpoint/loader_position.py` does not warn of a lost position at a resume: a pass has none
    # besides the state of the buffer's generator, which the class saves with the buffer.
    begins_anew = True

    def __init__(
        self, buffer: ReplayBuffer, batch_size: int, *, start_after: int | None = None, wait_s: float = 60.0
    ) -> None:
        needed = batch_size if start_after is None else start_after
        if not 1 <= batch_size <= needed <= buffer.capacity:
            raise ValueError(
                "ReplayFeed: expected 1 <= batch_size <= start_after <= the capacity of the buffer, but received "
                f"{batch_size}, {needed} and {buffer.capacity}"
            )
        self.buffer, self.batch_size, self.start_after = buffer, batch_size, needed
        self.wait_s = wait_s

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.buffer.wait_for(self.start_after, self.wait_s):
            raise InputError(
                f"the replay buffer has {len(self.buffer)} rows after {self.wait_s:g} s, and training starts after "
                f"{self.start_after}: does its writer run?"
            )
        while True:
            yield self.buffer.sample(self.batch_size)


class Minibatches:
    """Minibatches of columns of equal length: dictionaries of `batch_size` rows.

    The ``rollout`` of a trainer returns this if each update epoch goes over the same rows in another order. Orders are
    drawn from torch's default generator on the CPU when a pass begins. A checkpoint within a pass holds the columns and
    the order of that pass.

    Args:
        columns: Tensors by name, of any dtype and device, whose first dimension is the row.
        batch_size: Rows of a minibatch.
        shuffle: Whether each pass has a different order; otherwise it is the order of the rows.
        drop_last: Whether a last minibatch of fewer rows is dropped.

    Raises:
        ValueError: There are no columns, they differ in length, they have no rows, or `batch_size` is below 1, or above
            the number of rows with `drop_last`.
    """

    def __init__(
        self, columns: Mapping[str, Tensor], batch_size: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.columns = dict(columns)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.order: Tensor | None = None
        """Row numbers in the order of the latest pass; None before the first pass and without `shuffle`."""
        lengths = {name: len(column) if column.ndim else 0 for name, column in self.columns.items()}
        self.rows = min(lengths.values(), default=0)
        most = self.rows if drop_last else batch_size
        if not self.rows or len(set(lengths.values())) > 1 or not 1 <= batch_size <= most:
            raise ValueError(
                "Minibatches: expected columns of one length >= 1 and a `batch_size` >= 1, at most that length with "
                f"`drop_last`, but received the lengths {lengths} and a `batch_size` of {batch_size}"
            )

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.order = torch.randperm(self.rows) if self.shuffle else None
        yield from self.rest_of_pass(0)

    def rest_of_pass(self, first: int) -> Iterator[dict[str, Tensor]]:
        """Yield the minibatches of the latest pass from number `first` on."""
        order, devices = self.order, {column.device for column in self.columns.values()}
        for index in range(first, len(self)):
            rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
            picked = {device: rows if order is None else order[rows].to(device) for device in devices}
            yield {name: column[picked[column.device]] for name, column in self.columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return columns, order of the pass and arguments, for `from_state_dict`."""
        arguments = {"batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}
        return {"columns": self.columns, "order": self.order, **arguments}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Minibatches:
        """Return the minibatches that `state_dict` described, in the middle of the same pass."""
        minibatches = cls(**{name: value for name, value in state.items() if name != "order"})
        minibatches.order = state["order"]
        return minibatches
