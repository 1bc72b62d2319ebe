"""Print where a checkpoint of a run is: the newest whole one, or the best by its score.

It is the path of its record, which other commands and `ckpt_path` take. Its files are proven by their digests; one that
is broken is named and passed over, as a resume does.

Exit codes: 0 done, 1 there is none that is whole, 2 usage.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ...callbacks.checkpoint.format.record import CheckpointRecord, is_record_of_callback
from ...callbacks.checkpoint.selection import best_first, folder_of_checkpoints, list_checkpoints, monitored
from ...callbacks.checkpoint.storage.files import verify_files
from ..contract.exceptions import BrokenCheckpointError
from .terminal import complain, say

__all__ = ["add_arguments", "run"]

_NONE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of its checkpoints")
    parser.add_argument("--best", action="store_true", help="the one with the best score instead of the newest")
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        help="--best: whether a low or a high score is better; by default as the job says",
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0, 1 where no checkpoint is whole, or 2 for what is no run."""
    folder = folder_of_checkpoints(args.run)
    if folder is None:
        return complain("path", f"{args.run} is no folder of a run; `genlight ls` lists the runs below a folder")
    listed = list_checkpoints(folder)
    records = [each.record for each in listed if each.record is not None]
    if args.best:
        return _best(folder, records, args.mode)
    for broken in (each for each in listed if each.record is None and is_record_of_callback(each.path)):
        complain("path", f"{broken.path} is broken: {broken.problem}; passing it over", 0)
    return _first_whole(records[::-1], f"no whole checkpoint in {folder}")


def _best(folder: Path, records: Sequence[CheckpointRecord], mode: str | None) -> int:
    monitor, known = monitored(records)
    if monitor is None:
        text = f"no checkpoint in {folder} has a score; a job names one in `checkpoints.monitor`"
        return complain("path", text, _NONE)
    if mode is None and known is None:
        text = f"the records do not say whether a low or a high {monitor} is better; add `--mode min` or `--mode max`"
        return complain("path", text)
    best = best_first(records, monitor, "max" if (mode or known) == "max" else "min")
    return _first_whole(best, f"no whole checkpoint in {folder} has the score {monitor}")


def _first_whole(records: Sequence[CheckpointRecord], otherwise: str) -> int:
    """Print the first of `records` that proves whole; says `otherwise` where none does."""
    for record in records:
        try:
            verify_files(record)
        except BrokenCheckpointError as error:
            complain("path", f"{error}; passing it over", 0)
            continue
        say(os.path.abspath(record.path))
        return 0
    return complain("path", otherwise, _NONE)
