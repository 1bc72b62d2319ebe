"""The command line; `main` is the console script ``genlight``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""128 + SIGINT, as a shell says it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see `genlight.adapter.cli.command_line`.

    Without `arguments` the process is the command's own, and a stop signal that comes when a run or a fit has ended
    does not change its exit code.
    """
    try:
        from .command_line import main as run_main
    except KeyboardInterrupt:  # Its imports take long enough for that.
        return INTERRUPTED
    code = run_main(arguments)
    if arguments is None and sys.argv[1:2] in (["run"], ["fit"]):
        from .exit_code import keep_exit_code

        keep_exit_code(code)
    return code
