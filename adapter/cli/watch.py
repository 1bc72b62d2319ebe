"""Watch runs live in the terminal: progress, curves, checkpoints, samples, uploads, findings, machine.

A run that has not started yet is shown once it has. Keys: n and p choose the metric, + and - smooth, t shows time
instead of steps, tab chooses the run, the arrows scroll, s stops the run, q ends the view; the runs go on.

Exit codes: 0 ended by q, 2 usage. A terminal that closes ends the view by SIGHUP.
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

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a run, which may start later")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0.

    Raises:
        UsageError: There is nothing to watch, or no terminal.
        ModuleNotFoundError: The extra is not installed.
    """
    folders = list(dict.fromkeys(Path(each) for each in args.run))
    files = [folder for folder in folders if folder.exists() and not folder.is_dir()]
    if files:
        raise UsageError(f"{files[0]} is not a folder; name that of a run")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("it needs a terminal; `genlight ls --json` and `genlight events RUN --follow` need none")
    from ..view.watching import WatchRuns

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, but nobody sees a view without a terminal
    Thread(target=_end_with_terminal, name="genlight-terminal", daemon=True).start()
    WatchRuns(folders).run()
    return 0


def _end_with_terminal() -> None:
    """Wait for the terminal to close, and end the process like SIGHUP does.

    The signal itself comes only to processes whose controlling terminal it is. textual reads the end of the input over
    and over, and waits for its output without end; there is nothing to restore and nothing to save.
    """
    hang_up = select.poll()
    hang_up.register(sys.stdin, 0)
    if any(what & (select.POLLHUP | select.POLLERR) for _, what in hang_up.poll()):
        os.kill(os.getpid(), signal.SIGHUP)
