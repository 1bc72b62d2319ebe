"""The command line; `main` is the console script ``genlight``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see `genlight.adapter.cli.command_line`.

    Without `arguments`, the command is the one in ``sys.argv``, and this process exists only for it. A run or a fit
    then handles stop signals before any large import, and a signal after its end does not change the exit code.
    """
    trains = arguments is None and sys.argv[1:2] in (["run"], ["fit"])
    try:
        if trains:
            from ...callbacks.stop.signals import StopSignals
            from ..plumbing.imports import collect_rarely

            collect_rarely()
            StopSignals().install()
        from .command_line import main as run_main
    except KeyboardInterrupt:  # The imports take so long that a user may press Ctrl-C.
        return INTERRUPTED
    code = run_main(arguments)
    if trains:
        # The end of the run has been reported. A process with torch needs a second to exit, and without this a signal
        # in that time would change the exit code.
        from ...callbacks.stop.signals import exit_on_signal

        exit_on_signal(code)
    return code
