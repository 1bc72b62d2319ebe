"""Write the history of one or several runs as one HTML file that opens without a network.

It has curves, attempts and their use of time, checkpoints, samples, findings, events and the configuration. The curves
of several runs share one plot, and a table lists the differences.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..contract.exceptions import UsageError
from ..plumbing.durable import write_bytes_durably
from ..plumbing.text import size_text
from .parser import run_folder
from .terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run", metavar="RUN", nargs="+", type=run_folder, help="folder of a run")
    parser.add_argument("--to", metavar="FILE", default="report.html", help="the file to write")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0.

    Raises:
        UsageError: There are too many runs for one page.
    """
    from ..view.history import history_of  # numpy
    from ..view.page import report

    try:
        page = report([history_of(folder) for folder in args.run]).encode()
    except ValueError as error:
        raise UsageError(str(error)) from None
    write_bytes_durably(Path(args.to), page)
    say(f"{args.to} ({size_text(len(page))})")
    return 0
