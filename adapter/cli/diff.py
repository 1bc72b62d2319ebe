"""Show what differs between two runs: configuration, data, code, versions and results.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..view.differences import differences, facts_of_run
from ..view.summary import summary_of
from .parser import add_json, run_folder
from .terminal import print_error, say, say_json, table_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run_a", metavar="RUN_A", type=run_folder, help="folder of a run")
    parser.add_argument("run_b", metavar="RUN_B", type=run_folder, help="folder of another run")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0."""
    folders = [args.run_a, args.run_b]
    runs = [facts_of_run(summary_of(folder)) for folder in folders]
    changes = differences(runs)
    if args.json:
        say_json(map(asdict, changes))
        return 0
    for folder, each in zip(folders, runs, strict=True):
        if each["job"] is None:
            print_error("diff", f"{folder} has no job.json: only numeric hyperparameters are compared")
    say(*table_of(changes, [str(each["run_id"]) for each in runs]))
    return 0
