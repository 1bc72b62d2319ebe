"""The connections of the transfers, so that a stop can end a transfer that waits for its server.

A thread that reads from a socket heeds nothing else. Shutting the socket down wakes it: its transfer breaks like any
other whose connection is lost, notes what has arrived, and finds out that it was stopped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from .progress import TransferAbandoned

__all__ = ["Connections"]


class Connections:
    """Those that clients open while they are watched."""

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
        """End all of them; whoever waits for one is woken, and no further request is made."""
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
