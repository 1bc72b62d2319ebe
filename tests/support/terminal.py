"""A command on a pseudo-terminal, whose screen a terminal emulator keeps."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pyte


def _control_terminal():
    """Make standard input the terminal of this session, so that Ctrl-C on it is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """Show the output of a command on a terminal of `columns` by `rows`."""

    def __init__(self, words, columns=80, rows=24, cwd=None, preexec=_control_terminal):
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.received = b""
        code = "import sys; from genlight.adapter.cli import main; sys.exit(main())"
        # The size is what the terminal says, whatever the shell of these tests has.
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environ["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=follower, stdout=follower, stderr=follower, env=environ, cwd=cwd, start_new_session=True,
            preexec_fn=preexec,
        )  # fmt: skip
        os.close(follower)

    def press(self, keys):
        os.write(self._leader, keys.encode())

    def close(self):
        """Close the terminal, as a lost ssh connection does."""
        os.close(self._leader)
        self._leader = None

    def shows(self, *texts):
        """Wait until the screen has all of `texts` and return it; fail if it never does."""
        give_up_at = time.monotonic() + 240
        while not all(text in self.screen for text in texts):
            assert time.monotonic() < give_up_at, f"{texts} are not on the screen:\n{self.screen}"
            self._read(0.1)
        return self.screen

    def ended(self):
        """The exit code, once the command has ended."""
        give_up_at = time.monotonic() + 240
        while self.process.poll() is None:
            assert time.monotonic() < give_up_at, f"it does not end:\n{self.screen}"
            self._read(0.1)
        self._read(0.1)
        return self.process.returncode

    @property
    def screen(self):
        return "\n".join(line.rstrip() for line in self._screen.display)

    def _read(self, wait_s):
        while select.select([self._leader], [], [], wait_s)[0]:
            try:
                piece = os.read(self._leader, 1 << 16)
            except OSError:  # the other end is closed
                return
            self.received += piece
            self._stream.feed(piece)
            wait_s = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._leader is not None:
            os.close(self._leader)
