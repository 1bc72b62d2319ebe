"""The command line; `main` is the console script ``genlight``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""128 + SIGINT, as in a shell."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see `genlight.adapter.cli.command_line`.

    Without `arguments` the process is the command's own. A run or a fit then handles stop signals from here on, before
    anything large is imported, and a signal after its end no longer changes the exit code.
    """
    trains = arguments is None and sys.argv[1:2] in (["run"], ["fit"])
    try:
        if trains:
            from ...callbacks.stop.signals import StopSignals

            StopSignals().install()
        from .command_line import main as run_main
    except KeyboardInterrupt:  # Its imports take long enough for that.
        return INTERRUPTED
    code = run_main(arguments)
    if trains:
        # How the run ended has been reported by now. A process with torch in it needs a second to end, and a signal in
        # that time would have its exit code say otherwise.
        from ...callbacks.stop.signals import exit_on_signal

        exit_on_signal(code)
    return code
