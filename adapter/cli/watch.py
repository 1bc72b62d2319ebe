"""Watch runs live in the terminal: progress, curves, checkpoints, samples, uploads, findings, machine.

A run that has not started yet appears when it starts. Keys: n and p choose the metric, + and - smooth, t shows time
instead of steps, tab chooses the run, the arrows scroll, s stops the run, q closes the view; the runs continue.

Exit codes: 0 closed by q, 2 usage. Closing the terminal ends the view by SIGHUP.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path
from threading import Thread

from ..contract.exceptions import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a run, which may start later")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0.

    Raises:
        UsageError: A path is a file instead of a folder, or standard input or output is no terminal.
        ModuleNotFoundError: The extra ``watch`` (textual, plotext) is not installed.
    """
    folders = list(dict.fromkeys(Path(each) for each in args.run))
    files = [folder for folder in folders if folder.exists() and not folder.is_dir()]
    if files:
        raise UsageError(f"{files[0]} is not a folder; name the folder of a run")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("it needs a terminal; `genlight ls --json` and `genlight events RUN --follow` need none")
    from ..view.watching import WatchRuns

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, but a view needs its terminal
    Thread(target=_end_with_terminal, name="genlight-terminal", daemon=True).start()
    WatchRuns(folders).run()
    return 0


def _end_with_terminal() -> None:
    """Wait for the terminal to close, then end the process by SIGHUP.

    The kernel sends SIGHUP only if this terminal is the process's controlling terminal, so the process sends it to
    itself. Without a signal, textual would read end-of-file in a loop, and its exit would wait forever for output
    that can no longer be written. SIGHUP ends the process
    at once: a view has nothing to save, and there is no terminal to restore.
    """
    hang_up = select.poll()
    hang_up.register(sys.stdin, 0)
    if any(what & (select.POLLHUP | select.POLLERR) for _, what in hang_up.poll()):
        os.kill(os.getpid(), signal.SIGHUP)
