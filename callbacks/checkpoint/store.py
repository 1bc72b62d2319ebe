"""The store of checkpoints: saves in the background, loads with proof, removes between saves.

A save takes the state apart and copies its tensors in the training thread. Then it is written: whole and durable, or
not at all. One save is in flight at a time; the next one waits for it. With sharded tensors all ranks save and load
together, otherwise a rank does by itself.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from ...adapter.contract.exceptions import CheckpointError, ThreadLimitError
from ...adapter.plumbing.threads import carry_out, started
from .capture import Captured, Frozen, HostBuffer, capture, described, snapshot
from .format.record import CheckpointRecord, LeftOut, RecordMeta, is_torch_file, read_record, record_path
from .loading import Base, load_record, load_torch_file
from .selection import find_checkpoint
from .sharded.rank_channel import ALONE, EndOfSave, RankGroups
from .storage import Staging, delete_checkpoint, folders_that_are_named, naming_the_checkpoint, records_in
from .writing import plan_save, write

__all__ = ["CheckpointStore", "save"]

log = logging.getLogger(__name__)


def save(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    meta: RecordMeta | None = None,
    staging: Staging | None = None,
) -> CheckpointRecord:
    """Write a checkpoint; whole and durable when this returns. See `CheckpointStore.save`."""
    record = CheckpointStore().save(path, checkpoint, meta, staging=staging).result()
    assert record is not None
    return record


class CheckpointStore:
    """Saves and loads checkpoints; of one process, for any number of directories."""

    def __init__(self) -> None:
        self.background = Background()
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
        self._saving: Future[None] | None = None
        """The save in the background, until `wait` or `poll` has found its end."""
        self._end_of_save: EndOfSave | None = None
        """Set while ranks write a checkpoint together in the background."""

    def begin(self, directory: Path, frozen: Frozen) -> None:
        """Have checkpoints in `directory` share what is `frozen`. On the rank that writes, before the first step."""
        self._frozen[directory] = frozen

    def warm_up(self, nbytes: int, device: torch.device) -> None:
        """Reserve memory for snapshots of `nbytes` in the background, so that the first save finds it ready."""
        self.before_background_save()
        self._saving = self.background.submit(lambda: self.buffer.reserve(nbytes, device))

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
        training, writing = (ALONE, ALONE) if groups is None else (groups.training, groups.writing)
        share: Captured | Exception | None = None
        self._end_of_save = None
        try:
            try:
                share = self._capture(record, state, meta, staging, groups)
            except Exception as error:  # noqa: BLE001 - `plan_save` raises it, once the other ranks know
                share = error
            plan = plan_save(training, record, share)
        except BaseException:
            made = share.staging if isinstance(share, Captured) else staging
            if made is not None:
                made.discard()
            raise
        assert isinstance(share, Captured)
        if training.rank != 0 and not plan.is_sharded:
            nothing: Future[CheckpointRecord | None] = Future()
            nothing.set_result(None)
            return nothing
        if training.rank != 0:
            share = replace(share, entries=[], rest=b"", state=None, linked=None)  # it writes its slices alone
        share.staging = share.staging or Staging(record, plan.staging)
        if plan.is_sharded and asynchronous:
            self._end_of_save = EndOfSave(training)
        channel = writing if plan.is_sharded else ALONE
        return self._write(share, asynchronous, lambda taken: write(channel, record, taken))

    def _capture(
        self,
        record: Path,
        state: Mapping[str, Any],
        meta: RecordMeta,
        staging: Staging | None,
        groups: RankGroups | None,
    ) -> Captured:
        """`state` taken apart, once the save before it has ended."""
        captured = capture(state, meta if groups is None else replace(meta, world_size=groups.training.size), staging)
        if captured.sharded_tensors and groups is None:
            _, name = next(iter(captured.sharded_tensors))
            raise CheckpointError(
                f"{name} is sharded over several ranks, which save it together: use the "
                "Checkpoint callback under ModelParallelStrategy, or gather it first with full_tensor()"
            )
        # Here, not in the background: a caller may put a link beside the checkpoint (``save_last="link"``).
        with naming_the_checkpoint(record, captured.nbytes):
            record.parent.mkdir(parents=True, exist_ok=True)
        self.wait()
        frozen = self._frozen.get(record.parent)
        return captured if frozen is None else frozen.divide(captured, record)

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
            self._saving = self.background.submit(lambda: job(taken))
        else:
            self.background.finish()
            job(captured)
        return future

    def load(self, path: str | os.PathLike[str], *, groups: RankGroups | None = None) -> dict[str, Any]:
        """The checkpoint at `path`, proven before any of it is used; also a file of torch, without its pickle.

        Args:
            path: The checkpoint, or what `find_checkpoint` takes for one.
            groups: All ranks call this, and read of sharded tensors only what is used of them. None has this process
                read all by itself.

        Raises:
            BrokenCheckpointError: It differs from what was saved.
            CheckpointError: It leaves out what the model does not have, or another rank could not read it.
            FileNotFoundError: There is none.
        """
        channel = ALONE if groups is None else groups.training
        checkpoint: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            self.wait()
            found = find_checkpoint(path)
            if is_torch_file(found):
                checkpoint = load_torch_file(found)
            else:
                record = read_record(found)
                share = None if groups is None else slice(channel.rank, None, channel.size)
                checkpoint = load_record(record, base=self._base_for(record), share=share)
        except Exception as error:  # noqa: BLE001 - `agree` raises it, once all ranks know
            problem = error
        channel.agree(problem, f"load {os.fspath(path)}")
        return checkpoint

    def _base_for(self, record: CheckpointRecord) -> Base | None:
        """The model's tensors, if they are needed to load the checkpoint of `record`, or to leave them out later."""
        if record.finite_weights is False:
            _warn_of_nonfinite(record.path)
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
        saving = self._saving
        if saving is None:
            _remove(Path(path))
        else:
            self.background.submit(lambda: None if saving.exception() else _remove(Path(path)))

    def prune(
        self,
        records: Sequence[CheckpointRecord],
        choose: Callable[[list[CheckpointRecord]], list[CheckpointRecord]],
    ) -> None:
        """Remove `records` in the background, after the save that is in flight.

        Args:
            records: What no rule keeps any more; of one directory.
            choose: Which of them may go; called in the background.
        """

        def remove() -> None:
            named = None
            for record in choose([record for record in records if os.path.lexists(record.path)]):
                try:
                    named = named or folders_that_are_named(records_in(record.path.parent))
                    delete_checkpoint(record.path, named)
                except (CheckpointError, OSError) as error:
                    log.warning("Could not remove the old checkpoint %s: %s", record.path, error)

        self.background.submit(remove)

    @property
    def is_busy(self) -> bool:
        """Whether this process writes a checkpoint in the background."""
        return self._saving is not None and not self._saving.done()

    @property
    def is_settled(self) -> bool:
        """Whether no save is in flight on any rank, and none failed that `poll` has yet to raise."""
        return self._end_of_save is None and self._saving is None

    def poll(self) -> None:
        """Raise what a save in the background raised; after the same step on all ranks that wrote it together."""
        if self._end_of_save is None:
            if not self.is_busy:
                self.wait()
        elif self._end_of_save.has_come(is_busy=self.is_busy):
            self._end_of_save = None
            self.wait()

    def wait(self) -> None:
        """Return when no save is in flight.

        Raises:
            Exception: What the last save raised; once.
        """
        # `_end_of_save` stays: a rank may wait by itself, and the others go on asking whether all have ended.
        if self._saving is not None:
            concurrent.futures.wait([self._saving])
            ended, self._saving = self._saving, None
            ended.result()

    def close(self) -> None:
        """Wait for all that goes on in the background, and free the memory of snapshots.

        Raises:
            Exception: What the last save raised; once.
        """
        self.background.finish()
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
    try:
        delete_checkpoint(path)
    except (CheckpointError, OSError) as error:
        log.warning("%s", error)


class Background:
    """Runs jobs one after the other, each in a thread that waits for the one before.

    They are no daemons: an interpreter that exits lets the jobs finish. Where the system has no room for a thread, the
    caller waits for its job.
    """

    def __init__(self) -> None:
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def submit(self, job: Callable[[], object]) -> Future[Any]:
        """Run `job` after those that were submitted before; called in one thread alone."""
        before, future = self._last, Future[Any]()
        self._last = future

        def run() -> None:
            concurrent.futures.wait([before])
            carry_out(future, job)

        try:
            started(threading.Thread(target=run, name="genlight-checkpoint"))
        except ThreadLimitError:
            run()
        return future

    def finish(self) -> None:
        """Return when all jobs have ended."""
        concurrent.futures.wait([self._last])
