"""Files from web servers: streamed, checked, cached, resumed after a break.

While a file is incomplete it is called ``*.part``. A note next to it has the version (the ETag) that it is a part of,
so that a later attempt, also of another process, can continue where this one broke. Only a complete and checked file
gets its name, and the note is then of that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import xxhash

from ..contract.exceptions import AuthError, InputError
from ..plumbing.durable import fsync_directory, make_directory, write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError
from ..plumbing.http import failure_text
from ..plumbing.retry import RetryPolicy, TransientError, is_transient, retry_after_s, with_retries
from ..plumbing.safe_open import open_own, open_regular, read_own
from ..plumbing.text import size_text
from ..plumbing.urls import safe_url

__all__ = ["Download", "Transport", "download", "log_arrival"]

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.1
LARGEST_NOTE_BYTES = 1 << 16
CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-\d{1,18}/(?P<total>\d{1,18}|\*)")


class Note(msgspec.Struct, frozen=True):
    """The version of the part of a file; where there is no part, that of the whole file."""

    etag: str | None = None
    boot_id: str = ""
    """Of the system that wrote the part: what a process wrote outlives it, but maybe not the system."""
    size: int | None = None
    """Bytes of the whole file, where the server said."""

    @property
    def joins_parts(self) -> bool:
        """Whether two answers with this ETag are parts of the same bytes; with a weak one they need not be."""
        return self.etag is not None and not self.etag.startswith("W/")


# Made here, in one thread: msgspec crashes where several ask at once for a type that it has not yet looked into.
_NOTE = msgspec.json.Decoder(Note)


@dataclass(frozen=True)
class Transport:
    """What every transfer of a run uses."""

    client: httpx2.Client
    """Shows the token to the origins that may have it."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    ended: threading.Event = field(default_factory=threading.Event)
    """Makes every transfer end at its next piece, and every wait at once."""

    def wait(self, seconds: float) -> None:
        """Wait, or only look whether the transfers go on.

        Raises:
            CancelledError: They were ended.
        """
        if self.ended.wait(seconds):
            raise CancelledError


@dataclass(frozen=True)
class Download:
    """A file to fetch, and how to know that it arrived whole."""

    url: str = field(repr=False)  # its query may be a credential
    target: Path
    digest: str | None = None
    """``sha256:`` or ``xxh3_128:`` and hexadecimal digits, where the content is known beforehand."""
    size_bytes: int | None = None
    most_bytes: int | None = None
    """The most bytes that the file may have, where its size is not known."""

    @property
    def label(self) -> str:
        """The URL without user info and query."""
        return safe_url(self.url)

    def fault_of(self, path: Path) -> str | None:
        """In which way the file at `path`, which is read, is not what was asked for; None where it is."""
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self.size_bytes not in (None, size):
                return f"has {size} bytes, but {self.size_bytes} were expected"
            if self.digest is None:
                return None
            algorithm, _, expected = self.digest.partition(":")
            made: Any = xxhash.xxh3_128 if algorithm == "xxh3_128" else hashlib.sha256
            found = hashlib.file_digest(file, made).hexdigest()
        return None if found == expected else f"has {algorithm} {found}, but {expected} was expected"


def download(request: Download, transport: Transport) -> Path:
    """Bring a file to ``request.target`` and return that.

    A copy in place is kept without asking the server if the request has a digest, which is proven, and if the server
    confirms its ETag otherwise. Several processes may ask for one target: one transfers, the others wait and take it.

    Raises:
        AuthError: The server refused the credentials (401, 403).
        InputError: The server has no such file, its content has another digest or size, or it cannot be reached.
        CancelledError: All transfers were ended.
    """
    make_directory(request.target.parent)
    asked_at = time.time()
    lock = _locked(request.target, transport)
    try:
        transfer = _Transfer(request, transport)
        if not transfer.is_done_since(asked_at):
            transfer.run()
    finally:
        lock.release()
    log_arrival(request.label, request.target.stat().st_size)
    return request.target


def log_arrival(name: str, size: int) -> None:
    """Log that an input is there."""
    log.info("%s is here (%s)", name, size_text(size))


def _locked(target: Path, transport: Transport) -> FileLock:
    while True:
        with contextlib.suppress(LockHeldError):
            return FileLock(target.with_name(f".{target.name}.lock"))
        transport.wait(LOCK_POLL_S)


class _Transfer:
    """One file on its way, by whoever holds its lock."""

    def __init__(self, request: Download, transport: Transport) -> None:
        self.request, self.transport, self.target = request, transport, request.target
        self.part = self.target.with_name(f"{self.target.name}.part")
        self.note_path = self.target.with_name(f".{self.target.name}.json")
        self.before = 0
        """Bytes of the part before the last attempt."""
        self.logged_s = time.monotonic()

    def is_done_since(self, asked_at: float) -> bool:
        """Whether the target has what was asked for: by its digest, or because another process has just fetched it.

        A digest is proven by the bytes themselves: who can write a file into the cache can write a note about it.
        """
        with contextlib.suppress(OSError):
            return self._is_whole() and (self.request.digest is not None or self.target.stat().st_mtime >= asked_at)
        return False

    def run(self) -> None:
        """Attempt until the file is in place; attempts that brought bytes don't count as failures."""
        retry = self.transport.retry
        try:
            with_retries(self._attempt, retry, self.transport.wait, progressed=lambda: self._part_bytes() > self.before)
        except TransientError as error:
            raise InputError(
                f"{self.request.label} could not be fetched: {error}, after {retry.attempts} attempts without progress."
            ) from None

    def _part_bytes(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _is_whole(self) -> bool:
        return self.target.exists() and self.request.fault_of(self.target) is None

    def _note(self) -> Note:
        try:
            return _NOTE.decode(read_own(self.note_path, limit=LARGEST_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return Note()

    def _attempt(self) -> None:
        """One request: for a confirmation, for the rest, or for the whole file."""
        request, note, start, headers = self.request, self._note(), 0, {"Accept-Encoding": "identity"}
        self.before = self._part_bytes()
        if self.part.exists():
            # Only a digest shows that two answers without a strong ETag were of two versions, or that bytes were lost.
            if request.digest is not None or (note.joins_parts and note.boot_id == _boot_id()):
                # No server sends what follows the last byte: a part that may be complete asks for its last byte again.
                may_be_complete = self.before in (note.size or request.size_bytes or self.before, request.size_bytes)
                start = max(self.before - may_be_complete, 0)
            if start:
                headers["Range"] = f"bytes={start}-"
                headers |= {"If-Range": note.etag} if note.etag is not None and note.joins_parts else {}
        elif note.etag is not None and self._is_whole() and note.size in (None, self.target.stat().st_size):
            headers["If-None-Match"] = note.etag
        try:
            with self.transport.client.stream("GET", request.url, headers=headers) as response:
                if response.status_code == 304 and "If-None-Match" in headers:
                    return
                if response.status_code == 416:
                    self._drop_part()
                    raise TransientError("the server has no such range")
                _refuse(response, request.label)
                start, total = self._place(response, start, note)
                self._receive(response, start, total)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise TransientError(failure_text(error)) from None
        fault = request.fault_of(self.part)
        if fault is not None:
            self._drop_part()
            if start:  # the first part may have been of another version, or damaged since
                raise TransientError(f"what was put together {fault}")
            raise InputError(f"{request.label} {fault}. It was changed or damaged on the way.")
        os.replace(self.part, self.target)
        fsync_directory(self.target.parent)

    def _place(self, response: httpx2.Response, start: int, note: Note) -> tuple[int, int | None]:
        """Where the answer begins, at 0 or exactly where the partial file ends, and the size of the whole file."""
        if response.status_code != 206:
            length = response.headers.get("content-length", "")
            return 0, int(length) if length.isdecimal() and len(length) < 19 else None
        content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if content_range is None or int(content_range["first"]) != start:
            raise TransientError("the server sent a different range from the one requested")
        if start and note.etag is not None and response.headers.get("etag", note.etag) != note.etag:
            self._drop_part()
            raise TransientError("the server sent the rest of a different version")
        # A server may send less of it at once than was asked for.
        return start, None if content_range["total"] == "*" else int(content_range["total"])

    def _receive(self, response: httpx2.Response, size: int, total: int | None) -> None:
        """Write the body after the first `size` bytes of the part."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InputError(f"{self.request.label} is sent with a content encoding, although none was accepted.")
        self._refuse_excess(total or size)
        with os.fdopen(open_own(self.part, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(size)
            file.seek(size)
            write_bytes_durably(
                self.note_path, msgspec.json.encode(Note(response.headers.get("etag"), _boot_id(), total))
            )
            for chunk in response.iter_raw(CHUNK_BYTES):
                file.write(chunk)
                size += len(chunk)
                self._refuse_excess(size)
                self._log_progress(size, total or self.request.size_bytes)
                self.transport.wait(0)
            file.flush()
            os.fsync(file.fileno())
        if total is not None and size != total:
            raise TransientError(f"{size} of {total} bytes arrived")

    def _log_progress(self, size: int, total: int | None) -> None:
        if time.monotonic() - self.logged_s >= LINE_EVERY_S:
            self.logged_s = time.monotonic()
            log.info("%s: %s%s", self.request.label, size_text(size), f" of {size_text(total)}" if total else "")

    def _refuse_excess(self, size: int) -> None:
        """End a transfer that brings more than there is, before it has filled the disk."""
        request = self.request
        limit = request.most_bytes if request.size_bytes is None else request.size_bytes
        if limit is not None and size > limit:
            self._drop_part()
            raise InputError(f"{request.label} has {size:,} bytes or more, but {limit:,} were expected.")

    def _drop_part(self) -> None:
        self.note_path.unlink(missing_ok=True)  # first: without a part it would be of the file in place
        self.part.unlink(missing_ok=True)


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return str(os.getpid())  # a later process trusts no part then


def _refuse(response: httpx2.Response, label: str) -> None:
    """Raise for every status that is not a file."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        has_credentials = "authorization" in response.request.headers
        advice = "It refuses the credentials that were sent" if has_credentials else "It got no credentials"
        raise AuthError(
            f"The server refused {label} (status {status}). {advice}: the token of `TRAINER_CAPABILITY_TOKEN`, or of "
            "the job's `capability_token`, goes to known origins alone, and to those of `TRAINER_TOKEN_ORIGINS`."
        )
    if is_transient(status):
        asked_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
        raise TransientError(f"the server answered with status {status}", asked_s)
    raise InputError(f"{label} cannot be fetched: the server answered with status {status}.")
