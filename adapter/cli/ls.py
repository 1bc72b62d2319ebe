"""List runs: state, step, age, speed, loss, best score and size.

A run whose process is gone without having said how it ended is called lost, also where another host ran it.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..plumbing.text import printable, size_text
from ..view.summary import STYLES, RunSummary, figures_of, find_runs, summary_of
from .parser import folder_of_runs
from .terminal import complain, say

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "dir",
        metavar="DIR",
        nargs="?",
        default=".",
        type=folder_of_runs,
        help="folder with runs below it, or that of one run",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")
    parser.add_argument("--watch", action="store_true", help="show the list anew every two seconds, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0."""
    if args.watch:
        return _watch(args.dir, as_json=args.json)
    return _show(args.dir, as_json=args.json)


def _show(folder: Path, *, as_json: bool) -> int:
    runs = _runs(folder)
    if as_json:
        say(*(json.dumps(each.as_json()) for each in runs))
    elif not runs:
        complain("ls", f"no run below {folder}; a run's folder has metrics/events.jsonl", 0)
    else:
        # Wide enough for every column where the output goes to a file.
        console = Console(highlight=False)
        Console(highlight=False, width=console.width if console.is_terminal else 400).print(_table(runs, folder))
    return 0


def _watch(folder: Path, *, as_json: bool) -> int:
    console = Console(highlight=False)
    if as_json or not console.is_terminal:
        while True:
            _show(folder, as_json=as_json)
            time.sleep(2.0)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(_table(_runs(folder), folder), refresh=True)
            time.sleep(2.0)


def _runs(folder: Path) -> list[RunSummary]:
    """The runs below `folder`, the one with the newest sign of life first."""
    return sorted(map(summary_of, find_runs(folder)), key=lambda each: -each.alive_at_ms)


def _table(runs: list[RunSummary], folder: Path) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("RUN", "STATE", "STEP", "AGE", "SPEED", "LOSS", "BEST", "SIZE", "UPLOADS", "HOW IT ENDED"):
        right = name in {"STEP", "AGE", "SPEED", "LOSS", "SIZE"}
        table.add_column(name, justify="right" if right else "left", no_wrap=name not in {"BEST", "HOW IT ENDED"})
    now_ms = time.time() * 1000
    for each in runs:
        name = str(each.path.relative_to(folder) if each.path != folder else each.path)
        figures = figures_of(each.as_json())
        score = "" if each.score is None else f"{each.score[0]} {each.score[1]:.4g}"
        texts = [
            name,
            each.state,
            figures["steps"],
            age_text((now_ms - each.alive_at_ms) / 1000),
            figures["speed"],
            figures["loss"],
            score,
            size_text(each.size_bytes),
            figures["uploads"],
            each.detail,
        ]
        cells = [Text(printable(text)) for text in texts]
        cells[1].style = STYLES[each.state]
        table.add_row(*cells)
    return table


def age_text(seconds: float) -> str:
    """How long ago something was, in its largest unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    span = timedelta(seconds=max(seconds, 0))
    for name, unit in (("d", timedelta(days=1)), ("h", timedelta(hours=1)), ("min", timedelta(minutes=1))):
        if span >= unit:
            return f"{span // unit} {name}"
    return f"{span.seconds} s"
