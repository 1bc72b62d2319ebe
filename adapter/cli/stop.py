"""Ask a run to stop after a checkpoint of its current step, and wait until it has ended.

The request is a file in the run's folder, so it reaches a run on any host that shares the folder.

Exit codes: 0 the run has ended, 1 it still runs, 2 usage.
"""

from __future__ import annotations

import argparse
import time

from ..run.folder import request_stop, withdraw_stop
from ..view.summary import summary_of
from .parser import run_folder
from .terminal import print_error, say

_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", type=run_folder, help="folder of the run")
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="how long to wait")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0 ended, 1 still running."""
    folder, give_up_at = args.run, time.monotonic() + args.wait
    summary = summary_of(folder, counts=False)
    if summary.state == "running":
        request_stop(folder)
        say(f"asked run {summary.run_id} on {summary.host} to stop, at step {summary.step}")
    while summary.state == "running":
        if time.monotonic() >= give_up_at:
            text = f"{folder} still runs after {args.wait:g} s; it stops once its step, checkpoint and uploads are done"
            return print_error("stop", text, 1)
        time.sleep(_POLL_S)
        summary = summary_of(folder, counts=False)
    withdraw_stop(folder)
    say(f"{folder}:", *summary.words)
    return 0
