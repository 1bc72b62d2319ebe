"""Writing a file that is durable, and proven to hold what memory held.

The disk works while memory does: a second thread hands over to it what was copied to the kernel so far, so that the
sync at the end finds little left to do; and while that waits for the disk, the file is read back and hashed. A save
then takes about as long as the slower of the two. Chunks are large, because a thread that comes back from a system call
waits for the interpreter, and a busy training thread keeps it for milliseconds.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import xxhash

from ....adapter.contract.exceptions import (
    BrokenCheckpointError,
    CheckpointError,
    ThreadLimitError,
    UnwrittenCheckpointError,
)
from ....adapter.plumbing.durable import start_writeback
from ....adapter.plumbing.safe_open import open_regular
from ....adapter.plumbing.threads import started
from ..format.layout import name_of

__all__ = ["hash_file", "naming_the_checkpoint", "write_file"]

_WRITE_CHUNK = 16 << 20
_GATHERED_BUFFERS = 512
"""Small buffers that one ``writev`` takes; the system's limit is 1,024."""
_SMALL = 4 << 20
"""Bytes for which a second thread is not worth its start."""
_LEAST_READ, _MOST_READ = 1 << 20, 16 << 20
"""Bytes that are read at once; in between, a hundredth of the file."""
_THE_END = -1


def write_file(path: Path, buffers: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file, durable when this returns, and prove that it holds what memory held.

    Returns:
        Its size in bytes and the xxh3-128 of its content, taken from memory.

    Raises:
        BrokenCheckpointError: The file reads back otherwise.
        OSError: It could not be written; has its path as ``filename``.
    """
    hasher, size = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with _WriteBehind(descriptor) as disk:
            for chunk in _gathered(buffers):
                for part in chunk:
                    hasher.update(part)
                size += _write_gathered(descriptor, chunk)
                disk.follow(size)
            disk.sync()
            read_back = _hash_descriptor(descriptor)
    except OSError as error:
        error.filename = os.fspath(path)  # A call on a descriptor names none.
        raise
    finally:
        os.close(descriptor)
    if read_back != (size, hasher.hexdigest()):
        raise BrokenCheckpointError(path.parent.name, f"{path.name} reads back differently from what was written")
    return read_back


def hash_file(path: Path, *, most: int | None = None) -> tuple[int, str]:
    """Size and xxh3-128 of the content of a file; ends soon after `most` bytes, whatever grows there.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    descriptor = open_regular(path)
    try:
        return _hash_descriptor(descriptor, most)
    finally:
        os.close(descriptor)


class _WriteBehind:
    """Has the disk write a file that grows, and syncs it in the end; durable when the ``with`` block is left.

    A large file gets a thread for that. A small one is synced by `sync` itself.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_complete = False
        self._error: OSError | None = None

    def follow(self, size: int) -> None:
        """The file has grown to `size` bytes."""
        if self._thread is None and size > _SMALL:
            with contextlib.suppress(ThreadLimitError):  # `sync` does it all then
                self._thread = started(threading.Thread(target=self._run, name="genlight-sync"))
        self._sizes.put(size)

    def sync(self) -> None:
        """The file is complete. Returns at once where it is large."""
        self._is_complete = True
        if self._thread is None:
            os.fsync(self._descriptor)
        else:
            self._sizes.put(_THE_END)

    def __enter__(self) -> _WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if not self._is_complete:
            self._sizes.put(_THE_END)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        begin = 0
        try:
            while (size := self._sizes.get()) != _THE_END:
                start_writeback(self._descriptor, begin, size - begin)
                begin = size
            if self._is_complete:
                os.fsync(self._descriptor)
        except OSError as error:
            self._error = error


def _gathered(buffers: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """Buffers in groups of about one chunk, large ones cut: few system calls."""
    group: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while len(view):
            piece = view[: _WRITE_CHUNK - size]
            group.append(piece)
            size += len(piece)
            view = view[len(piece) :]
            if size == _WRITE_CHUNK or len(group) == _GATHERED_BUFFERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _write_gathered(descriptor: int, parts: list[memoryview]) -> int:
    """Write all parts; a system call may stop short."""
    total = 0
    while parts:
        written = os.writev(descriptor, parts)
        total += written
        while parts and written >= len(parts[0]):
            written -= len(parts[0])
            parts = parts[1:]
        if written:
            parts = [parts[0][written:], *parts[1:]]
    return total


def _hash_descriptor(descriptor: int, most: int | None = None) -> tuple[int, str]:
    hasher, position = xxhash.xxh3_128(), 0
    size = os.fstat(descriptor).st_size
    buffer = memoryview(bytearray(max(1, min(size, _MOST_READ, max(_LEAST_READ, size // 100)))))
    while (most is None or position <= most) and (count := os.preadv(descriptor, [buffer], position)):
        hasher.update(buffer[:count])
        position += count
    return position, hasher.hexdigest()


@contextlib.contextmanager
def naming_the_checkpoint(record: Path, nbytes: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the block as one that names the checkpoint of `record`, of about `nbytes` bytes.

    Raises:
        UnwrittenCheckpointError: In place of any other `OSError`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        directory = os.fspath(record.parent)
        raise UnwrittenCheckpointError(
            name_of(record), directory, nbytes, error.errno, reason, error.filename
        ) from error
