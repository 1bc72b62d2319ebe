"""The command line; `main` is the console script ``genlight``."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; see `genlight.adapter.cli.command_line`."""
    from .command_line import main as run_main

    return run_main(arguments)
