"""A web server on loopback whose faults each test chooses; a conftest imports its fixtures."""

import contextlib
import hashlib
import json
import queue
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from genlight.adapter.plumbing.retry import RetryPolicy

STALL_S = 100.0
"""Longer than any client waits for the rest of an answer, and shorter than a test may take."""


@dataclass
class Resource:
    """The content and the faults of one path of the server."""

    content: bytes = b""
    etag: str | None = '"v1"'
    status: int = 200
    location: str | None = None
    token: str | None = None
    """Bearer token without which it answers 401."""
    break_after: list[int] = field(default_factory=list)
    """For each of the next answers, the bytes of the body to send before cutting the connection."""
    fail_first: list[int] = field(default_factory=list)
    """Statuses of the coming answers."""
    ranges: bool = True
    heeds_if_range: bool = True
    longest_range: int | None = None
    """Bytes of a partial answer at most, as some caches have it."""
    headers: dict[str, str] = field(default_factory=dict)
    before_answer: object = None
    stall_after: int | None = None
    """Number of body bytes after which the answer stalls until the server is closed."""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


class FileServer:
    """Serves `resources` and remembers every request."""

    def __init__(self):
        self.resources: dict[str, Resource] = {}
        self.requests: list[Request] = []
        self.stalled = queue.SimpleQueue()
        """Gets an item for each answer that stalls."""
        self.waited_in_vain = False
        """Whether an answer stalled for so long that it went on."""
        self.closing = threading.Event()
        self.connections: set[socket.socket] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                server.connections.add(self.connection)

            def handle(self):
                with contextlib.suppress(ConnectionError):  # a client may leave in the middle of an answer
                    super().handle()

            def finish(self):
                server.connections.discard(self.connection)
                super().finish()

            def do_GET(self):
                server.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # so that closing waits for them
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.closing.set()
        self.server.shutdown()
        self.thread.join()
        for connection in list(self.connections):  # clients may keep them for their next request
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server.server_close()

    def stall(self):
        """Abort an answer."""
        self.stalled.put(None)
        self.waited_in_vain |= not self.closing.wait(STALL_S)

    def put(self, path, content=b"", **options):
        """Serve `content` at `path`; returns the URL."""
        content = json.dumps(content).encode() if isinstance(content, (dict, list)) else content
        self.resources[path] = Resource(content, **options)
        return self.url + path

    def paths(self):
        return [request.path for request in self.requests]

    def answer(self, handler):
        parts = urlsplit(handler.path)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append(Request(handler.command, handler.path, headers))
        resource = self.resources.get(handler.path) or self.resources.get(parts.path)
        if resource is None:
            self._send(handler, 404, {})
        elif resource.fail_first:
            self._send(handler, resource.fail_first.pop(0), resource.headers)
        elif resource.token is not None and headers.get("authorization") != f"Bearer {resource.token}":
            self._send(handler, 401, {})
        elif resource.location is not None:
            self._send(handler, 302, {"Location": resource.location})
        else:
            self._serve(handler, resource, headers)

    def _serve(self, handler, resource, headers):
        if resource.before_answer:
            resource.before_answer()
        identity = {"ETag": resource.etag} if resource.etag else {}
        if resource.etag and headers.get("if-none-match") == resource.etag:
            return self._send(handler, 304, identity)
        body, status = resource.content, resource.status
        range_text, condition = headers.get("range"), headers.get("if-range")
        if range_text and resource.ranges and (condition in (None, resource.etag) or not resource.heeds_if_range):
            start = int(range_text.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                return self._send(handler, 416, {})
            end = min(len(body), start + (resource.longest_range or len(body)))
            identity["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
            body, status = body[start:end], 206
        cut = resource.break_after.pop(0) if resource.break_after else None
        return self._send(handler, status, {**identity, **resource.headers}, body, cut, resource.stall_after)

    def _send(self, handler, status, headers, body=b"", cut=None, stall_after=None):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        try:
            if stall_after is not None:
                handler.wfile.write(body[:stall_after])
                self.stall()
                body = body[stall_after:]
            handler.wfile.write(body if cut is None else body[:cut])
            handler.wfile.flush()
            if cut is not None:
                handler.connection.shutdown(2)
                handler.close_connection = True
        except OSError:
            handler.close_connection = True


@pytest.fixture
def server():
    """One server."""
    running = FileServer()
    yield running
    running.close()


@pytest.fixture
def other_server():
    """A server of another origin."""
    running = FileServer()
    yield running
    running.close()


@pytest.fixture
def retry():
    """Patience that a test can afford."""
    return RetryPolicy(attempts=3, first_delay_s=0.001, longest_delay_s=0.002, longest_retry_after_s=0.01)


@pytest.fixture
def sha256():
    return lambda content: hashlib.sha256(content).hexdigest()
