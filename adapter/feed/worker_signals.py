"""Workers outlive a SIGTERM that was sent to the whole process group, as schedulers send it.

The training process finishes its step and saves a checkpoint then, for which it may need further batches; it ends its
workers itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

__all__ = ["heed_parent_alone", "starting_workers"]


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Processes that are started in this block hold SIGTERM back until they call `heed_parent_alone`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_parent_alone(_: int = 0) -> None:
    """End on SIGTERM only if the parent sent it, or is gone; for the main thread of a new worker process."""
    # Blocked, it waits for the thread, which inherits the mask, as all later ones do. A handler would not be told who
    # sent the signal, and torch has put one of its own in C.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait, args=(os.getppid(),), name="worker-signals", daemon=True).start()


def _wait(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)
