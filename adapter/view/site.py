"""The web application that shows the runs below a folder live; needs the extra ``serve``.

Each request is checked before anything is read. Its ``Host`` must be an IP address or a known name, because another
site can let its own name resolve to the address of this server and then read the answers (DNS rebinding). A request
that changes something must come from one of our pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import tarfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..plumbing.safe_open import open_below
from ..run.folder import LOCK_NAME, request_stop
from .checkpoints import checkpoints_of_run
from .history import BEGINNING_BYTES, Budget, History, history_of, media_kind
from .log_search import Searches
from .page import facts_of, page_of, stamp
from .summary import COUNTED, PROMETHEUS_TYPE, RunSummary, exposition, find_runs, modified_ms, summary_of

COOKIE = "genlight_token"
HEALTH = "/healthz"
"""Address that answers without a token, for probes."""
MOST_AT_ONCE = 20
"""Maximum number of runs on a page."""
MOST_HISTORIES = 16
"""Maximum number of runs kept in memory with their curves; the least recently requested are dropped."""
COUNTS_FOR_S = 0.3
"""Seconds that one listing may spend on the fields in `COUNTED`; the next listing continues with other runs."""
POINTS = 60_000
"""Points of all curves on a page."""
_PIECE_BYTES = 1 << 20
_SOURCES = "img-src 'self' data:; media-src 'self'; connect-src 'self'"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILE_HEADERS = {"Content-Security-Policy": "default-src 'none'; sandbox", "Content-Encoding": "identity"}
"""``Content-Encoding: identity`` keeps `GZipMiddleware` from compressing gigabytes."""


@dataclass
class _Seen:
    """A run as read so far, with a lock for reading more."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    history: History | None = None


class Runs:
    """The runs at and below `folder`, by address: the path below it, or ``.`` for the folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._listed: dict[str, tuple[RunSummary, float]] = {}
        """Summary of each run by address, and when its fields in `COUNTED` were last filled, by `time.monotonic`.

        0 means that they were never filled or that the run has ended or changed since: `listing` fills these first.
        """
        self._searches: Searches = {}
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, address: str) -> Path:
        """Return the folder of the run at `address`. The address is looked up in the listing, never used as a path.

        Raises:
            KeyError: There is no such run.
        """
        if address not in self._listed:
            self.listing()
        return self._listed[address][0].path

    def listing(self) -> list[dict[str, Any]]:
        """Return the summaries of all runs, newest start first."""
        with self._lock:
            paths = {path.relative_to(self.folder).as_posix(): path for path in find_runs(self.folder)}
            listed = {address: self._summarize(path, self._listed.get(address)) for address, path in paths.items()}
            # Fill `COUNTED` of changed and running runs again as time allows, those that have waited longest first.
            waiting = [each for each in listed if not listed[each][1] or listed[each][0].state == "running"]
            until = time.monotonic() + COUNTS_FOR_S
            for address in sorted(waiting, key=lambda each: listed[each][1]):
                if time.monotonic() < until:
                    listed[address] = summary_of(listed[address][0].path, searches=self._searches), time.monotonic()
            self._listed = listed
        newest_first = sorted(listed.items(), key=lambda each: (-(each[1][0].started_at_ms or 0), each[0]))
        return [{**summary.as_json(), "address": address} for address, (summary, _) in newest_first]

    def _summarize(self, path: Path, before: tuple[RunSummary, float] | None) -> tuple[RunSummary, float]:
        """Return the new entry of a run in `_listed`, given the entry before."""
        if before is not None and before[0].state != "running" and not _has_changed(before[0]):
            return before
        summary = summary_of(path, counts=False, searches=self._searches)
        if before is None:
            return summary, 0
        # Old values are better than none.
        summary = replace(summary, **{name: getattr(before[0], name) for name in COUNTED})
        return summary, before[1] if summary.state == "running" else 0

    def details(self, addresses: Sequence[str]) -> list[dict[str, Any]]:
        """Return runs as in `History.as_json`, with addresses of pictures and recordings instead of their bytes.

        Raises:
            KeyError: There is no such run.
        """
        return [self._details(address, len(addresses)) for address in addresses]

    def _details(self, address: str, among: int) -> dict[str, Any]:
        """Return one of `among` runs on a page. If it was read before, only new lines of its log are read."""
        folder = self.find(address)
        with self._lock:
            seen = self._seen.setdefault(address, _Seen())
            self._seen.move_to_end(address)
            if len(self._seen) > MOST_HISTORIES:
                self._seen.popitem(last=False)
        budget = Budget(
            points=POINTS // among, address_of=lambda path: f"file?{urlencode({'run': address, 'path': path})}"
        )
        with seen.lock:
            seen.history = history_of(folder, seen.history, self._searches)
            return {**seen.history.as_json(budget), "address": address}


def _has_changed(summary: RunSummary) -> bool:
    """Return whether a run has been active since its summary was made."""
    return max(modified_ms(summary.log), modified_ms(summary.path / LOCK_NAME)) > summary.alive_at_ms


def application(folder: Path, *, token: str | None = None, hosts: Collection[str] = (), prefix: str = "") -> Starlette:
    """Return the application for the runs below `folder`.

    Args:
        folder: Folder with runs below it.
        token: The token that every request must have, in a cookie or as a bearer token; None means no token.
        hosts: Host names that requests may use. Addresses and ``localhost`` are always allowed.
        prefix: Path below which a proxy shows the application, such as ``/runs``; the proxy may keep or remove it.
    """
    pages = _Pages(Runs(folder))
    routes = [
        Route("/", pages.shell("runs.json", "Runs")),
        Route("/run", pages.shell("data.json", "Run")),
        Route("/runs.json", pages.listing),
        Route("/metrics", pages.metrics),
        Route(HEALTH, lambda _: PlainTextResponse("ok\n")),
        Route("/data.json", pages.data),
        Route("/file", pages.file),
        Route("/checkpoint", pages.checkpoint),
        Route("/stop", pages.stop, methods=["POST"]),
    ]
    guard = Middleware(_Guard, token=token, hosts=frozenset(name.lower() for name in hosts), prefix=prefix)
    return Starlette(routes=routes, middleware=[guard, Middleware(GZipMiddleware, compresslevel=5)])


class _Guard:
    """Refuses requests for foreign host names or without the token, and adds security headers to each answer."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Collection[str], prefix: str) -> None:
        self._app, self._token, self._hosts, self._prefix = app, token, hosts, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._prefix and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        request = Request(scope)
        answer = self._refusal(request)
        if answer is None and not scope["path"]:  # relative addresses on the page need the slash at the end
            answer = RedirectResponse(f"{self._prefix}/", 307)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] += [(name, value) for name, value in more if name not in present]
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that must not reach the pages; None if it may."""
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            text = f"{host!r} is not a name of this server; add it with `genlight serve --allow-host NAME`"
            return PlainTextResponse(text, 421)
        if request.method == "POST" and not self._is_from_our_page(request, host):
            return PlainTextResponse("only a page of this server may request that", 403)
        if self._token is None or request.scope["path"] == HEALTH:
            return None
        if (token := request.query_params.get("token")) is not None and request.method == "GET":
            return self._welcome(request, token)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if any(self._is_token(each) for each in (request.cookies.get(COOKIE, ""), bearer)):
            return None
        return PlainTextResponse("open the address that `genlight serve` wrote, with its token", 401)

    def _welcome(self, request: Request, token: str) -> Response:
        """Move the token from the address into a cookie, because addresses stay in browser histories."""
        if not self._is_token(token):
            return PlainTextResponse("the token is wrong; open the address that `genlight serve` wrote", 401)
        rest = urlencode([pair for pair in parse_qsl(request.url.query) if pair[0] != "token"])
        # A relative redirect, so that the request cannot choose its destination.
        answer = RedirectResponse(f"?{rest}" if rest else "?", 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict", path=self._prefix or "/")
        return answer

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), (self._token or "").encode())

    def _is_from_our_page(self, request: Request, host: str) -> bool:
        """Return whether a page of this server sent the request.

        A page of another site can neither set ``X-Genlight`` nor choose its origin.

        The origin may have any scheme and any allowed host, because a proxy with TLS changes both.
        """
        scheme, _, origin = request.headers.get("origin", f"http://{host}").partition("://")
        is_known = scheme in ("http", "https") and origin.lower() in (host.lower(), *self._hosts)
        return request.headers.get("x-genlight") == "stop" and is_known

    def _is_ours(self, host: str) -> bool:
        """Return whether a ``Host`` is an IP address or a known name; DNS rebinding needs a name of another site."""
        name = _host_name(host)
        if name == "localhost" or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _host_name(host: str) -> str:
    """Return the name or address in a ``Host`` without its port; empty if it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


class _Pages:
    """The handlers of all addresses. They run in threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def shell(self, live: str, title: str) -> Callable[[Request], Response]:
        """Return the handler of a page that fetches its data from `live`."""
        text = page_of({"live": live}, title=title, sources=_SOURCES)
        return lambda _: HTMLResponse(text)

    def listing(self, request: Request) -> Response:
        """Return the summaries of all runs."""
        return _json(request, {"list": self._runs.listing(), "folder": str(self._runs.folder), **stamp()})

    def metrics(self, request: Request) -> Response:
        """Return the figures of all runs for Prometheus."""
        return PlainTextResponse(exposition(self._runs.listing(), int(time.time() * 1000)), media_type=PROMETHEUS_TYPE)

    def data(self, request: Request) -> Response:
        """Return all details of the requested runs."""
        addresses = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(addresses) <= MOST_AT_ONCE:
            return PlainTextResponse(f"choose 1 to {MOST_AT_ONCE} runs", 400)
        try:
            runs = self._runs.details(addresses)
        except KeyError as error:
            return PlainTextResponse(f"there is no run {error.args[0]!r} below {self._runs.folder}", 404)
        return _json(request, {**facts_of(runs), "folder": str(self._runs.folder)})

    def file(self, request: Request) -> Response:
        """Return a file of a run's samples: a picture is shown, a recording is played, any other file is downloaded."""
        path = request.query_params.get("path", "")
        if not path.startswith("samples/"):
            return PlainTextResponse("only files of samples are available here", 404)
        try:
            folder = self._runs.find(request.query_params.get("run", ""))
            descriptor = self._open(folder, path)
        except (KeyError, OSError):
            return PlainTextResponse("there is no such file", 404)
        kind = media_kind(os.pread(descriptor, BEGINNING_BYTES, 0))
        size = os.fstat(descriptor).st_size
        headers = {**_FILE_HEADERS, "Content-Length": str(size)}
        if kind is None:
            headers["Content-Disposition"] = "attachment"
        return _Files(_pieces(descriptor, size), kind or "application/octet-stream", headers, [descriptor])

    def checkpoint(self, request: Request) -> Response:
        """Return a checkpoint as a tar archive: its record and its files, as in the run's folder."""
        name = request.query_params.get("name", "")
        try:
            folder = self._runs.find(request.query_params.get("run", ""))
        except KeyError:
            return PlainTextResponse("there is no such run", 404)
        listed = checkpoints_of_run(folder)
        record = next((each.record for each in listed if each.record is not None and each.record.name == name), None)
        if record is None:
            return PlainTextResponse("there is no such checkpoint that can be read", 404)
        descriptors: list[tuple[str, int]] = []
        names = [record.path.name, *(entry.path for entry in record.files)]
        try:
            inside = record.path.parent.resolve().relative_to(folder)
            with contextlib.ExitStack() as on_error:
                for each in names:
                    descriptor = self._open(folder, (inside / each).as_posix())
                    on_error.callback(os.close, descriptor)
                    descriptors.append((each, descriptor))
                on_error.pop_all()
        except ValueError:
            return PlainTextResponse(f"{name} is outside the run's folder, behind a link", 404)
        except OSError as error:
            return PlainTextResponse(f"{name} is not complete: {error.strerror}", 404)
        headers = {**_FILE_HEADERS, "Content-Disposition": f'attachment; filename="{_plain(name)}.tar"'}
        return _Files(_archive(descriptors), "application/x-tar", headers, [each for _, each in descriptors])

    def stop(self, request: Request) -> Response:
        """Ask a run to stop."""
        try:
            folder = self._runs.find(request.query_params.get("run", ""))
            request_stop(folder)
        except KeyError:
            return PlainTextResponse("there is no such run", 404)
        except OSError as error:
            return PlainTextResponse(f"the stop request failed: {error.strerror}", 500)
        return PlainTextResponse("Stop requested: it will save a checkpoint of its current step and stop.")

    def _open(self, folder: Path, path: str) -> int:
        below = folder.relative_to(self._runs.folder).as_posix()
        return open_below(self._runs.folder, path if below == "." else f"{below}/{path}")


def _json(request: Request, data: dict[str, object]) -> Response:
    """Return `data`; or 304 if the client has the same data already, except for the values of `stamp`."""
    unstamped = {name: value for name, value in data.items() if name not in stamp()}
    tag = f'"{hashlib.sha256(json.dumps(unstamped, allow_nan=False).encode()).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(json.dumps(data, allow_nan=False), media_type="application/json", headers={"ETag": tag})


class _Files(StreamingResponse):
    """Sends open files, and closes them even if the browser ends the transfer early."""

    def __init__(
        self, pieces: Iterator[bytes], media_type: str, headers: dict[str, str], descriptors: Sequence[int]
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._descriptors = descriptors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)


def _pieces(descriptor: int, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file that may grow or shrink meanwhile."""
    while size > 0:
        if not (piece := os.read(descriptor, min(size, _PIECE_BYTES))):
            raise OSError("a file became shorter while it was sent")
        size -= len(piece)
        yield piece


def _archive(descriptors: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield open files as a tar archive."""
    for name, descriptor in descriptors:
        entry = tarfile.TarInfo(name)
        status = os.fstat(descriptor)
        entry.size, entry.mtime, entry.mode = status.st_size, int(status.st_mtime), 0o600
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield from _pieces(descriptor, entry.size)
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.~") else "_" for c in name)
