"""The store of checkpoints: saves in the background, loads with proof, removes between saves.

A save takes the state apart and copies its tensors in the training thread (`capture`). Then the checkpoint is written,
completely or not at all (`writing`). One save is in flight at a time; the next one waits for it.

With sharded tensors all ranks save together; otherwise only one rank saves. In the training threads the ranks agree on
a temporary folder, on whether ranks other than zero have something to write, and that the disk has room for all. Then
each rank writes its part, in a separate thread if the save is asynchronous.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from ...adapter.contract.exceptions import CheckpointError, GenlightError, ThreadLimitError
from ...adapter.plumbing.threads import carry_out, started
from ..rank_channel import ALONE, RankGroups
from .capture import Captured, HostBuffer, Overlap, capture
from .codec.tensors import Layout
from .format.record import CheckpointRecord, RecordMeta, is_torch_file, name_of, read_record, record_path
from .frozen import Frozen
from .listing import Listed, count_folder_names, list_checkpoints
from .loading import Base, load_record, load_torch_file
from .selection import find_checkpoint
from .storage import Staging, delete_checkpoint, require_space, stage
from .writing import write_checkpoint

log = logging.getLogger(__name__)


def save(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    meta: RecordMeta | None = None,
    staging: Staging | None = None,
) -> CheckpointRecord:
    """Write a checkpoint, complete and durable when this returns. See `CheckpointStore.save`."""
    record = CheckpointStore().save(path, checkpoint, meta, staging=staging).result()
    assert record is not None
    return record


@dataclass(frozen=True, eq=False)
class Pending:
    """A save in the background."""

    future: Future[Any]
    on_failure: Callable[[Exception], None] | None
    """Called in the training thread with the failure of the save; if None, that thread raises the failure."""
    is_joint: bool
    """Whether all ranks save together. Then `poll` does not raise a failure, because only one rank might see it yet."""


def _run_now(job: Callable[[], object]) -> Future[Any]:
    """Carry out `job`, and return the future of its result."""
    future = Future[Any]()
    carry_out(future, job)
    return future


class Background:
    """Runs jobs one after the other, each in a thread that waits for the one before.

    The threads are not daemons: an interpreter that exits lets the jobs finish. If the system has no room for a thread,
    the caller waits for its job.
    """

    def __init__(self) -> None:
        self._last = _run_now(lambda: None)

    def submit(self, job: Callable[[], object]) -> Future[Any]:
        """Run `job` after those that were submitted before. Only one thread may call this."""
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

    def run(self, job: Callable[[], object], doing: str) -> None:
        """Like `submit`, for a job that nobody waits for: its failure is logged, with `doing`."""

        def logged() -> None:
            try:
                job()
            except Exception as error:
                trace = None if isinstance(error, (GenlightError, OSError)) else error
                log.warning("Could not %s: %s: %s", doing, type(error).__name__, error, exc_info=trace)

        self.submit(logged)

    def finish(self) -> None:
        """Return when all jobs have ended."""
        concurrent.futures.wait([self._last])


class CheckpointStore:
    """Saves and loads the checkpoints of one process, in any number of directories."""

    def __init__(self) -> None:
        self.background = Background()
        self.buffer = HostBuffer()
        self.copies_later = False
        """Whether an asynchronous save copies large tensors in host memory while training continues."""
        self.overlap = Overlap(is_allowed=False)
        """Copies the tensors of the last save."""
        self.base: Callable[[], Base] | None = None
        """Returns the model's tensors, from which a load takes those that its checkpoint omits."""
        self.loaded: CheckpointRecord | None = None
        """The checkpoint that was loaded most recently."""
        self.before_background_save: list[Callable[[], None]] = []
        """Called in the training thread, just before a save begins to write in the background."""
        self._layout: Layout | None = None
        """The layout of the last save; the next save probably has the same."""
        self._frozen: dict[Path, Frozen] = {}
        self._listed: list[Listed] = []
        """Checkpoints of the directory that was pruned last."""
        self._pending: Pending | None = None
        """The save whose end `wait` or `poll` has not yet handled."""

    @override
    def __reduce__(self) -> Any:
        # Saves in flight and listeners belong to the process that started them; a copy starts without any.
        return CheckpointStore, ()

    def begin(self, directory: Path, frozen: Frozen) -> None:
        """Share `frozen` among the checkpoints in `directory`. Called on the writing rank, before the first step."""
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
        on_failure: Callable[[Exception], None] | None = None,
    ) -> Future[CheckpointRecord | None]:
        """Save the current values of `state`, a dump of Lightning's or any dictionary.

        Args:
            path: The path of the record.
            state: ``state["genlight"]["state"]`` goes into the record.
            meta: Further facts for the record.
            staging: The folder with the files that the trainer class's ``save_checkpoint`` wrote; removed if the save
                fails.
            asynchronous: Write in the background. The next call or `poll` raises the error of a failed save; if all
                ranks write together, only the next call does.
            groups: All ranks call this, and each writes the slices of sharded tensors that it holds; rank zero's
                arguments count. With None, only this process writes.
            on_failure: Called by `wait` and `poll` with a failure in the background; if None, they raise the failure.

        Returns:
            The record, once the checkpoint is durable; None on ranks other than zero.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it, or another rank failed.
            UnwrittenCheckpointError: This save, or the one before it, failed; earlier checkpoints are unchanged.
        """
        record, meta = record_path(path), meta or RecordMeta()
        training, writing = (ALONE, ALONE) if groups is None else (groups.training, groups.writing)
        is_first, name = training.rank == 0, name_of(record)

        # `stage` makes the directory. Not in the background: right after this method, `ModelCheckpoint` may put a link
        # into the directory (``save_last="link"``).
        made = training.first(lambda: staging or stage(record), f"start {name}")
        try:
            captured = training.agreed(lambda: self._capture(state, meta, made, groups), f"prepare {name}")
            nbytes = sum(training.gather(captured.nbytes))
            training.agreed(lambda: require_space(record.parent, nbytes) if is_first else None, f"start {name}")
            is_sharded = training.share(bool(captured.sharded_tensors))
        except BaseException:
            if is_first:
                made.discard()
            raise
        if not is_first and not is_sharded:
            return _run_now(lambda: None)
        channel = writing if is_sharded else ALONE
        if asynchronous:
            self.overlap.end()
            self.overlap = Overlap(self.overlap.written, is_allowed=self.copies_later)
            captured = captured.snapshot(self.buffer, self.overlap)
            for inform in self.before_background_save:
                inform()
            future = self.background.submit(partial(write_checkpoint, channel, captured))
            self._pending = Pending(future, on_failure, is_joint=channel is not ALONE)
        else:
            self.background.finish()
            future = _run_now(partial(write_checkpoint, channel, captured))
            future.result()
        return future

    def _capture(
        self, state: Mapping[str, Any], meta: RecordMeta, staging: Staging, groups: RankGroups | None
    ) -> Captured:
        """Return the tensors and JSON that this rank writes for `state`, after the previous save has ended."""
        meta = meta if groups is None else replace(meta, world_size=groups.training.size)
        captured = capture(state, meta, staging, self._layout)
        self._layout = captured.layout
        if groups is None and captured.sharded_tensors:
            _, name = next(iter(captured.sharded_tensors))
            raise CheckpointError(
                f"{name} is sharded over several ranks, which save it together: use the "
                "Checkpoint callback under ModelParallelStrategy, or gather it first with full_tensor()"
            )
        self.wait()
        if groups is not None and groups.training.rank != 0:
            return replace(captured.select(lambda entry: entry.box is not None), rest=b"")
        if (frozen := self._frozen.get(staging.record.parent)) is None:
            return captured
        entries, sources, linked, left_out = frozen.divide(captured.entries, captured.sources, staging.path)
        return replace(captured, entries=entries, sources=sources, linked=linked, left_out=left_out, frozen=frozen)

    def load(self, path: str | os.PathLike[str], *, groups: RankGroups | None = None) -> dict[str, Any]:
        """Return the checkpoint at `path`, proven before any of it is used. A file of torch is read without pickle.

        Args:
            path: The checkpoint, or a path that `find_checkpoint` resolves.
            groups: All ranks call this, and each reads only the slices of sharded tensors that it uses. With None,
                this process reads everything itself.

        Raises:
            BrokenCheckpointError: A file differs from its record.
            CheckpointError: The checkpoint omits a tensor that the model lacks, or another rank could not read it.
            FileNotFoundError: There is no checkpoint.
        """
        channel = ALONE if groups is None else groups.training

        def read() -> dict[str, Any]:
            self.wait()
            self.loaded, file = None, find_checkpoint(path)
            if is_torch_file(file):
                return load_torch_file(file)
            self.loaded = record = read_record(file)
            if record.finite_weights is False:
                rank_zero_only(log.warning)(
                    "The weights in %s are not finite: training that continues from them is lost. Name an earlier "
                    "checkpoint; `genlight checkpoints verify` says which are finite",
                    record.path,
                )
            base = self.base() if self.base is not None and record.left_out else None
            share = None if groups is None else (channel.rank, channel.size)
            return load_record(record, base=base, share=share)

        return channel.agreed(read, f"load {os.fspath(path)}")

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` after the save in flight is durable; if that save fails, remove nothing.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        if (before := self._pending) is None:
            _remove(Path(path))
        else:
            job = partial(_remove, Path(path))
            self.background.run(lambda: job() if before.future.exception() is None else None, f"remove {path}")

    def prune(self, directory: Path, choose: Callable[[list[Listed]], list[CheckpointRecord]]) -> None:
        """Remove checkpoints of `directory` in the background, after the save in flight.

        Args:
            directory: The folder of the records; a record is read again only if it has changed.
            choose: Returns those to remove; called in the background.
        """

        def remove() -> None:
            listed = self._listed = list_checkpoints(directory, self._listed)
            named = count_folder_names(listed)
            for record in choose(listed):
                _remove(record.path, named)

        self.background.run(remove, f"remove old checkpoints from {directory}")

    @property
    def is_settled(self) -> bool:
        """Whether no save is running in the background, and no failure of one is waiting for `poll` to raise it."""
        return self._pending is None or (self._pending.is_joint and self._pending.future.done())

    def poll(self) -> None:
        """Wait for the copy of the last save, and report a failure in the background that concerns only this process.

        Raises:
            Exception: That failure, unless the save was given `on_failure`; raised once.
        """
        self.overlap.end()
        if self._pending is not None and self._pending.future.done() and not self._pending.is_joint:
            self.wait()

    def wait(self) -> None:
        """Return when no save is running in the background.

        Raises:
            Exception: Its failure, unless the save was given `on_failure`; raised once.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.future.result()
        except Exception as error:
            if pending.on_failure is None:
                raise
            pending.on_failure(error)

    def close(self) -> None:
        """Wait for all background work, and free the memory of snapshots.

        Raises:
            Exception: The failure of the last save; raised once.
        """
        self.background.finish()
        self.overlap.end()
        self.buffer, self.overlap, self._layout = HostBuffer(), Overlap(is_allowed=False), None
        self.wait()


def wait_after_failure(wait: Callable[[], None]) -> None:
    """Wait for the save in flight with `wait`; only log its failure, because another one has already ended training."""
    try:
        wait()
    except Exception as error:
        trace = None if isinstance(error, GenlightError) else error  # our errors have complete messages
        log.error("The last checkpoint was not written: %s", error, exc_info=trace)  # noqa: TRY400


def _remove(path: Path, named: Counter[str] | None = None) -> None:
    try:
        delete_checkpoint(path, named)
    except (CheckpointError, OSError) as error:
        log.warning("Could not remove the checkpoint %s: %s", path, error)
