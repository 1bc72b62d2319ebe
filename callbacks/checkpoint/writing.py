"""The writing of a captured checkpoint, by one rank or by all ranks together.

With sharded tensors each rank

1. writes its slices into ``rank-00001/`` of the temporary folder, synced and compared like any other file; rank zero
   also writes everything that is not sharded;
2. sends rank zero the list of its files, or the reason of its failure; rank zero writes the index of all slices;
3. learns from rank zero that the record is committed, or the reason why not.

So a checkpoint exists if its record does, and the record names and proves every part. If a rank cannot write, or dies
and so closes its connections, the save fails on all ranks. The previous checkpoint stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import fsync_directory, fsync_file, make_directory
from ..rank_channel import Channel
from .capture import Captured
from .codec.tensors import TensorFile
from .format.record import (
    FROZEN_FILE,
    STATE_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    FileEntry,
    digest_of,
    library_versions,
    read_record,
)
from .format.slice_index import SLICES_FILE, SlicedTensor, StoredSlice, part_folder, rank_of, tile_exactly
from .storage import commit, hash_file, name_checkpoint_in_errors, stage, write_file

log = logging.getLogger(__name__)

VISIBLE_WITHIN_S = 10.0
"""Longest wait of one rank until it sees a file of another: a network file system may cache the folder."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Part:
    """The files and slices that a rank has written."""

    files: Sequence[FileEntry]
    slices: Sequence[SlicedTensor]
    """Sharded tensors, each with one slice."""
    finite_weights: bool | None


def write_checkpoint(channel: Channel, captured: Captured) -> CheckpointRecord | None:
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
        captured.frozen.learn(written[0], captured.entries, captured.linked)
    return written[0] if written else None


def _write_part(rank: int, captured: Captured) -> Part:
    """Write the slices of this rank, and on rank zero everything that is not sharded."""
    folder, slices = captured.staging.path, list[SlicedTensor]()
    _wait_until_seen(folder, rank)
    with name_checkpoint_in_errors(captured.staging.record, captured.nbytes):
        files = _hook_files(folder) if rank == 0 else []
        for content in captured.content():
            name = f"{part_folder(rank)}/{content.name}" if content.is_part else content.name
            make_directory((folder / name).parent, shared=None)
            data = _add_slices(rank, content, captured, slices) if content.is_part else content.pieces()
            files.append(FileEntry(name, *write_file(folder / name, chain([content.header], data))))
        if slices:
            fsync_directory(folder / part_folder(rank))
        if captured.linked is not None:
            files.append(FileEntry(FROZEN_FILE, captured.linked.size, captured.linked.xxh3_128))
        if rank == 0:
            files.append(FileEntry(STATE_FILE, *write_file(folder / STATE_FILE, [captured.rest])))
    return Part(files, slices, captured.has_finite_weights())


def _add_slices(rank: int, content: TensorFile, captured: Captured, slices: list[SlicedTensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file of slices, and add the slices to `slices`."""
    begin = len(content.header)
    for entry, data in zip(content.entries, content.pieces(), strict=True):
        of, box = captured.sharded_tensors[entry.file, entry.key], entry.box
        assert box is not None
        slices.append(msgspec.structs.replace(of, slices=(StoredSlice(rank, box, begin, digest_of(data)),)))
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
    with name_checkpoint_in_errors(path, sum(file.size for file in files)):
        for file in files:
            if (rank := rank_of(file.path)) is not None:
                _wait_until_seen(staging.path / file.path, 0, size=file.size, made_by=rank)
        if index := _index_of(captured, parts):
            files.append(FileEntry(SLICES_FILE, *write_file(staging.path / SLICES_FILE, [msgspec.json.encode(index)])))
        # Ranks other than zero that hold no slice of a parameter do not count.
        verdicts = [p.finite_weights for rank, p in enumerate(parts) if p.finite_weights is not None or not rank]
        files.sort(key=lambda file: file.path)
        facts = vars(captured.meta) | {
            "state": msgspec.Raw(captured.state),
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
        CheckpointError: This rank does not see it in time: the directory is not the same one on all nodes.
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
