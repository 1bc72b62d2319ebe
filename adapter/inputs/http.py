"""Files from web servers: streamed, checked, cached, resumed after a break."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from ..contract.exceptions import AuthError, InputError
from ..plumbing.http import failure_text
from ..plumbing.retry import RetryPolicy, TransientError, is_transient, retry_after_s, with_retries
from ..plumbing.safe_open import make_directory
from ..plumbing.urls import safe_url
from .cache import CHUNK_BYTES, CacheEntry, Content, Stored, Version
from .progress import InputProgress, Tracker, TransferAbandoned

__all__ = ["Connections", "Download", "download", "probe"]


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

    A user who can write a file into the cache can write a note beside it as well.
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
    _check_and_settle(request, entry, version, resumed=start > 0)
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


def _check_and_settle(request: Download, entry: CacheEntry, version: Version, *, resumed: bool) -> None:
    content = Content.of(entry.part_path)
    contradiction = request.contradiction(content)
    if contradiction is None:
        entry.settle(content, version)
        return
    entry.drop_part()
    if resumed:  # the first part may have been of another version, or damaged since
        raise TransientError(f"what was put together {contradiction}")
    raise InputError(f"{request.label} {contradiction}. It was changed or damaged on the way.")


class Connections:
    """The connections that clients open while they are watched, so that a stop can end a transfer that waits.

    A thread that reads from a socket notices nothing else. Shutting the socket down wakes it: its transfer breaks like
    any other whose connection is lost, notes what has arrived, and finds out that it was stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: list[Any] = []
        self._is_ended = False

    @contextlib.contextmanager
    def watching(self, client: httpx2.Client) -> Iterator[None]:
        """Know of every connection that `client` opens meanwhile."""
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [*hooks["request"], self._before_request]}
        try:
            yield
        finally:
            client.event_hooks = hooks

    def end(self) -> None:
        """End all of them: every thread that waits for one is woken, and no further request is made."""
        with self._lock:
            self._is_ended = True
            for stream in self._streams:
                _shut(stream)

    def _before_request(self, request: httpx2.Request) -> None:
        if self._is_ended:
            raise TransferAbandoned
        request.extensions = {**request.extensions, "trace": self._tracing(request.extensions.get("trace"))}

    def _tracing(self, other: Callable[[str, Any], None] | None) -> Callable[[str, dict[str, Any]], None]:
        def trace(event: str, info: dict[str, Any]) -> None:
            if other is not None:
                other(event, info)
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self._note(info["return_value"])

        return trace

    def _note(self, stream: Any) -> None:
        with self._lock:
            self._streams.append(stream)
            if self._is_ended:
                _shut(stream)


def _shut(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        # Of TLS as well: its own shutdown would change what the reading thread is using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
