"""List runs: state, step, age, speed, loss, best score, size, device hours and cost.

A run is lost if its process, on this host or another, has ended without reporting how. BEST is the best value, among
the remaining checkpoints, of the score that the job names in `checkpoints.monitor`. HOURS are the hours of all
attempts, times their processes; COST is HOURS times the `price_per_device_hour` of the job. RESTART says whether the
steps that the newest attempt repeated after a restart have the same bits as the first time.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path

from ..plumbing.text import size_text
from ..view.summary import RunSummary, figures_of, find_runs, summary_of
from .parser import add_json, folder_of_runs
from .terminal import align_columns, print_error, say, say_json

_HEADER = ("STATE", "RUN", "STEP", "AGE", "SPEED", "LOSS", "BEST", "SIZE", "HOURS", "COST", "UPLOADS", "RESTART")
_STYLES = {"completed": "ok", "stopped": "warning", "failed": "fault", "lost": "fault"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default=".", type=folder_of_runs, help="folder with runs below it"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0."""
    runs = _runs(args.dir)
    if args.json:
        say_json(each.as_json() for each in runs)
    elif not runs:
        print_error("ls", f"no run below {args.dir}; the folder of a run has metrics/events.jsonl")
    else:
        for line, style in _lines(runs, args.dir):
            say(line, style=style)
    return 0


def _runs(folder: Path) -> list[RunSummary]:
    """Return the runs below `folder`, the most recently active first."""
    return sorted(map(summary_of, find_runs(folder)), key=lambda each: -each.alive_at_ms)


def _lines(runs: list[RunSummary], folder: Path) -> list[tuple[str, str]]:
    """Return the lines of the table, each with its style."""
    rows = [(*_HEADER, "HOW IT ENDED")]
    for each in runs:
        name = str(each.path.relative_to(folder) if each.path != folder else each.path)
        age = str(timedelta(seconds=max(round(time.time() - each.alive_at_ms / 1000), 0)))
        figures = figures_of(each.as_json())
        score = "" if each.score is None else f"{each.score[0]} {each.score[1]:.4g}"
        start = (each.state, name, figures["steps"], age, figures["speed"], figures["loss"], score)
        spent = (size_text(each.size_bytes), figures["hours"], figures["cost"])
        rows.append((*start, *spent, figures["uploads"], figures["restart"], each.ending))
    return list(zip(align_columns(rows), ["dim", *(_STYLES.get(each.state, "") for each in runs)], strict=True))
