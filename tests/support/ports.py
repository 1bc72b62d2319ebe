"""Ports on which nothing listens, for programs that are told their port before they start."""

import itertools
import os
import socket

_FIRST, _PER_WORKER = 20_000, 500
"""Below the ports that the system gives to connections: such a port may be taken before the program starts."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.cycle(range(_FIRST + _worker * _PER_WORKER, _FIRST + (_worker + 1) * _PER_WORKER))


def free_port() -> int:
    """Return a port that this call returned to no other test of this run."""
    for port in itertools.islice(_numbers, _PER_WORKER):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
