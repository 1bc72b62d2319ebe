"""Starting a thread where there may be no room for one more: users and containers have a limit that counts threads."""

from __future__ import annotations

import threading

from ..contract.exceptions import ThreadLimitError

__all__ = ["started"]


def started(thread: threading.Thread) -> threading.Thread:
    """Start `thread` and return it.

    Raises:
        ThreadLimitError: The system has no room for another thread; one that was not started must not be joined.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadLimitError(
            f"No thread could be started for {thread.name} ({error}). Raise the limit on processes and threads "
            "(`ulimit -u`, or the container's limit on pids), or use fewer `workers`."
        ) from error
    return thread
