"""The last lines of a run that completed: how it ended, and where everything is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["show_results", "shown_path"]


def show_results(ended: str, places: Mapping[str, Path | None]) -> None:
    """Say on standard error how a run ended, and which of `places` there are.

    Args:
        ended: How it ended, in a line.
        places: Paths by what they hold; None and what does not exist are left out.
    """
    lines = [ended]
    lines += [f"  {name:<17} {shown_path(path)}" for name, path in places.items() if path is not None and path.exists()]
    with contextlib.suppress(OSError):  # it has completed, also where nobody reads that
        sys.stderr.write("\n".join(lines) + "\n")


def shown_path(path: Path) -> str:
    """A path as the user would type it from the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
