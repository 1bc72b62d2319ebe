"""Refusals on systems other than Linux."""

from __future__ import annotations

import platform


def unsupported_system(what: str) -> str | None:
    """Return why `what` cannot work on this operating system, or None."""
    if platform.system() == "Linux":
        return None
    return (
        f"{what} needs Linux and this system is {platform.system()}: it lacks /proc, by which processes are "
        "distinguished, and the file locks and syncs that checkpoints and event logs rely on. Run it on Linux, for "
        "example in a container or WSL 2."
    )


def require_linux(module: str) -> None:
    """Refuse to import `module` on other systems than Linux.

    Raises:
        ImportError: This is another system.
    """
    fault = unsupported_system(module)
    if fault is not None:
        raise ImportError(fault)
