"""Processes that a fork server starts: as good as new ones, without the seconds in which torch and Lightning load."""

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

import psutil

from support import SUPPORT


@functools.cache
def fork_server() -> Path:
    """Return the socket of this process's server; the first call starts it, and it ends with this process."""
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


def environ_with_tests() -> dict[str, str]:
    """Return the environment of a process that imports modules of the tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])}


def is_alive(pid: int) -> bool:
    """Whether a process, of whomever, has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class Forked:
    """A process of the fork server that leads a new session, with the methods of `subprocess.Popen` that tests need.

    Args:
        program: A file, or the name of a module.
        arguments: Its arguments.
        environ: Its environment.
        folder: Its working directory.
        log: File for its standard error.
        output: File for its standard output; None is `log`.
    """

    def __init__(
        self,
        program: str,
        *arguments: object,
        environ: Mapping[str, str],
        folder: Path,
        log: Path,
        output: Path | None = None,
    ) -> None:
        wanted = {
            "program": program,
            "arguments": list(map(str, arguments)),
            "environ": dict(environ),
            "folder": str(folder),
            "log": str(log),
            "output": str(output or log),
        }
        self.log = log
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

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Wait for the end; returns the content of the log in the place of standard error."""
        self.wait(timeout)
        return None, self.log.read_text(errors="replace")

    def kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def run_forked(
    *words: object,
    folder: Path,
    program: str = "genlight.adapter.cli",
    environ: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command of genlight, or of another module or file, in a process of the fork server.

    Not for what is about the start of a process: modules that must not be loaded, or streams that are no files.
    """
    with tempfile.TemporaryDirectory() as places:
        log, output = Path(places, "log"), Path(places, "output")
        process = Forked(program, *words, environ=environ or os.environ, folder=folder, log=log, output=output)
        try:
            code = process.wait(timeout)
        finally:
            process.kill_session()
        return subprocess.CompletedProcess([program, *words], code, output.read_text(), log.read_text())
