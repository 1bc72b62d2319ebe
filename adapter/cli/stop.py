"""Ask a run to stop after a checkpoint of its current step, and wait until it has ended.

The request is a file in the run's folder, so that it reaches a run on any host that shares it.

Exit codes: 0 the run has ended, 1 it still runs, 2 usage.
"""

from __future__ import annotations

import argparse
import time

from ..run.artifacts_lock import lock_holder, request_stop, withdraw_stop
from ..view.summary import RunSummary, summary_of
from .parser import run_folder
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_ENDED, _RUNS = 0, 1
_LOOK_EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run", metavar="RUN", type=run_folder, help="folder of the run")
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="how long to wait")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0 ended, 1 still running."""
    folder = args.run
    summary = summary_of(folder, sizes=False)
    if summary.state != "running":
        say(f"{folder} does not run: {_how(summary)}")
        return _ENDED
    holder = lock_holder(folder)
    request_stop(folder)
    say(f"asked {holder or f'run {summary.run_id}'} to stop, at step {summary.step}")
    give_up_at = time.monotonic() + args.wait
    while (summary := summary_of(folder, sizes=False)).state == "running":
        if time.monotonic() >= give_up_at:
            text = (
                f"{folder} still runs after {args.wait:g} s, and will stop once its step, save and uploads have ended"
            )
            return complain("stop", text, _RUNS)
        time.sleep(_LOOK_EVERY_S)
    withdraw_stop(folder)
    say(f"{folder}: {_how(summary)}")
    if summary.resumable:
        say("start it again to go on")
    return _ENDED


def _how(summary: RunSummary) -> str:
    of = f" of {summary.max_steps}" if summary.max_steps else ""
    detail = f" ({summary.detail})" if summary.detail else ""
    return f"{summary.state}{detail} at step {summary.step}{of}"
