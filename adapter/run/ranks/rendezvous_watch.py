"""The wait of a rank for the others to come, in which no signal handler of Python runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ...contract.exceptions import TrainingCanceled
from ...plumbing.threads import started

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["watching_rendezvous"]

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
PATIENCE_S = 2.0
"""How long after a stop was asked for the others may still come, so that all end in the usual way."""


@contextlib.contextmanager
def watching_rendezvous(
    trainer: pl.Trainer, raise_if_stopped: Callable[[], None], end: Callable[[TrainingCanceled], None]
) -> Iterator[None]:
    """Call `end`, in a thread, when a stop is asked for in this block before all ranks have joined the rendezvous.

    A node that never comes would have this rank wait for half an hour, and heed nothing but a second signal.

    Args:
        trainer: Whose ranks; a single one has none to wait for.
        raise_if_stopped: Raises `TrainingCanceled` once a stop is asked for.
        end: Takes what was raised, and ends the process.
    """
    from torch import distributed

    stopped = threading.Event()

    def have_all_joined() -> bool:
        return distributed.is_available() and distributed.is_initialized()

    def watch() -> None:
        while not have_all_joined() and not stopped.wait(LOOK_EVERY_S):
            try:
                raise_if_stopped()
            except TrainingCanceled as error:
                if not stopped.wait(PATIENCE_S) and not have_all_joined():
                    log.warning("the other ranks have not joined, so this one ends without them")
                    end(error)
                return

    if trainer.world_size > 1:
        started(threading.Thread(target=watch, name="genlight-rendezvous", daemon=True))
    try:
        yield
    finally:
        stopped.set()
