"""The store of checkpoints: saves in the background, loads with proof, removes between saves.

A save takes the state apart and copies its tensors in the training thread. Then it is written: whole and durable, or
not at all. One save is in flight at a time; the next one waits for it. With sharded tensors all ranks save together
(`write_together`), otherwise rank zero saves alone.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from ...adapter.contract.exceptions import CheckpointError, ThreadLimitError
from ...adapter.plumbing.threads import started
from .capture import Captured, capture, snapshot
from .format.layout import record_path
from .format.record import CheckpointRecord, LeftOut, RecordMeta
from .format.record_file import is_torch_file, read_record
from .frozen import Frozen, described
from .loading import Base, MapLocation, load, load_for_slices, load_torch_file
from .ownership import claims_in, is_stock_sharded
from .selection import find_checkpoint
from .sharded.rank_channel import EndOfSave, RankGroups
from .sharded.save import only_slices, plan_save, write_together
from .storage.commit import Staging, delete_checkpoint
from .storage.host_buffer import HostBuffer
from .storage.write_file import naming_the_checkpoint
from .writing import write

__all__ = ["BackgroundWriter", "CheckpointStore"]

log = logging.getLogger(__name__)

DELETED_AT_ONCE = 8
"""Checkpoints that are removed while a save may wait: some ten milliseconds."""


class CheckpointStore:
    """Saves and loads checkpoints; of one process, for any number of directories."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter()
        self.buffer = HostBuffer()
        self.base: Callable[[], Base] | None = None
        """Gives the model's tensors, of which a load takes what its checkpoint leaves out."""
        self.notes_base = False
        """Whether each load notes what the class has built, because checkpoints of this process leave that out."""
        self.built: dict[str, LeftOut] | None = None
        """The model's tensors as the class built them, before the last load."""
        self.before_background_save: Callable[[], None] = lambda: None
        """Called in the training thread."""
        self._frozen: dict[Path, Frozen] = {}
        self._end_of_save: EndOfSave | None = None
        """Set while ranks write a checkpoint together in the background."""

    def begin(self, directory: Path, frozen: Frozen) -> None:
        """Have checkpoints in `directory` share what is `frozen`. On the rank that writes, before the first step."""
        self._frozen[directory] = frozen

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        meta: RecordMeta | None = None,
        *,
        staging: Staging | None = None,
        asynchronous: bool = False,
        groups: RankGroups | None = None,
    ) -> Future[CheckpointRecord | None]:
        """Save `state`, a dump of Lightning's or any dictionary, with the values of now.

        Args:
            path: Where the record will be.
            state: ``state["genlight"]["state"]`` goes into the record.
            meta: What the record says beside that.
            staging: The folder that holds the files of the trainer's own hook; it is removed if the save fails.
            asynchronous: Write in the background. What fails there is raised by the next call, or by `poll`.
            groups: All ranks call this, and each writes the slices of sharded tensors that it holds; what rank zero
                passes counts. None has this process write alone.

        Returns:
            The record, once the checkpoint is durable; None on ranks other than zero.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it, or another rank failed.
            UnwrittenCheckpointError: It, or the one before it, could not be written; what was there before still is.
        """
        record, meta = record_path(path), meta or RecordMeta()
        if groups is not None:
            return self._save_together(record, state, meta, staging, asynchronous, groups)
        captured = self._capture(record, state, meta, staging)
        return self._write(captured, asynchronous, lambda taken: write(record, taken))

    def _save_together(
        self,
        record: Path,
        state: Mapping[str, Any],
        meta: RecordMeta,
        staging: Staging | None,
        asynchronous: bool,
        groups: RankGroups,
    ) -> Future[CheckpointRecord | None]:
        self._end_of_save = None
        share: Captured | Exception
        try:
            share = self._capture(record, state, replace(meta, world_size=groups.training.size), staging)
        except Exception as error:  # noqa: BLE001 - `plan_save` raises it, once the other ranks know
            share = error
        try:
            plan = plan_save(groups.training, record, share, asynchronous=asynchronous)
        except BaseException:
            if isinstance(share, Captured) and share.staging is not None:
                share.staging.discard()
            raise
        assert isinstance(share, Captured)
        if not plan.is_sharded:
            if groups.training.rank == 0:
                return self._write(share, plan.asynchronous, lambda taken: write(record, taken))
            nothing: Future[CheckpointRecord | None] = Future()
            nothing.set_result(None)
            return nothing
        share = share if groups.training.rank == 0 else only_slices(share)
        share.staging = share.staging or Staging(record, plan.staging)
        future = self._write(share, plan.asynchronous, lambda taken: write_together(groups.writing, record, taken))
        self._end_of_save = EndOfSave(groups.training) if plan.asynchronous else None
        return future

    def _capture(self, record: Path, state: Mapping[str, Any], meta: RecordMeta, staging: Staging | None) -> Captured:
        """`state` taken apart, once the save before it has ended; `staging` is removed if that fails."""
        try:
            captured = capture(state, meta, staging)
            # Here, not in the background: a caller may put a link beside the checkpoint (``save_last="link"``).
            with naming_the_checkpoint(record, captured.nbytes):
                record.parent.mkdir(parents=True, exist_ok=True)
            self.wait()
            frozen = self._frozen.get(record.parent)
            return captured if frozen is None else frozen.divide(captured, record)
        except BaseException:
            if staging is not None:
                staging.discard()
            raise

    def _write(
        self, captured: Captured, asynchronous: bool, write: Callable[[Captured], CheckpointRecord | None]
    ) -> Future[CheckpointRecord | None]:
        future: Future[CheckpointRecord | None] = Future()

        def job(taken: Captured) -> None:
            try:
                record = write(taken)
                if record is not None and (frozen := self._frozen.get(record.path.parent)) is not None:
                    frozen.learn(record, taken)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(record)

        if asynchronous:
            self.before_background_save()
            taken = snapshot(captured, self.buffer)
            self.writer.start(lambda: job(taken))
        else:
            job(captured)
        return future

    def load(self, path: str | os.PathLike[str], map_location: MapLocation = None) -> dict[str, Any]:
        """The checkpoint at `path`, proven before any of it is used; also a file of torch, without its pickle.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            CheckpointError: It leaves out what the model does not have.
            FileNotFoundError: There is none.
        """
        self.wait()
        record = find_checkpoint(path)
        if is_torch_file(record):
            return load_torch_file(record, map_location)
        return load(record, map_location, base=self._base_for(record))

    def load_together(self, path: str | os.PathLike[str], groups: RankGroups) -> dict[str, Any]:
        """`load` on all ranks, which read of sharded tensors only what is used of them. Collective.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            CheckpointError: Another rank could not read it.
            FileNotFoundError: There is none.
        """
        channel = groups.training
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            self.wait()
            record = find_checkpoint(path)
            if is_torch_file(record):
                checkpoint = load_torch_file(record)
            else:
                share = slice(channel.rank, None, channel.size)
                checkpoint = load_for_slices(record, share=share, base=self._base_for(record))
        except Exception as error:  # noqa: BLE001 - `agree` raises it, once all ranks know
            problem = error
        channel.agree(problem, f"load {os.fspath(path)}")
        return checkpoint

    def _base_for(self, path: Path) -> Base | None:
        """The model's tensors, if they are needed to load the checkpoint at `path`, or to leave them out later."""
        record = read_record(path)
        if record.finite_weights is False:
            _warn_of_nonfinite(path)
        if self.base is None or not (record.left_out or self.notes_base):
            return None
        base = self.base()
        if self.notes_base:
            self.built = described(base)
        return base

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, after the save in flight has become durable; not at all if that fails.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        self.writer.afterwards(lambda: _remove(Path(path)))

    def prune(
        self,
        records: Sequence[CheckpointRecord],
        choose: Callable[[list[CheckpointRecord]], list[CheckpointRecord]],
    ) -> None:
        """Remove `records` in the background, a few at a time, while no save waits; forgets those of the last call.

        Args:
            records: Checkpoints of one directory.
            choose: Called in the background with the next few: those that nothing needs.
        """
        claims = functools.cache(lambda: claims_in(records[0].path.parent))  # every record is read once for all

        def remove(some: list[CheckpointRecord]) -> None:
            for record in choose(some):
                try:
                    delete_checkpoint(record.path, claims())
                except (OSError, CheckpointError) as error:  # it costs space, not the run, and is tried again
                    log.warning("Could not remove the old checkpoint %s: %s", record.path, error)

        groups = [list(records[at : at + DELETED_AT_ONCE]) for at in range(0, len(records), DELETED_AT_ONCE)]
        self.writer.when_idle([functools.partial(remove, some) for some in groups])

    @property
    def is_settled(self) -> bool:
        """Whether no save is in flight on any rank, and none failed that `poll` has yet to raise."""
        return self._end_of_save is None and not self.writer.is_busy and self.writer.failure is None

    def poll(self) -> None:
        """Raise what a save in the background raised; after the same step on all ranks that wrote it together."""
        if self._end_of_save is None:
            if self.writer.failure is not None:
                self.writer.raise_failure()
        elif self._end_of_save.has_come(is_busy=self.writer.is_busy):
            self._end_of_save = None
            self.wait()

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            Exception: What the last save raised; once.
        """
        # `_end_of_save` stays: a rank may wait by itself, and the others go on asking whether all have ended.
        self.writer.wait()

    def close(self) -> None:
        """Wait for the save in flight, and free the memory of snapshots.

        Raises:
            Exception: What the last save raised; once.
        """
        self.buffer, self._end_of_save = HostBuffer(), None
        self.wait()


@rank_zero_only
def _warn_of_nonfinite(path: Path) -> None:
    log.warning(
        "The weights in %s are not finite: training that continues from them is lost. Name an earlier checkpoint; "
        "`genlight checkpoints verify` says which are finite",
        path,
    )


def _remove(path: Path) -> None:
    if is_stock_sharded(path) and not path.is_symlink():
        shutil.rmtree(path)
        return
    try:
        delete_checkpoint(path)
    except CheckpointError as error:
        log.warning("%s", error)


class BackgroundWriter:
    """Runs one save at a time in a thread of its own, and other jobs while no save waits.

    The thread is not a daemon: an interpreter that exits lets the save finish. An exception of the save is raised by
    the next call of any method, so that it reaches the training thread within a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_busy = False
        """Whether a save is in flight."""
        self.failure: BaseException | None = None
        """What a save raised and has not been reported yet."""
        self._afterwards: list[Callable[[], object]] = []
        self._idle_jobs: deque[Callable[[], object]] = deque()
        self._is_awaited = False

    def start(self, save: Callable[[], object]) -> None:
        """Run `save` in the background, after the one before it has ended.

        Raises:
            Exception: What the save before it raised; `save` is not started then.
        """
        self.wait()
        self.is_busy = True
        self._start(save)

    def afterwards(self, job: Callable[[], object]) -> None:
        """Run `job` once the save in flight has succeeded, at once if there is none; drop it if that save fails."""
        with self._lock:
            if self.is_busy:
                self._afterwards.append(job)
                return
        self.raise_failure()
        job()

    def when_idle(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Run `jobs` in the background, one by one, as long as nobody waits; in place of those that are left."""
        with self._lock:
            self._idle_jobs = deque(jobs)
            starts = bool(jobs) and self._thread is None
        if starts:
            self._start(None)

    def finish(self) -> None:
        """Return when nothing is in flight and no job is left.

        Raises:
            Exception: What the last save raised; once.
        """
        self.wait()
        while self._idle_jobs:
            self._idle_jobs.popleft()()

    def wait(self) -> None:
        """Return when no save is in flight; jobs that are left go on with the next one.

        Raises:
            Exception: What the last save raised; once.
        """
        thread = self._thread
        if thread is not None:
            self._is_awaited = True
            thread.join()
            self._is_awaited = False
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what a save in the background raised, once; returns at once."""
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise error

    def _start(self, save: Callable[[], object] | None) -> None:
        thread = threading.Thread(target=self._run, args=(save,), name="genlight-checkpoint")
        self._thread = thread
        try:
            started(thread)
        except ThreadLimitError:  # training waits for it then
            self._run(save)

    def _run(self, save: Callable[[], object] | None) -> None:
        try:
            job = save or self._next()
            while job is not None:
                job()
                job = self._next()
        except BaseException as error:  # noqa: BLE001 - it is raised in the training thread
            with self._lock:
                self._afterwards.clear()
                self.failure, self.is_busy, self._thread = error, False, None

    def _next(self) -> Callable[[], object] | None:
        with self._lock:  # So that nothing is added to a list that will not be read again.
            if self._afterwards:
                return self._afterwards.pop(0)
            self.is_busy = False
            if self._idle_jobs and not self._is_awaited:
                return self._idle_jobs.popleft()
            self._thread = None
            return None
