"""Refusals on systems other than Linux."""

from __future__ import annotations

import platform

__all__ = ["require_linux", "unsupported_system"]


def unsupported_system(what: str) -> str | None:
    """Why `what` cannot work on this operating system; None where it can."""
    if platform.system() == "Linux":
        return None
    return (
        f"{what} needs Linux and this system is {platform.system()}: it lacks /proc, by which processes are told "
        "apart, and the file locks and syncs that checkpoints and event logs rely on. Run it on Linux, in a container "
        "or WSL 2 for example."
    )


def require_linux(module: str) -> None:
    """Refuse to import `module` elsewhere.

    Raises:
        ImportError: This is another system.
    """
    fault = unsupported_system(module)
    if fault is not None:
        raise ImportError(fault)
