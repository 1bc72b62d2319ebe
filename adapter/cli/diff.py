"""Say what differs between two runs: configuration, data, code, versions and results.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from typing import Any

from ..plumbing.text import printable
from ..view.differences import Difference, differences, facts_of_run
from ..view.summary import summary_of
from .parser import run_folder
from .terminal import aligned, complain, say

__all__ = ["add_arguments", "run"]

_WIDEST = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("run_a", metavar="RUN_A", type=run_folder, help="folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", type=run_folder, help="folder of another one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for other programs")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0."""
    folders = [args.run_a, args.run_b]
    runs = [facts_of_run(summary_of(folder)) for folder in folders]
    found = differences(runs)
    if args.json:
        say(*(json.dumps({"about": each.about, "name": each.name, "values": each.values}) for each in found))
    else:
        say(*_lines(found, [str(each["run_id"]) for each in runs]))
        for folder, each in zip(folders, runs, strict=True):
            if each["job"] is None:
                complain("diff", f"{folder} has no job.json: of hyperparameters, only numbers are compared", 0)
    return 0


def _lines(found: list[Difference], names: list[str]) -> list[str]:
    """A table with a heading for each kind of thing."""
    if not found:
        return ["nothing that is known differs"]
    rows = [[f"  {each.name}", *map(_text, each.values)] for each in found]
    head = ["", *map(_text, names)]
    first, *texts = aligned([head, *rows])
    lines = [first]
    for about, group in groupby(zip(found, texts, strict=True), lambda each: each[0].about):
        lines += [about, *(text for _, text in group)]
    return lines


def _text(value: Any) -> str:
    text = printable("-" if value is None else value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
