"""Files from web servers: streamed, checked, cached, resumed after a break.

While a file is incomplete it is called ``*.part``. A note next to it says which version of the server's it is and how
much of it is durable, so that a later attempt, also of another process, can go on where this one broke. Only a whole
and checked file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import httpx2
import msgspec
import xxhash

from ..contract.exceptions import AuthError, InputError
from ..plumbing.durable import fsync_directory, write_bytes_durably
from ..plumbing.file_lock import FileLock, LockHeldError
from ..plumbing.http import failure_text
from ..plumbing.retry import RetryPolicy, TransientError, is_transient, retry_after_s, with_retries
from ..plumbing.safe_open import make_directory, open_own, open_regular, read_own
from ..plumbing.urls import safe_url
from .progress import InputProgress, Tracker

__all__ = ["Download", "download"]

CHUNK_BYTES = 1 << 20
SYNC_EVERY_BYTES = 64 << 20
LOCK_POLL_S = 0.1
LARGEST_NOTE_BYTES = 1 << 16
CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-\d{1,18}/(?P<total>\d{1,18}|\*)")

PROCESS_BEGAN = time.time()
"""When this process loaded the module, in seconds since 1970."""


class Note(msgspec.Struct, frozen=True):
    """The recorded state of a file of the cache, whole or in part."""

    etag: str | None = None
    last_modified: str | None = None
    durable_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    mtime_ns: int | None = None
    """Of the whole file; None while there is a part of it."""
    stored_at: float = 0.0
    """Since when it is whole, in seconds since 1970."""

    @property
    def if_range(self) -> str | None:
        """The validator under which two partial answers may be joined; a weak one may not."""
        if self.etag is None:
            return self.last_modified
        return None if self.etag.startswith("W/") else self.etag


# Made here, in one thread: msgspec crashes where several ask at once for a type that it has not yet looked into.
_NOTE = msgspec.json.Decoder(Note)


@dataclass(frozen=True)
class Download:
    """A file to fetch, and how to know that it arrived whole."""

    url: str
    target: Path
    sha256: str | None = None
    xxh3_128: str | None = None
    size_bytes: int | None = None
    most_bytes: int | None = None
    """The most bytes that the file may have, where its size is not known."""

    def __repr__(self) -> str:
        return f"Download({self.label!r} to {str(self.target)!r})"

    @property
    def label(self) -> str:
        """The URL without user info and query."""
        return safe_url(self.url)

    @property
    def has_digest(self) -> bool:
        """Whether the content is known beforehand."""
        return self.sha256 is not None or self.xxh3_128 is not None

    def fault_of(self, path: Path) -> str | None:
        """In which way the file at `path`, which is read, is not what was asked for; None where it is."""
        expected = {"size_bytes": self.size_bytes, "sha256": self.sha256, "xxh3_128": self.xxh3_128}
        sha256, xxh3, size = hashlib.sha256(), xxhash.xxh3_128(), 0
        with os.fdopen(open_regular(path), "rb") as file:
            while self.has_digest and (chunk := file.read(CHUNK_BYTES)):
                sha256.update(chunk)
                xxh3.update(chunk)
            size = os.fstat(file.fileno()).st_size
        found = {"size_bytes": size, "sha256": sha256.hexdigest(), "xxh3_128": xxh3.hexdigest()}
        faults = (
            f"has {name} {found[name]}, but {value} was expected"
            for name, value in expected.items()
            if value not in (None, found[name])
        )
        return next(faults, None)


def download(
    request: Download, client: httpx2.Client, *, retry: RetryPolicy | None = None, tracker: Tracker | None = None
) -> Path:
    """Bring a file to ``request.target`` and return that.

    A copy in place is kept without asking the server if the request has a digest, which is proven, and if the server
    confirms it otherwise. Several processes may ask for one target: one transfers, the others wait and take the result.

    Raises:
        AuthError: The server refused the credentials (401, 403).
        InputError: The server has no such file, its content has another digest or size, or it cannot be reached.
    """
    tracker = tracker or Tracker()
    make_directory(request.target.parent)
    asked_at = time.time()
    with _exclusive(request.target, tracker) as waited:
        _Transfer(request, client, tracker).run(asked_at if waited else None, retry or RetryPolicy())
    return request.target


@contextlib.contextmanager
def _exclusive(target: Path, tracker: Tracker) -> Iterator[bool]:
    """Hold the lock of a target; yields whether another process or thread had it first."""
    lock, waited = None, False
    while lock is None:
        try:
            lock = FileLock(target.with_name(f".{target.name}.lock"))
        except LockHeldError:
            waited = True
            tracker.wait(LOCK_POLL_S)
    try:
        yield waited
    finally:
        lock.release()


class _Transfer:
    """One file on its way, by whoever holds its lock."""

    def __init__(self, request: Download, client: httpx2.Client, tracker: Tracker) -> None:
        self.request, self.client, self.tracker = request, client, tracker
        self.part = request.target.with_name(f"{request.target.name}.part")
        self.note_path = request.target.with_name(f".{request.target.name}.json")

    def run(self, waited_since: float | None, retry: RetryPolicy) -> None:
        """Attempt until the file is in place; attempts that brought bytes don't count as failures."""
        whole = self._whole()
        if whole is not None and (self.request.has_digest or _is_fresh(whole, waited_since)):
            return self._tell_finished(self.request.target.stat().st_size)
        before = 0

        def attempt() -> None:
            nonlocal before
            before = self._begun().durable_bytes
            self._attempt(whole)

        try:
            return with_retries(
                attempt, retry, self.tracker.wait, progressed=lambda: self._begun().durable_bytes > before
            )
        except TransientError as error:
            raise InputError(
                f"{self.request.label} could not be fetched: {error}, after {error.failures} attempts without progress."
            ) from None

    def _note(self) -> Note:
        try:
            return _NOTE.decode(read_own(self.note_path, limit=LARGEST_NOTE_BYTES))
        except (OSError, ValueError, RecursionError):
            return Note()

    def _whole(self) -> Note | None:
        """The note of a copy in place that is what was asked for; None only costs a transfer.

        A digest is proven by the bytes themselves: who can write a file into the cache can write a note about it.
        """
        note = self._note()
        try:
            status = self.request.target.stat()
            is_noted = (status.st_size, status.st_mtime_ns) == (note.durable_bytes, note.mtime_ns)
            is_right = (is_noted or self.request.has_digest) and self.request.fault_of(self.request.target) is None
        except OSError:
            return None
        return note if is_right else None

    def _begun(self) -> Note:
        """The note of the partial file; nothing is durable where there is none."""
        note = self._note()
        try:
            return note if note.mtime_ns is None and self.part.stat().st_size >= note.durable_bytes else Note()
        except OSError:
            return Note()

    def _attempt(self, whole: Note | None) -> None:
        """One request: for a confirmation, for the rest, or for the whole file."""
        request, begun = self.request, self._begun()
        # Without a validator only a digest could show that two partial answers were of two versions.
        start = begun.durable_bytes if begun.if_range or request.has_digest else 0
        headers = {"Accept-Encoding": "identity", **_conditions(start, begun, whole)}
        try:
            with self.client.stream("GET", request.url, headers=headers) as response:
                if response.status_code == 304 and whole is not None:
                    return self._tell_finished(whole.durable_bytes)
                if response.status_code == 416:
                    self._drop_part()
                    raise TransientError("the server has no such range")
                _refuse(response, request.label)
                start = start if self._continues(response, start, begun) else 0
                note = Note(response.headers.get("etag"), response.headers.get("last-modified"), start)
                size = self._receive(response, note)
        except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise InputError(f"{request.label} cannot be fetched: {failure_text(error)}.") from None
        except httpx2.HTTPError as error:
            raise TransientError(failure_text(error)) from None
        fault = request.fault_of(self.part)
        if fault is not None:
            self._drop_part()
            if start:  # the first part may have been of another version, or damaged since
                raise TransientError(f"what was put together {fault}")
            raise InputError(f"{request.label} {fault}. It was changed or damaged on the way.")
        os.replace(self.part, request.target)
        mtime_ns = request.target.stat().st_mtime_ns
        self._write_note(Note(note.etag, note.last_modified, size, mtime_ns, time.time()))
        fsync_directory(request.target.parent)
        return self._tell_finished(size)

    def _continues(self, response: httpx2.Response, start: int, begun: Note) -> bool:
        """Whether the answer goes on exactly where the partial file ends; False where it is the whole file."""
        if response.status_code != 206:
            return False
        content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if content_range is None or int(content_range["first"]) != start:
            raise TransientError("the server sent a different range from the one requested")
        if begun.etag is not None and response.headers.get("etag", begun.etag) != begun.etag:
            self._drop_part()
            raise TransientError("the server sent the rest of a different version")
        return True

    def _receive(self, response: httpx2.Response, note: Note) -> int:
        """Write the body after the bytes that `note` has; the size that the file has then.

        However that ends, what was written is durable and noted.
        """
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InputError(f"{self.request.label} is sent with a content encoding, although none was accepted.")
        size = note.durable_bytes
        total = _total_bytes(response, size)
        self._refuse_excess(total or size)
        self._write_note(note)
        with os.fdopen(open_own(self.part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            file.truncate(size)
            file.seek(size)
            try:
                for chunk in response.iter_raw(CHUNK_BYTES):
                    file.write(chunk)
                    size += len(chunk)
                    self._refuse_excess(size)
                    if size - note.durable_bytes >= SYNC_EVERY_BYTES:
                        note = self._noted(file.fileno(), note, size)
                    self.tracker.tell(InputProgress(self.request.label, size, total or self.request.size_bytes))
            finally:
                file.flush()
                self._noted(file.fileno(), note, size)
        if total is not None and size != total:
            raise TransientError(f"{size} of {total} bytes arrived")
        return size

    def _noted(self, descriptor: int, note: Note, size: int) -> Note:
        os.fsync(descriptor)
        note = msgspec.structs.replace(note, durable_bytes=size)
        self._write_note(note)
        return note

    def _write_note(self, note: Note) -> None:
        write_bytes_durably(self.note_path, msgspec.json.encode(note))

    def _refuse_excess(self, size: int) -> None:
        """End a transfer that brings more than there is, before it has filled the disk."""
        request = self.request
        limit = request.most_bytes if request.size_bytes is None else request.size_bytes
        if limit is not None and size > limit:
            self._drop_part()
            raise InputError(f"{request.label} has {size:,} bytes or more, but {limit:,} were expected.")

    def _drop_part(self) -> None:
        self.part.unlink(missing_ok=True)

    def _tell_finished(self, size: int) -> None:
        self.tracker.tell(InputProgress(self.request.label, size, size, finished=True))


def _is_fresh(note: Note, waited_since: float | None) -> bool:
    """Whether another process of this start fetched the file just now, so that it need not be asked for again.

    That is so if this one had to wait for it, or, where the server gives nothing to ask with, if it is younger than
    this process.
    """
    if waited_since is not None:
        return note.stored_at >= waited_since
    return note.etag is None and note.last_modified is None and note.stored_at >= PROCESS_BEGAN


def _conditions(start: int, begun: Note, whole: Note | None) -> dict[str, str]:
    if start > 0:
        return {"Range": f"bytes={start}-", **({"If-Range": begun.if_range} if begun.if_range else {})}
    if whole is not None and whole.etag:
        return {"If-None-Match": whole.etag}
    return {"If-Modified-Since": whole.last_modified} if whole is not None and whole.last_modified else {}


def _total_bytes(response: httpx2.Response, start: int) -> int | None:
    """Size of the whole file; a server may send less of it at once than was asked for."""
    content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if content_range is not None and content_range["total"] != "*":
        return int(content_range["total"])
    length = response.headers.get("content-length", "")
    return start + int(length) if length.isdecimal() and len(length) < 19 else None


def _refuse(response: httpx2.Response, label: str) -> None:
    """Raise for every status that is not a file."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        raise AuthError(f"The server refused {label} (status {status}). {_auth_advice(response)}")
    if is_transient(status):
        asked_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
        raise TransientError(f"the server answered with status {status}", asked_s)
    raise InputError(f"{label} cannot be fetched: the server answered with status {status}.")


def _auth_advice(response: httpx2.Response) -> str:
    sent = response.request.headers.get("authorization", "")
    if sent.startswith("Bearer "):
        return "It refuses the token of `TRAINER_CAPABILITY_TOKEN`, or of the job's `capability_token`."
    if sent:
        return "Credentials were sent; ask for ones that may read it."
    return (
        "No credentials were sent, because the token goes to known origins alone. "
        "Set `TRAINER_CAPABILITY_TOKEN`, and add the origin to `TRAINER_TOKEN_ORIGINS` if it may have the token."
    )
