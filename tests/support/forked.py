"""Processes that a fork server starts: as good as new ones, without the seconds in which torch and Lightning load."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support import SUPPORT

__all__ = ["Forked", "fork_server"]


@functools.cache
def fork_server() -> Path:
    """The socket of this process's server, which is started on the first call and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, SUPPORT / "fork_server.py", folder / "socket"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", (folder / "log").read_text()

    def close(stdin=process.stdin, stdout=process.stdout) -> None:
        stdin.close()
        process.wait()
        stdout.close()
        shutil.rmtree(folder)

    atexit.register(close)
    return folder / "socket"


class Forked:
    """A process of the fork server, which leads a session of its own; has what tests need of `subprocess.Popen`."""

    def __init__(self, program: str, *arguments: object, environ: Mapping[str, str], folder: Path, log: Path) -> None:
        wanted = {
            "program": program,
            "arguments": list(map(str, arguments)),
            "environ": dict(environ),
            "folder": str(folder),
            "log": str(log),
        }
        self.returncode: int | None = None
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(fork_server()))
        self.connection.sendall(json.dumps(wanted).encode() + b"\n")
        self.answers = self.connection.makefile()
        self.pid = int(self.answers.readline())

    def poll(self) -> int | None:
        return self.returncode if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self.connection], [], [], timeout)[0]:
            self.returncode = int(self.answers.readline())
            self.answers.close()
            self.connection.close()
        return self.returncode is not None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
