"""The last lines of a run that completed: how it ended, and where everything is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["show_results", "shown_path", "working_directory"]


def show_results(
    ended: str,
    *,
    final: Path | None = None,
    checkpoints: Path | None = None,
    samples: Path | None = None,
    logs: Mapping[str, Path],
) -> None:
    """Say on standard error how a run ended, and where its results are; what does not exist is left out.

    Args:
        ended: How it ended, in a line.
        final: The final checkpoint.
        checkpoints: The folder of checkpoints.
        samples: The folder of samples; left out where it is empty.
        logs: What logs the run has, by name.
    """
    has_samples = samples is not None and samples.is_dir() and any(samples.iterdir())
    places = {
        "final checkpoint": final,
        "checkpoints": checkpoints,
        "samples": samples if has_samples else None,
        **logs,
    }
    lines = [ended]
    lines += [f"  {name:<17} {shown_path(path)}" for name, path in places.items() if path is not None and path.exists()]
    with contextlib.suppress(OSError):  # it has completed, also where nobody reads that
        sys.stderr.write("\n".join(lines) + "\n")


def shown_path(path: Path) -> str:
    """A path as the user would type it from the working directory."""
    here = working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else str(path)


def working_directory() -> Path | None:
    """The working directory; None where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
