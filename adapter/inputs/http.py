"""Files from web servers: streamed, checked, cached, resumed after a break.

While a file is incomplete it is called ``*.part``; what identifies the server's version of it, and how much of it is
durable, is noted in a file next to it, so that a later attempt, also of another process, can go on where this one
broke. Only a whole and checked file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO

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

__all__ = ["CacheEntry", "Content", "Download", "download", "probe"]

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


# Made here, in one thread: msgspec crashes where several ask at once for a type that it has not yet looked into.
_PART, _STORED = msgspec.json.Decoder(Part), msgspec.json.Decoder(Stored)


@dataclass(frozen=True)
class CacheEntry:
    """The files that belong to one download target."""

    target: Path

    @property
    def part_path(self) -> Path:
        """The file while it is incomplete."""
        return self.target.with_name(f"{self.target.name}.part")

    def _hidden_file(self, suffix: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{suffix}")

    @contextlib.contextmanager
    def exclusive(self, tracker: Tracker) -> Iterator[bool]:
        """Hold the entry for this thread; yields whether another one had it first."""
        lock, waited = None, False
        while lock is None:
            try:
                lock = FileLock(self._hidden_file("lock"))
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
            known = _STORED.decode(read_own(self._hidden_file("meta.json"), limit=LARGEST_NOTE_BYTES))
            status = self.target.stat()
        except (OSError, ValueError, RecursionError):
            return None
        same = (status.st_size, status.st_mtime_ns) == (known.content.size_bytes, known.mtime_ns)
        return known if same else None

    def part(self) -> Part:
        """The recorded state of the partial file; nothing is durable where there is none."""
        try:
            known = _PART.decode(read_own(self._hidden_file("part.json"), limit=LARGEST_NOTE_BYTES))
            size = self.part_path.stat().st_size
        except (OSError, ValueError, RecursionError):
            return Part()
        return known if size >= known.durable_bytes else Part()

    def write_part(self, chunks: Iterator[bytes], version: Version, start: int) -> Generator[int, None, None]:
        """Write `chunks` after the first `start` bytes; yields the size so far, after each.

        However that ends, what was written is durable and noted.
        """
        write_bytes_durably(self._hidden_file("part.json"), msgspec.json.encode(Part(version, start)))
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
        write_bytes_durably(self._hidden_file("part.json"), msgspec.json.encode(Part(version, size)))

    def drop_part(self) -> None:
        """Forget the partial file."""
        self.part_path.unlink(missing_ok=True)
        self._hidden_file("part.json").unlink(missing_ok=True)

    def commit(self, content: Content, version: Version) -> None:
        """Give the partial file, whose content was checked, its name."""
        os.replace(self.part_path, self.target)
        stored = Stored(content, version, self.target.stat().st_mtime_ns, time.time())
        write_bytes_durably(self._hidden_file("meta.json"), msgspec.json.encode(stored))
        self._hidden_file("part.json").unlink(missing_ok=True)
        fsync_directory(self.target.parent)


CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,18})-\d{1,18}/(?P<total>\d{1,18}|\*)")

PROCESS_BEGAN = time.time()
"""When this process loaded the module, in seconds since 1970."""


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

    @property
    def limit(self) -> int | None:
        """Bytes after which a transfer is given up; None where nothing is known."""
        return self.most_bytes if self.size_bytes is None else self.size_bytes

    def contradiction(self, content: Content) -> str | None:
        """In which way `content` is not what was asked for; None when it is."""
        for name in ("size_bytes", "sha256", "xxh3_128"):
            expected, found = getattr(self, name), getattr(content, name)
            if expected not in (None, found):
                return f"has {name} {found}, but {expected} was expected"
        return None


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
    entry = CacheEntry(request.target)
    with entry.exclusive(tracker) as waited:
        stored = entry.stored()
        if stored is not None and not _holds(request, entry, stored):
            stored = None
        if stored is not None and (request.has_digest or _is_fresh(stored, asked_at if waited else None)):
            _tell_finished(request, stored.content.size_bytes, tracker)
        else:
            _transfer(request, client, entry, stored, retry or RetryPolicy(), tracker)
    return request.target


def _holds(request: Download, entry: CacheEntry, stored: Stored) -> bool:
    """Whether the copy in place is what was asked for: by what is noted of it, and a digest by its bytes themselves.

    A user who can write a file into the cache can write a note about it as well.
    """
    if request.contradiction(stored.content):
        return False
    return not request.has_digest or request.contradiction(Content.of(entry.target)) is None


def _is_fresh(stored: Stored, waited_since: float | None) -> bool:
    """Whether another process of this start fetched the file just now, so that it need not be asked for again.

    That is so if this one had to wait for it, or, where the server gives nothing to ask with, if it is younger than
    this process.
    """
    if waited_since is not None:
        return stored.stored_at >= waited_since
    return stored.version == Version() and stored.stored_at >= PROCESS_BEGAN


def _tell_finished(request: Download, size: int, tracker: Tracker) -> None:
    tracker.tell(InputProgress(request.label, size, size, finished=True))


def _transfer(
    request: Download,
    client: httpx2.Client,
    entry: CacheEntry,
    stored: Stored | None,
    retry: RetryPolicy,
    tracker: Tracker,
) -> None:
    """Attempt until the file is in place; attempts that brought bytes don't count as failures."""
    before = 0

    def attempt() -> None:
        nonlocal before
        before = entry.part().durable_bytes
        _attempt(request, client, entry, stored, tracker)

    try:
        with_retries(attempt, retry, tracker.wait, progressed=lambda: entry.part().durable_bytes > before)
    except TransientError as error:
        raise InputError(
            f"{request.label} could not be fetched: {error}, after {error.failures} attempts without progress."
        ) from None


def _attempt(
    request: Download, client: httpx2.Client, entry: CacheEntry, stored: Stored | None, tracker: Tracker
) -> None:
    """One request: for a confirmation, for the rest, or for the whole file."""
    part = entry.part()
    # Without a validator only a digest could show that two partial answers were of two versions.
    start = part.durable_bytes if part.version.if_range or request.has_digest else 0
    headers = {"Accept-Encoding": "identity", **_conditions(start, part.version, stored)}
    try:
        with client.stream("GET", request.url, headers=headers) as response:
            if response.status_code == 304 and stored is not None:
                return _tell_finished(request, stored.content.size_bytes, tracker)
            if response.status_code == 416:
                entry.drop_part()
                raise TransientError("the server has no such range")
            _refuse(response, request)
            start = start if _continues(response, start, part.version, entry) else 0
            version = Version(response.headers.get("etag"), response.headers.get("last-modified"))
            size = _receive(response, request, entry, version, start, tracker)
    except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
        raise InputError(f"{request.label} cannot be fetched: {failure_text(error)}.") from None
    except httpx2.HTTPError as error:
        raise TransientError(failure_text(error)) from None
    _check_and_commit(request, entry, version, resumed=start > 0)
    return _tell_finished(request, size, tracker)


def _conditions(start: int, version: Version, stored: Stored | None) -> dict[str, str]:
    if start > 0:
        return {"Range": f"bytes={start}-", **({"If-Range": version.if_range} if version.if_range else {})}
    if stored is not None and stored.version.etag:
        return {"If-None-Match": stored.version.etag}
    if stored is not None and stored.version.last_modified:
        return {"If-Modified-Since": stored.version.last_modified}
    return {}


def probe(url: str, client: httpx2.Client) -> None:
    """Ask for a file without reading it.

    Raises:
        AuthError: The server refuses the credentials.
        InputError: A download would fail for another reason.
    """
    request = Download(url, Path())
    try:
        with client.stream("GET", url, headers={"Accept-Encoding": "identity", "Range": "bytes=0-0"}) as response:
            if response.status_code != 416:  # an empty file has no first byte
                _refuse(response, request)
    except TransientError as error:
        raise InputError(f"{request.label} cannot be fetched for now: {error}.") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise InputError(f"{request.label} cannot be fetched: {failure_text(error)}.") from None


def _refuse(response: httpx2.Response, request: Download) -> None:
    """Raise for every status that is not a file."""
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        raise AuthError(f"The server refused {request.label} (status {status}). {_auth_advice(response)}")
    if is_transient(status):
        asked_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
        raise TransientError(f"the server answered with status {status}", asked_s)
    raise InputError(f"{request.label} cannot be fetched: the server answered with status {status}.")


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


def _continues(response: httpx2.Response, start: int, version: Version, entry: CacheEntry) -> bool:
    """Whether the answer goes on exactly where the partial file ends; False where it is the whole file."""
    if response.status_code != 206:
        return False
    content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if content_range is None or int(content_range["first"]) != start:
        raise TransientError("the server sent a different range from the one requested")
    if version.etag is not None and response.headers.get("etag", version.etag) != version.etag:
        entry.drop_part()
        raise TransientError("the server sent the rest of a different version")
    return True


def _total_bytes(response: httpx2.Response, start: int) -> int | None:
    """Size of the whole file; a server may send less of it at once than was asked for."""
    content_range = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if content_range is not None and content_range["total"] != "*":
        return int(content_range["total"])
    length = response.headers.get("content-length", "")
    return start + int(length) if length.isdecimal() and len(length) < 19 else None


def _receive(
    response: httpx2.Response, request: Download, entry: CacheEntry, version: Version, start: int, tracker: Tracker
) -> int:
    """Write the body after the first `start` bytes of the partial file; the size that it has then."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise InputError(f"{request.label} is sent with a content encoding, although none was accepted.")
    total = _total_bytes(response, start)
    size = start
    _refuse_excess(request, entry, total or start)
    with contextlib.closing(entry.write_part(response.iter_raw(CHUNK_BYTES), version, start)) as sizes:
        for size in sizes:
            _refuse_excess(request, entry, size)
            tracker.tell(InputProgress(request.label, size, total or request.size_bytes))
    if total is not None and size != total:
        raise TransientError(f"{size} of {total} bytes arrived")
    return size


def _refuse_excess(request: Download, entry: CacheEntry, size: int) -> None:
    """End a transfer that brings more than there is, before it has filled the disk."""
    if request.limit is not None and size > request.limit:
        entry.drop_part()
        raise InputError(f"{request.label} has {size:,} bytes or more, but {request.limit:,} were expected.")


def _check_and_commit(request: Download, entry: CacheEntry, version: Version, *, resumed: bool) -> None:
    content = Content.of(entry.part_path)
    contradiction = request.contradiction(content)
    if contradiction is None:
        entry.commit(content, version)
        return
    entry.drop_part()
    if resumed:  # the first part may have been of another version, or damaged since
        raise TransientError(f"what was put together {contradiction}")
    raise InputError(f"{request.label} {contradiction}. It was changed or damaged on the way.")
