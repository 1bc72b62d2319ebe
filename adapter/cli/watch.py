"""Watch runs in the terminal: progress, curves over each other, checkpoints, samples, uploads, findings, machine.

A run that has not started is shown once it has. Keys: n and p pick the metric, + and - smooth, t takes time instead of
steps, tab picks the run, the arrows scroll, s stops the run, q ends the view and leaves the runs alone.

Exit codes: 0 ended by q, 2 usage. A terminal that closes ends the view by the signal SIGHUP.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path
from threading import Thread

from .terminal import complain

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a run, which may start later")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, or 2 where there is nothing to watch or to watch on."""
    folders = list(dict.fromkeys(Path(each) for each in args.run))
    files = [folder for folder in folders if folder.exists() and not folder.is_dir()]
    if files:
        return complain("watch", f"{files[0]} is not a folder; name that of a run")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        text = "it needs a terminal; `genlight ls --json` and `genlight events RUN --follow` need none"
        return complain("watch", text)
    try:
        from ..view.watching import WatchRuns
    except ModuleNotFoundError as error:
        if error.name not in ("textual", "plotext"):
            raise
        return complain("watch", f"{error.name} is not installed: pip install 'genlight[watch]'")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, but nobody sees a view without a terminal
    Thread(target=_end_with_terminal, name="genlight-terminal", daemon=True).start()
    WatchRuns(folders).run()
    return 0


def _end_with_terminal() -> None:
    """Wait for the terminal to close, and end the process as its signal does.

    The signal itself comes only to processes whose controlling terminal it is. textual reads the end of the input over
    and over, and waits for its output without end; there is nothing to restore and nothing to save.
    """
    hang_up = select.poll()
    hang_up.register(sys.stdin, 0)
    if any(what & (select.POLLHUP | select.POLLERR) for _, what in hang_up.poll()):
        os.kill(os.getpid(), signal.SIGHUP)
