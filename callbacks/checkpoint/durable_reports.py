"""What became durable in the background: the training thread reports it, and only then may older checkpoints go."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

import lightning.pytorch as pl

from ...adapter.contract.exceptions import CheckpointError, GenlightError
from ..hook.events import fire, run_state_of
from .format.record import CheckpointRecord
from .retention import Retention, is_named, own_records, to_delete
from .selection import list_checkpoints
from .storage.commit import delete_checkpoint

__all__ = ["DurableReports", "wait_after_failure"]

log = logging.getLogger(__name__)


class DurableReports:
    """Checkpoints that are durable and still have to be reported.

    The thread that writes notes them, and the training thread reports them.
    """

    def __init__(self) -> None:
        self._unreported: deque[tuple[CheckpointRecord, float]] = deque()
        self._being_reported: CheckpointRecord | None = None
        self._awaited: list[Callable[[], Collection[Path]]] = []

    def __bool__(self) -> bool:
        """Whether there is something to report."""
        return bool(self._unreported)

    def spare(self, awaited: Callable[[], Collection[Path]]) -> None:
        """Never remove a checkpoint of which `awaited`, called in the thread that writes, names a file."""
        if awaited not in self._awaited:
            self._awaited.append(awaited)

    def awaited_paths(self) -> set[str]:
        """The files that an upload, say, still has to read."""
        return {os.path.realpath(path) for ask in self._awaited for path in ask()}

    def note(self, record: CheckpointRecord, retention: Retention, *, began_s: float) -> None:
        """Take note of `record`, and remove what `retention` does not keep any longer of its run beside it.

        Args:
            record: The checkpoint that has become durable.
            retention: Which checkpoints stay.
            began_s: When its save began, on the clock of ``time.monotonic``.
        """
        self._unreported.append((record, time.monotonic() - began_s))
        if retention.keep_last is None:  # all stay, and to read them all would cost more with each
            return
        # What was not reported yet stays: those who hear of it (an upload) must still find it.
        spared = {unreported.path for unreported, _ in list(self._unreported)}
        if self._being_reported is not None:
            spared.add(self._being_reported.path)
        directory = record.path.parent
        listed = list_checkpoints(directory)
        awaited = self.awaited_paths()
        awaited |= {os.path.realpath(entry) for entry in os.scandir(directory) if entry.is_symlink()}
        of_this_run = [old for old in own_records(listed) if old.run_id == record.run_id]
        for old in to_delete(of_this_run, retention):
            if old.path not in spared and not is_named(old, awaited):
                _try_to_delete(old.path)

    def report(self, trainer: pl.Trainer) -> None:
        """Tell all callbacks, in the training thread."""
        while self._unreported:
            record, seconds = self._unreported[0]
            self._being_reported = record  # set before it is removed, so that `note` spares it throughout
            self._unreported.popleft()
            run_state_of(trainer).latest_checkpoint_uri = str(record.path)
            try:
                fire(trainer, "on_checkpoint_timed", seconds)
                fire(trainer, "on_checkpoint_durable", record)
            finally:
                self._being_reported = None


def wait_after_failure(wait: Callable[[], None]) -> None:
    """Call what waits for the save in flight; its failure is logged, because the training has failed of another."""
    try:
        wait()
    except GenlightError as error:
        log.error("The last checkpoint was not written: %s", error)  # noqa: TRY400 - its message says all
    except Exception:
        log.exception("The last checkpoint was not written")


def _try_to_delete(path: Path) -> None:
    """Remove an old checkpoint; one that cannot be removed costs space, not the run, and is tried again next time."""
    try:
        delete_checkpoint(path)
    except (OSError, CheckpointError) as error:
        log.warning("Could not remove the old checkpoint %s: %s", path, error)
