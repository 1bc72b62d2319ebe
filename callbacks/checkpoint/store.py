"""The store of checkpoints: saves in the background, loads with proof, removes between saves.

A save takes the state apart and copies its tensors in the training thread. Then the checkpoint is written, completely
or not at all. One save is in flight at a time; the next one waits for it.

With sharded tensors all ranks save together; otherwise only one rank saves. In the training threads the ranks agree on
a temporary folder, on whether there is something to write, and that there is room for it. Then each rank, in a separate
thread if the save is asynchronous,

1. writes its slices into ``rank-00001/`` of that folder, synced and compared like any other file; rank zero also writes
   everything that is not sharded;
2. sends rank zero the list of its files, or the reason of its failure; rank zero writes the index of all slices;
3. learns from rank zero that the record is committed, or the reason why not.

So a checkpoint exists if its record does, and the record names and proves every part. If a rank cannot write, or dies
and so closes its connections, the save fails on all ranks. The previous checkpoint stays.

A load proves every byte before any of it is used. A file is read once: its digest is computed from the same memory that
becomes the tensors. If several ranks saved a tensor in slices, a rank of a sharded run reads only its own part, slice
by slice; each slice has a digest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import pickle
import re
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from ...adapter.contract.exceptions import BrokenCheckpointError, CheckpointError, GenlightError, ThreadLimitError
from ...adapter.plumbing.durable import fsync_directory, fsync_file, make_directory
from ...adapter.plumbing.safe_open import open_regular
from ...adapter.plumbing.threads import carry_out, started
from .capture import CONTRACT_KEY, Captured, Frozen, HostBuffer, capture, described, tensor_files
from .codec.state_tree import decode, dtype_of
from .codec.tensors import Entry, as_uint8, bytes_of, restore_flags
from .contents import (
    RAW,
    SLICES_FILE,
    TORCH_TYPES,
    Box,
    SlicedTensor,
    StoredSlice,
    TypedShape,
    check_tensor,
    header_from,
    is_of_tensors,
    part_folder,
    rank_of,
    read_contents,
    sliced_tensors,
    tile_exactly,
)
from .format.record import (
    FROZEN_FILE,
    MODEL_FILE,
    STATE_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    FileEntry,
    LeftOut,
    RecordMeta,
    digest_of,
    is_torch_file,
    library_versions,
    name_of,
    read_record,
    record_path,
)
from .selection import find_checkpoint, list_checkpoints
from .sharded.rank_channel import ALONE, Channel, RankGroups
from .sharded.slices import WholeTensor, within
from .storage import (
    Listed,
    Staging,
    check_file,
    commit,
    delete_checkpoint,
    folders_that_are_named,
    hash_file,
    naming_the_checkpoint,
    opened,
    require_space,
    stage,
    verify_files,
    write_file,
)

__all__ = ["Base", "CheckpointStore", "load", "load_weights", "require_shared_directory", "save", "wait_after_failure"]

log = logging.getLogger(__name__)

Base = Mapping[str, Any]
"""The model's tensors by name; a load takes those that its checkpoint omits from here."""

_PIECE = 4 << 20
_NAMED = 5

_TYPE_OF_FORMAT = {name: getattr(torch, torch_name) for torch_name, name in TORCH_TYPES.items()}

VISIBLE_WITHIN_S = 10.0
"""Longest time until one rank sees a file of another, over a network file system that caches."""
_POLL_S = 0.02


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


def load(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, Any]:
    """Return the dictionary saved at `path`, with equal values of equal types; its tensors are on the host.

    An older runtime's record gives ``{"genlight": {"state": …}, "global_step": step}``.

    Args:
        path: The checkpoint.
        base: The model's tensors; those that the checkpoint omits are taken from here.

    Raises:
        BrokenCheckpointError: A file differs from its record; nothing was loaded.
        CheckpointError: It holds a type that this process does not know, or omits a tensor that `base` lacks.
        FileNotFoundError: There is no such checkpoint.
    """
    return load_record(read_record(record_path(path)), base=base)


def load_weights(path: str | os.PathLike[str], *, base: Base | None = None) -> dict[str, torch.Tensor]:
    """Return only the model's tensors, proven: sharded ones assembled, omitted ones taken from `base`.

    Raises:
        BrokenCheckpointError: A file differs from its record.
        CheckpointError: It omits a tensor that `base` lacks.
    """
    record = read_record(record_path(path))
    weights = left_out_tensors(record, base)
    for entry in record.files:
        if record.tensor_file(entry) == MODEL_FILE:
            weights |= _read_tensors(record, entry)[0]
    slices = [entry for entry in record.files if rank_of(record.file_name(entry)) is not None]
    verify_files(record, [entry for entry in slices if record.file_name(entry).endswith(MODEL_FILE)])
    sliced = [tensor for tensor in sliced_tensors(record) if tensor.file == MODEL_FILE]
    return weights | {tensor.key: StoredSlices(record, tensor).whole() for tensor in sliced}


class CheckpointStore:
    """Saves and loads the checkpoints of one process, in any number of directories."""

    def __init__(self) -> None:
        self.background = Background()
        self.buffer = HostBuffer()
        self.base: Callable[[], Base] | None = None
        """Returns the model's tensors, from which a load takes those that its checkpoint omits."""
        self.loaded: CheckpointRecord | None = None
        """The checkpoint that was loaded most recently."""
        self.before_background_save: list[Callable[[], None]] = []
        """Called in the training thread."""
        self._frozen: dict[Path, Frozen] = {}
        self._pending: list[Pending] = []
        """Background work whose end `wait` or `poll` has not yet handled."""

    @override
    def __reduce__(self) -> Any:
        # Saves in flight and listeners belong to the process that started them; a copy starts without any.
        return CheckpointStore, ()

    def begin(self, directory: Path, frozen: Frozen) -> None:
        """Share `frozen` among the checkpoints in `directory`. Called on the writing rank, before the first step."""
        self._frozen[directory] = frozen

    def reserve(self, sizes: Sequence[int], device: torch.device, *, owner: object = None) -> None:
        """Allocate and pin the memory for snapshots of tensors from `device`, in the background, before the first save.

        Otherwise the first save would wait some 0.2 s for each GB.

        Args:
            sizes: The bytes of each tensor.
            device: The device of most of them.
            owner: The same as in `save`.
        """
        nbytes = self.buffer.room_for(sizes)
        self._submit(lambda: self.buffer.reserve(nbytes, device), owner)

    def _submit(self, job: Callable[[], object], owner: object, *, is_joint: bool = False) -> None:
        for inform in self.before_background_save:
            inform()
        self._pending.append(Pending(self.background.submit(job), owner, is_joint))

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        meta: RecordMeta | None = None,
        *,
        staging: Staging | None = None,
        asynchronous: bool = False,
        groups: RankGroups | None = None,
        owner: object = None,
    ) -> Future[CheckpointRecord | None]:
        """Save the current values of `state`, a dump of Lightning's or any dictionary.

        Args:
            path: The path of the record.
            state: ``state["genlight"]["state"]`` goes into the record.
            meta: Further facts for the record.
            staging: The folder that holds the files of the trainer's own hook; it is removed if the save fails.
            asynchronous: Write in the background. The next call or `poll` raises a failure there; if all ranks write
                together, only the next call does.
            groups: All ranks call this, and each writes the slices of sharded tensors that it holds; rank zero's
                arguments count. With None, only this process writes.
            owner: `wait` and `poll` raise a failure in the background only for this owner; with None, for any caller.

        Returns:
            The record, once the checkpoint is durable; None on ranks other than zero.

        Raises:
            UnstorableStateError: A value cannot be stored; names its path.
            CheckpointError: The disk has no space for it, or another rank failed.
            UnwrittenCheckpointError: It, or the one before it, could not be written; the previous one is unchanged.
        """
        record, meta = record_path(path), meta or RecordMeta()
        training, writing = (ALONE, ALONE) if groups is None else (groups.training, groups.writing)
        is_first, name = training.rank == 0, name_of(record)

        # Now, not in the background: a caller may put a link next to the checkpoint (``save_last="link"``).
        made = training.first(lambda: staging or stage(record), f"start {name}")
        try:
            captured = training.agreed(lambda: self._capture(state, meta, made, groups, owner), f"prepare {name}")
            nbytes = sum(training.gather(captured.nbytes))
            training.agreed(lambda: require_space(record.parent, nbytes) if is_first else None, f"start {name}")
            is_sharded = training.share(bool(captured.sharded_tensors))
        except BaseException:
            if is_first:
                made.discard()
            raise
        if not is_first and not is_sharded:
            nothing: Future[CheckpointRecord | None] = Future()
            nothing.set_result(None)
            return nothing
        return self._write(captured, writing if is_sharded else ALONE, asynchronous, owner)

    def _capture(
        self, state: Mapping[str, Any], meta: RecordMeta, staging: Staging, groups: RankGroups | None, owner: object
    ) -> Captured:
        """Return the share of this rank in a checkpoint of `state`, after the previous save has ended."""
        captured = capture(state, meta if groups is None else replace(meta, world_size=groups.training.size), staging)
        if groups is None and captured.sharded_tensors:
            _, name = next(iter(captured.sharded_tensors))
            raise CheckpointError(
                f"{name} is sharded over several ranks, which save it together: use the "
                "Checkpoint callback under ModelParallelStrategy, or gather it first with full_tensor()"
            )
        self.wait(owner)
        if groups is not None and groups.training.rank != 0:
            slices = [entry for entry in captured.entries if entry.box is not None]
            return replace(captured, entries=slices, rest=b"", state=None)
        frozen = self._frozen.get(staging.record.parent)
        return captured if frozen is None else frozen.divide(captured)

    def _write(
        self, captured: Captured, channel: Channel, asynchronous: bool, owner: object
    ) -> Future[CheckpointRecord | None]:
        future: Future[CheckpointRecord | None] = Future()

        def job(taken: Captured) -> None:
            carry_out(future, lambda: _write(channel, taken))
            future.result()

        if asynchronous:
            taken = captured.snapshot(self.buffer)
            self._submit(lambda: job(taken), owner, is_joint=channel is not ALONE)
        else:
            self.background.finish()
            job(captured)
        return future

    def load(self, path: str | os.PathLike[str], *, groups: RankGroups | None = None) -> dict[str, Any]:
        """Return the checkpoint at `path`, all of it proven before use; or a file of torch, read without its pickle.

        Args:
            path: The checkpoint, or a path that `find_checkpoint` resolves.
            groups: All ranks call this, and each reads only the slices of sharded tensors that it uses. With None,
                this process reads everything itself.

        Raises:
            BrokenCheckpointError: A file differs from its record.
            CheckpointError: It omits a tensor that the model lacks, or another rank could not read it.
            FileNotFoundError: There is no checkpoint.
        """
        channel = ALONE if groups is None else groups.training

        def read() -> dict[str, Any]:
            self.wait()
            self.loaded, file = None, find_checkpoint(path)
            if is_torch_file(file):
                return _load_torch_file(file)
            self.loaded = record = read_record(file)
            if record.finite_weights is False:
                rank_zero_only(log.warning)(
                    "The weights in %s are not finite: training that continues from them is lost. Name an earlier "
                    "checkpoint; `genlight checkpoints verify` says which are finite",
                    record.path,
                )
            base = self.base() if self.base is not None and record.left_out else None
            share = None if groups is None else slice(channel.rank, None, channel.size)
            return load_record(record, base=base, share=share)

        return channel.agreed(read, f"load {os.fspath(path)}")

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` after the save in flight is durable; if that save fails, remove nothing.

        A file or folder there that is not a checkpoint stays, with a warning.
        """
        before = [pending.future for pending in self._pending]
        if not before:
            _remove(Path(path))
        else:
            job = partial(_remove, Path(path))
            self.background.run(lambda: None if any(each.exception() for each in before) else job(), f"remove {path}")

    def prune(self, directory: Path, choose: Callable[[list[Listed]], list[CheckpointRecord]]) -> None:
        """Remove checkpoints of `directory` in the background, after the save in flight.

        Args:
            directory: Its records are read once.
            choose: Returns those to remove; called in the background.
        """

        def remove() -> None:
            listed = list_checkpoints(directory)
            named = folders_that_are_named(listed)
            for record in choose(listed):
                _remove(record.path, named)

        self.background.run(remove, f"remove old checkpoints from {directory}")

    @property
    def is_settled(self) -> bool:
        """Whether no background work is running and no failure is waiting for `poll` to raise it."""
        return all(pending.is_joint and pending.future.done() for pending in self._pending)

    def poll(self, owner: object = None) -> None:
        """Raise a failure of the background, if it belongs to `owner` or to nobody and concerns only this process.

        Raises:
            Exception: The first such failure; raised once.
        """
        self._settle([each for each in self._pending if each.future.done() and not each.is_joint], owner)

    def wait(self, owner: object = None) -> None:
        """Return when no background work is running.

        Raises:
            Exception: The first failure that belongs to `owner` or to nobody; raised once.
        """
        concurrent.futures.wait([pending.future for pending in self._pending])
        self._settle(self._pending, owner)

    def _settle(self, ended: Sequence[Pending], owner: object) -> None:
        """Forget the work that has `ended`, except other owners' failures; raise the first failure."""
        failed = [pending for pending in ended if pending.future.exception() is not None]
        own = [pending for pending in failed if pending.owner is None or pending.owner is owner]
        forgotten = {id(pending) for pending in ended} - {id(pending) for pending in failed if pending not in own}
        self._pending = [pending for pending in self._pending if id(pending) not in forgotten]
        for further in own[1:]:
            log.error("A further save failed: %s", further.future.exception())
        for first in own[:1]:
            first.future.result()

    def close(self) -> None:
        """Wait for all background work, and free the memory of snapshots.

        Raises:
            Exception: The failure of the last save; raised once.
        """
        self.background.finish()
        self.buffer = HostBuffer()
        self._pending = [replace(pending, owner=None) for pending in self._pending]
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


@dataclass(frozen=True, eq=False)
class Pending:
    """A job in the background."""

    future: Future[Any]
    owner: object
    """The only caller that learns of a failure; None for the first caller that asks."""
    is_joint: bool
    """Whether all ranks do it together: a rank that raised its failure separately would leave the others waiting."""


class Background:
    """Runs jobs one after the other, each in a thread that waits for the one before.

    The threads are not daemons: an interpreter that exits lets the jobs finish. If the system has no room for a thread,
    the caller waits for its job.
    """

    def __init__(self) -> None:
        self._last: Future[Any] = Future()
        self._last.set_result(None)

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


@dataclass(frozen=True)
class Part:
    """The files and slices that a rank has written."""

    files: Sequence[FileEntry]
    slices: Sequence[SlicedTensor]
    """Sharded tensors, each with one slice."""
    finite_weights: bool | None


def _write(channel: Channel, captured: Captured) -> CheckpointRecord | None:
    """Write this rank's part; return when the complete checkpoint is durable, on rank zero with its record. Collective.

    If that fails, the staged folder is removed.

    Raises:
        CheckpointError: A rank could not write its part, died, or does not see the directory.
        UnwrittenCheckpointError: This rank could not write its part; the previous checkpoint is unchanged.
    """
    record, written = captured.staging.record, list[CheckpointRecord]()

    def put_together() -> None:
        parts = channel.gather(part)
        if channel.rank == 0:
            written.append(_commit(captured, parts))

    try:
        part = channel.agreed(lambda: _write_part(channel.rank, captured), f"write its part of {record.name}")
        channel.agreed(put_together, f"commit {record.name}")
    except BaseException as error:
        if not written:
            if channel.rank == 0:
                captured.staging.discard()
            raise
        log.warning("A rank ended before it learned that %s is durable: %s", record.name, error)
    if written and captured.frozen is not None:
        captured.frozen.learn(written[0], captured)
    return written[0] if written else None


def _write_part(rank: int, captured: Captured) -> Part:
    """Write the slices of this rank, and on rank zero everything that is not sharded."""
    folder, slices = captured.staging.path, list[SlicedTensor]()
    _wait_until_seen(folder, rank)
    with naming_the_checkpoint(captured.staging.record, captured.nbytes):
        files = _hook_files(folder) if rank == 0 else []
        for name, header, entries in tensor_files(captured.entries, rank):
            make_directory((folder / name).parent, shared=None)
            data = _slices_noted(rank, len(header), entries, captured, slices)
            files.append(FileEntry(name, *write_file(folder / name, chain([header], data))))
        if slices:
            fsync_directory(folder / part_folder(rank))
        if captured.linked is not None:
            files.append(FileEntry(FROZEN_FILE, captured.linked.size, captured.linked.xxh3_128))
        if rank == 0:
            files.append(FileEntry(STATE_FILE, *write_file(folder / STATE_FILE, [captured.rest])))
    return Part(files, slices, captured.has_finite_weights())


def _slices_noted(
    rank: int, begin: int, entries: list[Entry], captured: Captured, slices: list[SlicedTensor]
) -> Iterator[memoryview]:
    """Yield the bytes of `entries`, the first of which begins at `begin`; add the slices among them to `slices`."""
    for entry in entries:
        data = bytes_of(entry.source)
        if entry.box is not None:
            of = captured.sharded_tensors[entry.file, entry.key]
            slices.append(msgspec.structs.replace(of, slices=(StoredSlice(rank, entry.box, begin, digest_of(data)),)))
        begin += len(data)
        yield data


def _hook_files(staged: Path) -> list[FileEntry]:
    """Make durable the files that the trainer's hook wrote into the folder `staged`, and return their entries."""
    entries = []
    for path, folders, files in os.walk(staged / TRAINER_FOLDER):
        for name in sorted([*files, *(name for name in folders if (Path(path) / name).is_symlink())]):
            file = Path(path) / name
            if file.is_symlink():  # it would neither survive a move nor be durable
                raise CheckpointError(f"save_checkpoint left a link, {name} -> {file.readlink()}; write a file instead")
            fsync_file(file)
            entries.append(FileEntry(file.relative_to(staged).as_posix(), *hash_file(file)))
    return entries


def _commit(captured: Captured, parts: Sequence[Part]) -> CheckpointRecord:
    """Commit the files that all ranks have staged; their names are relative to the staging folder.

    Raises:
        CheckpointError: Rank zero does not see a part, the slices do not tile their tensors, or something that is
            not a checkpoint has its name.
        UnwrittenCheckpointError: It could not be committed; the previous checkpoint is unchanged.
    """
    staging, path = captured.staging, captured.staging.record
    files = [file for part in parts for file in part.files]
    with naming_the_checkpoint(path, sum(file.size for file in files)):
        for file in files:
            if (rank := rank_of(file.path)) is not None:
                _wait_until_seen(staging.path / file.path, 0, size=file.size, made_by=rank)
        if index := _index_of(captured, parts):
            files.append(FileEntry(SLICES_FILE, *write_file(staging.path / SLICES_FILE, [msgspec.json.encode(index)])))
        # A rank other than zero that holds no slice of a parameter has no verdict.
        verdicts = [p.finite_weights for rank, p in enumerate(parts) if p.finite_weights is not None or not rank]
        files.sort(key=lambda file: file.path)
        facts = vars(captured.meta) | {
            "state": captured.state,
            "folder": None,
            "files": tuple(files),
            "created_at_ms": time.time_ns() // 1_000_000,
            "versions": library_versions(),
            "left_out": captured.left_out,
            "finite_weights": False if False in verdicts else None if None in verdicts else True,
        }
        commit(staging, CheckpointRecord(path=path, **facts))
        return read_record(path)


def _index_of(captured: Captured, parts: Sequence[Part]) -> list[SlicedTensor]:
    """Return the tensors that the slices of all ranks form.

    Raises:
        CheckpointError: They do not tile rank zero's tensors exactly.
    """
    slices_of = {without: list[StoredSlice]() for without in captured.sharded_tensors.values()}
    for sliced in (sliced for part in parts for sliced in part.slices):
        slices_of.setdefault(msgspec.structs.replace(sliced, slices=()), []).extend(sliced.slices)
    for tensor, slices in slices_of.items():
        is_known = captured.sharded_tensors.get((tensor.file, tensor.key)) == tensor
        if not is_known or not tile_exactly(tensor.shape, [each.box for each in slices]):
            raise CheckpointError(
                f"the ranks do not hold the same sharded tensors: their slices of {tensor.key} do not tile it exactly; "
                "every rank must put the same sharded tensors into its state"
            )
    return [msgspec.structs.replace(tensor, slices=tuple(slices)) for tensor, slices in slices_of.items()]


def require_shared_directory(channel: Channel, directory: Path) -> None:
    """Raise if a rank does not see a folder that rank zero makes in `directory`. Collective.

    Raises:
        CheckpointError: Names the rank and its host.
        UnwrittenCheckpointError: Rank zero cannot write there.
    """
    staging = channel.first(lambda: stage(directory / "shared"), f"use {directory}")
    try:
        channel.agreed(lambda: _wait_until_seen(staging.path, channel.rank), f"use {directory}")
    finally:
        if channel.rank == 0:
            staging.discard()


def _wait_until_seen(path: Path, rank: int, *, size: int | None = None, made_by: int = 0) -> None:
    """Return once this rank sees `path`, with its size.

    Raises:
        CheckpointError: It does not; the directory is not the same one on all nodes.
    """
    end = time.monotonic() + VISIBLE_WITHIN_S
    while time.monotonic() <= end:
        with contextlib.suppress(FileNotFoundError):
            if size in (None, os.stat(path).st_size):
                return
        time.sleep(_POLL_S)
    directory = path.parent if size is None else path.parent.parent.parent
    raise CheckpointError(
        f"rank {rank} on {socket.gethostname()} does not see in {directory} the files of rank {made_by}: "
        "each rank writes its own part of a sharded checkpoint, so the directory must be on a file system that all "
        "nodes share; choose such a `dirpath`, or train without sharding"
    )


def _load_torch_file(path: Path) -> dict[str, Any]:
    """Load a file that ``torch.save`` wrote, without a pickle that could run code.

    Raises:
        CheckpointError: It holds objects of classes that only such a pickle could make, or is not a file of torch.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"an object of {name[1]}" if name else "something"
        raise CheckpointError(
            f"{os.fspath(path)} holds {what} that torch reads only by running code of the file, which genlight never "
            "does. If you trust the file, write the part that you need to a new file of plain values: "
            "`torch.save({'state_dict': torch.load(FILE, weights_only=False)['state_dict']}, NEW_FILE)`"
        ) from error
    return loaded


def load_record(record: CheckpointRecord, *, base: Base | None = None, share: slice | None = None) -> dict[str, Any]:
    """Like `load`, for a record that was read already.

    Args:
        record: The checkpoint's record.
        base: The same as in `load`.
        share: For a rank that needs only its own slices of sharded tensors: they are read when they are used. It says
            which of the files with slices to prove now. Every file must be in the share of one rank, and nothing
            may be used before all ranks have proven theirs.
    """
    if record.is_old:
        # Lightning requires these of any checkpoint; the trainer handles the weights, if there are any.
        required = {"pytorch-lightning_version": version("lightning"), "optimizer_states": [], "lr_schedulers": []}
        return {**required, "epoch": 0, "global_step": record.step, CONTRACT_KEY: {"state": record.state}}
    source = _Source(record, base, share)
    try:
        checkpoint: dict[str, Any] = decode(source.content["checkpoint"], source.tensor)
        if record.state or CONTRACT_KEY in checkpoint:
            checkpoint.setdefault(CONTRACT_KEY, {})["state"] = decode(record.state, source.tensor)
        if "state_dict" in checkpoint:
            weights = checkpoint["state_dict"] = OrderedDict(checkpoint["state_dict"])
            if (metadata := decode(source.content["weights_metadata"], source.tensor)) is not None:
                # Versions of modules, in the attribute that torch reads.
                weights._metadata = metadata  # type: ignore[attr-defined]
    except (CheckpointError, OSError, MemoryError):  # faults of this machine: references matched the files
        raise
    except Exception as error:
        # The codecs call constructors, and those may raise anything for values from a file.
        raise BrokenCheckpointError(record.name, f"its content is malformed: {error!r:.500}") from error
    return checkpoint


class _Source:
    """The tensors in the files of one checkpoint."""

    def __init__(self, record: CheckpointRecord, base: Base | None, share: slice | None) -> None:
        """Read and prove all files; of those with slices, only this rank's share."""
        self._is_lazy = share is not None
        self._stored = {(MODEL_FILE, key): tensor for key, tensor in left_out_tensors(record, base).items()}
        self._made: dict[Any, torch.Tensor] = {}
        self.content, self._facts, in_slices = read_contents(record, self._read_file)
        """`content` is the content of the state file."""
        others, sliced = [], []
        for entry in record.files:
            name = record.file_name(entry)
            if rank_of(name) is not None:
                sliced.append(entry)
            elif name != STATE_FILE and not is_of_tensors(name):
                others.append(entry)
        verify_files(record, others + sliced[share or slice(None)])
        self._sliced = {(each.file, each.key): StoredSlices(record, each) for each in in_slices}

    def _read_file(self, record: CheckpointRecord, entry: FileEntry) -> dict[str, TypedShape]:
        tensors, header = _read_tensors(record, entry)
        file = record.tensor_file(entry)
        self._stored |= {(file, key): tensor for key, tensor in tensors.items()}
        return header

    def tensor(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the tensor for a reference; the same object for equal references."""
        identity = json.dumps(reference, sort_keys=True)
        if identity not in self._made:
            check_tensor(reference, self._facts)  # before memory is allocated for it
            self._made[identity] = self._make(reference)
        return self._made[identity]

    def _make(self, reference: dict[str, Any]) -> torch.Tensor:
        place = (reference["file"], reference["key"])
        if place in self._sliced and self._is_lazy:
            return WholeTensor(self._sliced[place])
        if place not in self._made:
            self._made[place] = self._read(reference)
        return restore_flags(self._made[place], reference)

    def _read(self, reference: dict[str, Any]) -> torch.Tensor:
        """Return the stored tensor for a reference, with its own type and strides; shared by all references to it."""
        place = (reference["file"], reference["key"])
        if place in self._sliced:
            return self._sliced[place].whole()
        tensor = self._stored[place]
        if "dtype" in reference:
            tensor = tensor.view(dtype_of(reference["dtype"])).reshape(reference["shape"])
        if "stride" in reference:
            strided = torch.empty_strided(tensor.shape, reference["stride"], dtype=tensor.dtype, device="cpu")
            tensor = strided.copy_(tensor)
        return tensor


@dataclass(frozen=True)
class StoredSlices:
    """A sharded tensor of a checkpoint; its values are read on demand."""

    record: CheckpointRecord
    tensor: SlicedTensor

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return dtype_of(self.tensor.dtype)

    def whole(self) -> torch.Tensor:
        """Return the complete tensor, assembled from all slices."""
        return self.read(Box((0,) * len(self.tensor.shape), self.tensor.shape))

    def read(self, part: Box) -> torch.Tensor:
        """Return the saved values of one part, from the slices that overlap it.

        Raises:
            BrokenCheckpointError: They differ from the saved ones.
        """
        result = torch.empty(part.shape, dtype=self.dtype, device="cpu")
        for stored in self.tensor.slices:
            common = stored.box.overlap(part)
            if common is not None:
                within(common, result, of=part).copy_(within(common, self._slice(stored), of=stored.box))
        return result

    def _slice(self, stored: StoredSlice) -> torch.Tensor:
        """Return the proven values of one slice."""
        values = torch.empty(stored.box.shape, dtype=self.dtype, device="cpu")
        data, name = bytes_of(values), f"{part_folder(stored.rank)}/{self.tensor.file}"
        with os.fdopen(open_regular(self.record.path.parent / f"{self.record.folder}/{name}"), "rb") as file:
            file.seek(stored.begin)
            file.readinto(data)  # a short read leaves another digest
        if digest_of(data) != stored.xxh3_128:
            raise BrokenCheckpointError(self.record.name, f"{name} does not hold the saved values of {self.tensor.key}")
        return values


def _read_tensors(record: CheckpointRecord, entry: FileEntry) -> tuple[dict[str, torch.Tensor], dict[str, TypedShape]]:
    """Return the tensors of one file, and its header, after the complete file is proven."""
    hasher = xxhash.xxh3_128()
    tensors: dict[str, torch.Tensor] = {}
    with opened(record, entry) as file:
        header = header_from(lambda size: bytes(_take(file, memoryview(bytearray(size)), hasher)), entry.size)
        for key, stored in header.items():
            tensors[key] = torch.empty(stored.shape, dtype=_TYPE_OF_FORMAT[stored.dtype], device="cpu")
            _take(file, bytes_of(tensors[key]), hasher)
        position = file.tell()
    check_file(record, entry, position, hasher.hexdigest())
    return tensors, header


def _take(file: BinaryIO, memory: memoryview, hasher: Any) -> memoryview:
    """Fill `memory` from `file`, in pieces that are hashed while they are in the CPU cache."""
    for start in range(0, len(memory), _PIECE):
        piece = memory[start : start + _PIECE]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise EOFError("it ends early")
        hasher.update(piece)
    return memory


def left_out_tensors(record: CheckpointRecord, base: Base | None) -> dict[str, torch.Tensor]:
    """Return the tensors that `record` omits, copied from `base` and proven, in the form that a file would have.

    Raises:
        CheckpointError: There is no `base`, or it lacks one, or has another; names the tensor and the way out.
    """
    if record.left_out and base is None:
        names = ", ".join(entry.key for entry in record.left_out[:_NAMED])
        more = ", …" if len(record.left_out) > _NAMED else ""
        raise CheckpointError(
            f"{record.name} omits {len(record.left_out)} tensors ({names}{more}), which training did not change, "
            "because it was saved with weights='trained'. Resume it in a Trainer with the Checkpoint callback, whose "
            "module has them; or pass them as `base`: load(path, base=module.state_dict()), or `genlight checkpoints "
            "export PATH --to FILE --base FILE.safetensors`"
        )
    tensors = {}
    for left in record.left_out:
        built = (base or {}).get(left.key)
        host = None if built is None else built.detach().to("cpu", copy=True).contiguous()
        now = None if host is None else described({left.key: host}).get(left.key)
        if host is None or now != left:
            has = "does not have it" if host is None else "has a part of it" if now is None else f"has {_text_of(now)}"
            raise CheckpointError(
                f"{record.name} belongs to another base: {left.key} was {_text_of(left)}, and the module {has}. It was "
                "saved with weights='trained' and omits that tensor; build the module, unsharded, with the base that "
                "it was trained with, or begin a new run"
            )
        tensors[left.key] = as_uint8(host) if left.dtype == RAW and host.dtype != torch.uint8 else host
    return tensors


def _text_of(left: LeftOut) -> str:
    return f"{left.dtype} {list(left.shape)} with the digest {left.xxh3_128}"
