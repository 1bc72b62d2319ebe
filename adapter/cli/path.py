"""Print the path of a checkpoint of a run: the newest complete one, or the best by its score.

It prints the path of the record; other commands and `--ckpt_path` accept it. A broken checkpoint is reported and
skipped, as in a resume.

Exit codes: 0 done, 1 no checkpoint is complete, 2 usage.
"""

from __future__ import annotations

import argparse
import os

from ...callbacks.checkpoint.listing import list_checkpoints
from ...callbacks.checkpoint.selection import best_first, folder_of_checkpoints, monitored
from ..contract.exceptions import UsageError
from ..view.checkpoints import checkpoint_facts
from .terminal import print_error, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of its checkpoints")
    parser.add_argument(
        "--best", action="store_true", help="the best by `checkpoints.monitor` of the job instead of the newest"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, or 1 if no checkpoint is complete.

    Raises:
        UsageError: There is no run, or its job does not say which checkpoint is best.
    """
    if (folder := folder_of_checkpoints(args.run)) is None:
        raise UsageError(f"{args.run} is not the folder of a run; `genlight ls` lists the runs below a folder")
    candidates = list_checkpoints(folder)[::-1]
    if args.best:
        records = [each.record for each in candidates if each.record is not None]
        monitor, mode = monitored(records)
        if monitor is None or mode is None:
            raise UsageError(f"no job in {folder} defines the best score; set `checkpoints.monitor` in the job")
        listed = {each.record.path: each for each in candidates if each.record is not None}
        candidates = [listed[record.path] for record in best_first(records, monitor, mode)]
    for each in candidates:
        facts = checkpoint_facts(each, proves=True)
        if not facts["problem"]:
            say(os.path.abspath(each.path))
            return 0
        print_error("path", f"{facts['name']} is {facts['state']}; skipping it")
    return print_error("path", f"no complete checkpoint in {folder}", 1)
