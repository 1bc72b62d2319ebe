"""One file of the download cache: its place, its partial form, and what is known of it.

While a file is incomplete it is called ``*.part``; what identifies the server's version of it, and how much of it is
durable, stands beside it, so that a later attempt, also of another process, can go on where this one broke. Only a
whole and checked file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import xxhash

from ..plumbing.durable import fsync_directory, write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError
from ..plumbing.safe_open import open_own, open_regular, read_own
from .progress import Tracker

__all__ = ["CacheEntry", "Content", "Part", "Stored", "Version"]

CHUNK_BYTES = 1 << 20
SYNC_EVERY_BYTES = 64 << 20
LOCK_POLL_S = 0.1
LARGEST_NOTE_BYTES = 1 << 16


class Version(msgspec.Struct, frozen=True):
    """The identity of one version of a resource."""

    etag: str | None = None
    last_modified: str | None = None

    @property
    def if_range(self) -> str | None:
        """The validator under which two partial answers may be joined; a weak one may not."""
        if self.etag is None:
            return self.last_modified
        return None if self.etag.startswith("W/") else self.etag


class Part(msgspec.Struct, frozen=True):
    """The recorded state of a partial file."""

    version: Version = Version()
    durable_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class Content(msgspec.Struct, frozen=True):
    """The identity of a file's content."""

    size_bytes: int
    sha256: str
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> Content:
        """Read a file once and digest it."""
        sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_128(), 0
        with os.fdopen(open_regular(path), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                sha256.update(chunk)
                xxh3.update(chunk)
                size += len(chunk)
        return cls(size, sha256.hexdigest(), xxh3.hexdigest())


class Stored(msgspec.Struct, frozen=True):
    """The recorded state of a complete file."""

    content: Content
    version: Version
    mtime_ns: int
    stored_at: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class CacheEntry:
    """The files that belong to one download target."""

    target: Path

    @property
    def part_path(self) -> Path:
        """The file while it is incomplete."""
        return self.target.with_name(f"{self.target.name}.part")

    def _beside(self, suffix: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{suffix}")

    @contextlib.contextmanager
    def exclusive(self, tracker: Tracker) -> Iterator[bool]:
        """Hold the entry for this thread; yields whether another one had it first."""
        lock, waited = None, False
        while lock is None:
            try:
                lock = FileLock(self._beside("lock"))
            except LockHeldError:
                waited = True
                tracker.wait(LOCK_POLL_S)
        try:
            yield waited
        finally:
            lock.release()

    def stored(self) -> Stored | None:
        """The recorded state of the complete file, if it has not been changed since; None only costs a transfer."""
        try:
            known = msgspec.json.decode(read_own(self._beside("meta.json"), limit=LARGEST_NOTE_BYTES), type=Stored)
            status = self.target.stat()
        except (OSError, ValueError, RecursionError):
            return None
        same = (status.st_size, status.st_mtime_ns) == (known.content.size_bytes, known.mtime_ns)
        return known if same else None

    def part(self) -> Part:
        """The recorded state of the partial file; nothing is durable where there is none."""
        try:
            known = msgspec.json.decode(read_own(self._beside("part.json"), limit=LARGEST_NOTE_BYTES), type=Part)
            size = self.part_path.stat().st_size
        except (OSError, ValueError, RecursionError):
            return Part()
        return known if size >= known.durable_bytes else Part()

    def write_part(self, chunks: Iterator[bytes], version: Version, start: int) -> Generator[int, None, None]:
        """Write `chunks` after the first `start` bytes; yields the size so far, after each.

        However that ends, what was written is durable and noted.
        """
        write_bytes_durably(self._beside("part.json"), msgspec.json.encode(Part(version, start)))
        with os.fdopen(open_own(self.part_path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            file.truncate(start)
            file.seek(start)
            size = noted = start
            try:
                for chunk in chunks:
                    file.write(chunk)
                    size += len(chunk)
                    if size - noted >= SYNC_EVERY_BYTES:
                        self._note(file, version, size)
                        noted = size
                    yield size
            finally:
                self._note(file, version, size)

    def _note(self, file: BinaryIO, version: Version, size: int) -> None:
        file.flush()
        os.fsync(file.fileno())
        write_bytes_durably(self._beside("part.json"), msgspec.json.encode(Part(version, size)))

    def drop_part(self) -> None:
        """Forget the partial file."""
        self.part_path.unlink(missing_ok=True)
        self._beside("part.json").unlink(missing_ok=True)

    def settle(self, content: Content, version: Version) -> None:
        """Give the partial file, whose content was checked, its name."""
        os.replace(self.part_path, self.target)
        stored = Stored(content, version, self.target.stat().st_mtime_ns, time.time())
        write_bytes_durably(self._beside("meta.json"), msgspec.json.encode(stored))
        self._beside("part.json").unlink(missing_ok=True)
        fsync_directory(self.target.parent)
