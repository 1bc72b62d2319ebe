"""What a command needs of the operating system."""

from __future__ import annotations

import platform

__all__ = ["ANYWHERE", "unsupported_system"]

ANYWHERE = ("checkpoint", "events", "init")
"""Commands that only read and write files."""


def unsupported_system(command: str) -> str | None:
    """Why `command` cannot work on this operating system; None where it can."""
    if platform.system() == "Linux" or command in ANYWHERE:
        return None
    return (
        f"genlight {command} needs Linux and this system is {platform.system()}: it lacks /proc, by which processes "
        "are told apart, and the file locks and syncs that checkpoints and event logs rely on. Run it on Linux, in a "
        f"container or WSL 2 for example. These commands work here: {', '.join(ANYWHERE)}."
    )
