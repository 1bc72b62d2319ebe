"""Files from web servers: streamed, checked, cached, and resumed after an interruption.

An incomplete file has the name ``*.part``. A note next to it has the version (the ETag), so that a later attempt, even
by another process, can continue where this one ended. Only a complete and checked file gets its final name. The note
then has the version of that file.
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
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import xxhash

from ..contract.exceptions import AuthError, InputError
from ..plumbing.durable import fsync_directory, make_directory, write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError
from ..plumbing.http import failure_text
from ..plumbing.retry import RetryPolicy, TransientError, transient_answer, with_retries
from ..plumbing.safe_open import open_own, open_regular, read_own
from ..plumbing.text import size_text
from ..plumbing.urls import safe_url

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.1
LARGEST_NOTE_BYTES = 1 << 16
CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-\d{1,18}/(?P<total>\d{1,18}|\*)")


class Note(msgspec.Struct, frozen=True):
    """Version of the partial file; if there is none, version of the complete file."""

    etag: str | None = None
    boot_id: str = ""
    """Boot id of the system when the part was written: written bytes survive a kill, but maybe not a reboot."""
    size: int | None = None
    """Size of the complete file in bytes, if the server reported it."""

    @property
    def joins_parts(self) -> bool:
        """Whether two answers with this ETag have the same bytes; a weak ETag does not guarantee that."""
        return self.etag is not None and not self.etag.startswith("W/")


# Created here, in one thread: msgspec crashes if several threads create the decoder of a new type at once.
_NOTE = msgspec.json.Decoder(Note)


@dataclass(frozen=True)
class Transport:
    """The client and limits that all transfers of a run share."""

    client: httpx2.Client
    """Sends the token only to permitted origins."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    ended: threading.Event = field(default_factory=threading.Event)
    """Once set, ends every transfer after the current chunk, and every wait immediately."""

    def wait(self, seconds: float) -> None:
        """Wait; with 0 seconds, only check that the transfers may continue.

        Raises:
            CancelledError: All transfers were ended.
        """
        if self.ended.wait(seconds):
            raise CancelledError


@dataclass(frozen=True)
class Download:
    """A file to fetch, and how to verify it."""

    url: str = field(repr=False)  # its query may be a credential
    target: Path
    digest: str | None = None
    """``sha256:`` or ``xxh3_128:`` and hexadecimal digits, if the content is known in advance."""
    size_bytes: int | None = None
    most_bytes: int | None = None
    """Maximum size of the file, if `size_bytes` is not known."""

    @property
    def label(self) -> str:
        """The URL without user info and query."""
        return safe_url(self.url)

    def fault_of(self, path: Path) -> str | None:
        """Read the file at `path`; return how it differs from the request, or None if it does not."""
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self.size_bytes not in (None, size):
                return f"has {size} bytes, but {self.size_bytes} were expected"
            if self.digest is None:
                return None
            algorithm, _, expected = self.digest.partition(":")
            made: Any = xxhash.xxh3_128 if algorithm == "xxh3_128" else hashlib.sha256
            actual = hashlib.file_digest(file, made).hexdigest()
        return None if actual == expected else f"has {algorithm} {actual}, but {expected} was expected"


def download(request: Download, transport: Transport) -> Path:
    """Fetch a file to ``request.target`` and return that path.

    An existing copy is used if it has the digest of the request. Without a digest, the server must confirm its ETag.
    If several processes request one target, one transfers it and the others wait.

    Raises:
        AuthError: The server refused the credentials (401, 403).
        InputError: The server has no such file, its content has another digest or size, or it cannot be reached.
        CancelledError: All transfers were ended.
    """
    make_directory(request.target.parent)
    asked_at = time.time()
    lock = _lock_target(request.target, transport)
    try:
        transfer = _Transfer(request, transport)
        if not transfer.is_done_since(asked_at):
            transfer.run()
    finally:
        lock.release()
    log_arrival(request.label, request.target.stat().st_size)
    return request.target


def log_arrival(name: str, size: int) -> None:
    """Log that an input has arrived."""
    log.info("%s is here (%s)", name, size_text(size))


def _lock_target(target: Path, transport: Transport) -> FileLock:
    while True:
        with contextlib.suppress(LockHeldError):
            return FileLock(target.with_name(f".{target.name}.lock"))
        transport.wait(LOCK_POLL_S)


class _Transfer:
    """The transfer of one file, by the holder of its lock."""

    def __init__(self, request: Download, transport: Transport) -> None:
        self.request, self.transport, self.target = request, transport, request.target
        self.part = self.target.with_name(f"{self.target.name}.part")
        self.note_path = self.target.with_name(f".{self.target.name}.json")
        self.before = 0
        """Size of the part when the newest attempt began."""
        self.logged_s = time.monotonic()

    def is_done_since(self, asked_at: float) -> bool:
        """Return whether the target is complete: by its digest, or because a process has fetched it since `asked_at`.

        Only the bytes prove a digest: anybody who can write a file into the cache can also write its note.
        """
        with contextlib.suppress(OSError):
            return self._is_complete() and (self.request.digest is not None or self.target.stat().st_mtime >= asked_at)
        return False

    def run(self) -> None:
        """Try until the file is in place; an attempt that received bytes does not count as a failure."""
        retry = self.transport.retry
        try:
            with_retries(self._attempt, retry, self.transport.wait, progressed=lambda: self._part_bytes() > self.before)
        except TransientError as error:
            raise InputError(
                f"{self.request.label} could not be fetched: {error}, after {retry.attempts} attempts without progress."
            ) from None

    def _part_bytes(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _is_complete(self) -> bool:
        return self.target.exists() and self.request.fault_of(self.target) is None

    def _note(self) -> Note:
        try:
            return _NOTE.decode(read_own(self.note_path, limit=LARGEST_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return Note()

    def _attempt(self) -> None:
        """Send one request: to confirm the existing file, for the rest of a partial file, or for the complete file."""
        request, note = self.request, self._note()
        self.before = self._part_bytes()
        start, headers = self._plan(note)
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
        if (fault := request.fault_of(self.part)) is not None:
            self._drop_part()
            if start:  # the first part may have another version, or may have been damaged since
                raise TransientError(f"the combined file {fault}")
            raise InputError(f"{request.label} {fault}. It was changed or damaged on the way.")
        os.replace(self.part, self.target)
        fsync_directory(self.target.parent)

    def _plan(self, note: Note) -> tuple[int, dict[str, str]]:
        """Return the offset of the bytes to request, and the headers of the request."""
        request, start, headers = self.request, 0, {"Accept-Encoding": "identity"}
        if self.part.exists():
            # Without a strong ETag, only a digest reveals that two answers had two versions, or that bytes were lost.
            if request.digest is not None or (note.joins_parts and note.boot_id == _boot_id()):
                # No server sends an empty range, so for a part that may be complete its last byte is requested again.
                may_be_complete = self.before in (note.size or request.size_bytes or self.before, request.size_bytes)
                start = max(self.before - may_be_complete, 0)
            if start:
                headers["Range"] = f"bytes={start}-"
                headers |= {"If-Range": note.etag} if note.etag is not None and note.joins_parts else {}
        elif note.etag is not None and self._is_complete() and note.size in (None, self.target.stat().st_size):
            headers["If-None-Match"] = note.etag
        return start, headers

    def _place(self, response: httpx2.Response, start: int, note: Note) -> tuple[int, int | None]:
        """Return the offset of the answer in the file, and the size of the complete file if it is known."""
        if response.status_code != 206:
            length = response.headers.get("content-length", "")
            return 0, int(length) if length.isdecimal() and len(length) < 19 else None
        content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if content_range is None or int(content_range["first"]) != start:
            raise TransientError("the server sent a different range from the one requested")
        if start and note.etag is not None and response.headers.get("etag", note.etag) != note.etag:
            self._drop_part()
            raise TransientError("the server sent the rest of a different version")
        # The total is from Content-Range, not from Content-Length: a server may send a shorter range than requested.
        return start, None if content_range["total"] == "*" else int(content_range["total"])

    def _receive(self, response: httpx2.Response, size: int, total: int | None) -> None:
        """Write the body after the first `size` bytes of the part."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InputError(f"{self.request.label} has a content encoding, although the request accepted none.")
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
        """End a transfer that exceeds the expected size, before it fills the disk."""
        request = self.request
        limit = request.most_bytes if request.size_bytes is None else request.size_bytes
        if limit is not None and size > limit:
            self._drop_part()
            raise InputError(f"{request.label} has {size:,} bytes or more, but {limit:,} were expected.")

    def _drop_part(self) -> None:
        # Remove the note first: a note without a part is taken for the version of the complete file.
        self.note_path.unlink(missing_ok=True)
        self.part.unlink(missing_ok=True)


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return str(os.getpid())  # so a later process does not trust the part


def _refuse(response: httpx2.Response, label: str) -> None:
    """Raise an error unless the status says that the body is the file, or a range of it."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        has_credentials = "authorization" in response.request.headers
        advice = "It refuses the credentials that were sent" if has_credentials else "It got no credentials"
        raise AuthError(
            f"The server refused {label} (status {status}). {advice}: the token of `TRAINER_CAPABILITY_TOKEN`, or of "
            "the job's `capability_token`, is sent only to known origins and to those in `TRAINER_TOKEN_ORIGINS`."
        )
    raise transient_answer(status, response.headers, f"the server answered with status {status}") or InputError(
        f"{label} cannot be fetched: the server answered with status {status}."
    )
