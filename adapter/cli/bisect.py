"""Find the first step, rank and value in which two runs differ.

The checkpoints of the runs and their witnesses, the files with digests of their steps, bound the step. Both runs are
then trained again from their last equal checkpoint, in a scratch folder; their own folders are only read.
Configuration, data, code and versions that differ are listed first.

Exit codes: 0 equal; 1 different; 2 wrong usage, or nothing to compare.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_json, run_folder
from .terminal import say, say_json, table_of

if TYPE_CHECKING:
    from ..prove.bisect import Bisection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run_a", metavar="RUN_A", type=run_folder, help="folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", type=run_folder, help="folder of another run")
    add_json(parser, "print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0 if the runs are equal, otherwise 1.

    Raises:
        UsageError: There is nothing to compare.
    """
    from ..prove.bisect import bisect

    with tempfile.TemporaryDirectory(prefix="genlight-bisect-", ignore_cleanup_errors=True) as folder:
        result = bisect([args.run_a.absolute(), args.run_b.absolute()], Path(folder).resolve())
    if args.json:
        say_json([result.as_json()])
    else:
        _print(result)
    return int(result.step is not None)


def _print(result: Bisection) -> None:
    say(*table_of(result.facts, ["RUN_A", "RUN_B"]), "", *result.notes)
    if result.step is None:
        say("no difference", style="ok")
        return
    place = f"in step {result.step}" if result.step else "before the first step"
    if not result.is_exact:
        place = f"after step {result.after}, at the latest {place}"
    apart = "" if result.distance is None else f" ({result.distance:.1e} apart)"
    say(f"the first difference is {place}, rank {result.rank}: {result.kind}, {result.name}{apart}", style="fault")
    say(*(f"  {name}  {value}" for name, value in zip(("RUN_A", "RUN_B"), result.values, strict=False)))
    if result.cause:
        say(f"  → {result.cause}")
