"""Writing what was captured: files into a staged folder, then the record. In any thread.

With sharded tensors all ranks write. In the training threads they agree that there is something to write, room for it,
and a temporary folder. Then each rank, in its own thread where the save is asynchronous:

1. writes its slices into ``rank-00001/`` of that folder, synced and compared like any other file; rank zero also writes
   everything that is not sharded;
2. tells rank zero what it has written, or why it could not; rank zero writes the index of all slices;
3. hears from rank zero that the record is committed, or why not.

So a checkpoint exists when its record does, and the record names and proves every part. A rank that cannot write makes
the save fail on all ranks; one that dies closes its connections, which does too. The checkpoint before stays.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.durable import fsync_directory, fsync_file, temporary_name
from .capture import Captured, FrozenFile, finite_weights, link
from .codec.tensor_bytes import bytes_of
from .codec.tensor_table import Entry, Slice
from .format.record import (
    FROZEN_FILE,
    STATE_FILE,
    TRAINER_FOLDER,
    CheckpointRecord,
    FileEntry,
    RecordMeta,
    name_of,
    read_record,
    serialise_record,
)
from .format.tensor_files import (
    SLICES_FILE,
    SlicedTensor,
    StoredSlice,
    block_digests,
    build_header,
    make_whole,
    part_folder,
    rank_of,
)
from .sharded.rank_channel import Channel, first_problem, text_of
from .storage import (
    SPACE_FOR_THE_REST,
    Staging,
    choose_folder,
    commit,
    hash_file,
    move_older_final,
    naming_the_checkpoint,
    require_space,
    stage,
    write_file,
)

__all__ = ["plan_save", "require_shared_directory", "write"]

log = logging.getLogger(__name__)

VISIBLE_WITHIN_S = 10.0
"""How long a file that one rank made may take to be seen by another, over a network file system that caches."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Plan:
    """The decision of rank zero about a save."""

    staging: Path
    is_sharded: bool
    """False where no tensor is, so that rank zero alone has something to write."""


def plan_save(
    channel: Channel,
    record: Path,
    captured: Captured | Exception,
) -> Plan:
    """Agree on the save of `record`. Collective, in the training threads.

    Args:
        channel: For the training threads.
        record: Where the record will be; rank zero's counts.
        captured: This rank's share, or why there is none; it gets a temporary folder, if it has none.

    Raises:
        Exception: Why there is no share of this rank, or a `CheckpointError` about another rank.
        CheckpointError: The disk has no space for all parts.
        UnwrittenCheckpointError: Rank zero could not make the folder.
    """
    problem = captured if isinstance(captured, Exception) else None
    nbytes = 0 if isinstance(captured, Exception) else _own_bytes(captured, channel.rank)
    said = channel.gather((text_of(problem), nbytes))
    plan: Plan | str | None = first_problem([text for text, _ in said], f"prepare {name_of(record)}")
    if channel.rank == 0 and plan is None:
        assert isinstance(captured, Captured)
        try:
            whole = sum(nbytes for _, nbytes in said)
            with naming_the_checkpoint(record, whole):
                record.parent.mkdir(parents=True, exist_ok=True)
                require_space(record.parent, whole + SPACE_FOR_THE_REST)
                captured.staging = captured.staging or stage(record)
                plan = Plan(captured.staging.path, bool(captured.sharded_tensors))
        except Exception as error:  # noqa: BLE001 - it is raised below, after the others know
            problem, plan = error, f"rank 0 could not start {name_of(record)}: {text_of(error)}"
    decided = channel.share(plan)
    if isinstance(decided, Plan):
        return decided
    raise problem or CheckpointError(decided)


def write(channel: Channel, record: Path, captured: Captured) -> CheckpointRecord | None:
    """Write this rank's part and return when the whole checkpoint is durable, on rank zero with its record. Collective.

    The staged folder is gone if that fails.

    Raises:
        CheckpointError: A rank could not write its part, died, or does not see the directory.
        UnwrittenCheckpointError: This rank could not write its own; the checkpoint that was there before still is.
    """
    staging = captured.staging
    assert staging is not None
    try:
        return _write(channel, record, captured, staging)
    except BaseException:
        if channel.rank == 0:
            staging.discard()
        raise


@dataclass(frozen=True)
class Part:
    """The report of a rank on its part, for which rank zero waits."""

    problem: str | None = None
    files: Sequence[FileEntry] = ()
    slices: Sequence[tuple[str, str, Slice, StoredSlice]] = ()
    """File and key of each, what it is of which tensor, and where its bytes are."""
    finite_weights: bool | None = None


def _write(channel: Channel, record: Path, captured: Captured, staging: Staging) -> CheckpointRecord | None:
    written, verdict, problem = None, None, None
    try:
        part = _write_part(channel.rank, captured, staging)
    except Exception as error:  # noqa: BLE001 - it is raised below, after the others know
        part, problem = Part(text_of(error)), error
    try:
        parts = channel.gather(part)
        if channel.rank == 0:
            verdict = first_problem([part.problem for part in parts], f"write its part of {record.name}")
            if verdict is None:
                try:
                    written = _commit(record, captured, staging, parts)
                except Exception as error:  # noqa: BLE001 - as above
                    problem, verdict = error, f"rank 0 could not commit {record.name}: {text_of(error)}"
        verdict = channel.share(verdict)
    except RuntimeError as error:  # What gloo raises when a connection closes.
        if written is not None:
            log.warning("A rank ended before it heard that %s is durable: %s", record.name, error)
            return written
        if problem is None:
            raise CheckpointError(f"a rank ended while {name_of(record)} was being written") from error
    if problem is not None:
        raise problem
    if verdict is not None:
        raise CheckpointError(verdict)
    return written


def require_shared_directory(channel: Channel, directory: Path) -> None:
    """Raise where a rank does not see what rank zero makes in `directory`. Collective.

    Raises:
        CheckpointError: Names the rank and its host.
        OSError: Rank zero cannot write there.
    """
    staging, problem = None, None
    if channel.rank == 0:
        try:
            staging = stage(directory / "shared")
        except OSError as error:
            problem = error
    path = channel.share(None if staging is None else staging.path)
    if path is not None and channel.rank != 0:
        try:
            _wait_until_seen(path, channel.rank)
        except CheckpointError as error:
            problem = error  # type: ignore[assignment]
    try:
        channel.agree(problem, f"use {directory}")
    finally:
        if staging is not None:
            staging.discard()


def _commit(path: Path, captured: Captured, staging: Staging, parts: Sequence[Part]) -> CheckpointRecord:
    """Commit what all ranks have staged; their files are named relative to the staging folder.

    Raises:
        CheckpointError: Rank zero does not see a part, the slices do not make their tensors whole, or something that is
            not a checkpoint has its name.
        UnwrittenCheckpointError: It could not be committed; the checkpoint that was there before still is.
    """
    files = [file for part in parts for file in part.files]
    with naming_the_checkpoint(path, sum(file.size for file in files)):
        for file in files:
            if (rank := rank_of(file.path)) is not None:
                _wait_until_seen(staging.path / file.path, 0, size=file.size, made_by=rank)
        if index := _index_of(captured, parts):
            files.append(FileEntry(SLICES_FILE, *write_file(staging.path / SLICES_FILE, [msgspec.json.encode(index)])))
        # A rank other than zero that holds no slice of a parameter says nothing.
        said = [part.finite_weights for rank, part in enumerate(parts) if part.finite_weights is not None or not rank]
        if captured.meta.final:
            move_older_final(path, step=captured.step, run_id=captured.meta.run_id)
        folder = choose_folder(path)
        record = serialise_record(
            _relative_primary(captured.meta, staging),
            step=captured.step,
            state=captured.state,
            folder=folder,
            files=[replace(file, path=f"{folder}/{file.path}") for file in sorted(files, key=lambda file: file.path)],
            created_at_ms=time.time_ns() // 1_000_000,
            left_out=captured.left_out,
            finite_weights=False if False in said else None if None in said else True,
        )
        commit(staging, folder, record)
        return read_record(path)


def _index_of(captured: Captured, parts: Sequence[Part]) -> list[SlicedTensor]:
    """The tensors that the slices of all ranks make.

    Raises:
        CheckpointError: They do not make the tensors whole that rank zero has.
    """
    found: dict[tuple[str, str], list[tuple[Slice, StoredSlice]]] = {key: [] for key in captured.sharded_tensors}
    for part in parts:
        for file, key, of, stored in part.slices:
            found.setdefault((file, key), []).append((of, stored))
    index = []
    for (file, key), slices in found.items():
        expected = captured.sharded_tensors.get((file, key))
        facts = {(of.whole, of.dtype) for of, _ in slices}
        boxes = [of.box for of, _ in slices]
        if expected is None or facts - {(expected.whole, expected.dtype)} or not make_whole(expected.whole, boxes):
            raise CheckpointError(
                f"the ranks do not hold the same sharded tensors: their slices of {key} do not make one whole; "
                "every rank has to put the same sharded tensors into its state"
            )
        index.append(SlicedTensor(file, key, expected.dtype, expected.whole, tuple(stored for _, stored in slices)))
    return index


def _write_files(staging: Staging, captured: Captured) -> list[FileEntry]:
    """Write everything but slices; files are named relative to the staging folder."""
    written = [(f"{TRAINER_FOLDER}/{name}", *facts) for name, facts in _hook_files(staging.path / TRAINER_FOLDER)]
    for file, entries in _by_file(captured.entries):
        buffers = (bytes_of(entry.source) for entry in entries)
        written.append((file, *_write_tensors(staging.path / file, entries, buffers)))
        if file == FROZEN_FILE and captured.earlier is not None:
            _share(captured.earlier, staging.path / file, written[-1][1:])
    if captured.linked is not None:
        written.append((FROZEN_FILE, captured.linked.size, captured.linked.xxh3_128))
    written.append((STATE_FILE, *write_file(staging.path / STATE_FILE, [captured.rest])))
    return [FileEntry(name, size, digest) for name, size, digest in written]


def _share(earlier: FrozenFile, path: Path, facts: tuple[int, str]) -> None:
    """Have `path`, written with the size and digest of `facts`, be the `earlier` file if that has the same bytes."""
    beside = path.with_name(temporary_name(path.name))
    if facts == (earlier.size, earlier.xxh3_128) and link(earlier, beside):
        if hash_file(beside) == facts:  # no bit of it has changed on the disk since
            os.replace(beside, path)
        else:
            os.unlink(beside)


def _by_file(entries: Iterable[Entry]) -> Iterable[tuple[str, list[Entry]]]:
    """Entries as they follow each other in each file: large elements first, so that every tensor is aligned."""
    ordered = sorted(entries, key=lambda entry: (entry.file, -int(entry.source.dtype.itemsize)))
    return [(file, list(some)) for file, some in itertools.groupby(ordered, key=lambda entry: entry.file)]


def _write_tensors(path: Path, entries: Iterable[Entry], buffers: Iterable[memoryview]) -> tuple[int, str]:
    """Write a safetensors file of `entries`, whose bytes `buffers` gives; its size and digest."""
    return write_file(path, itertools.chain([_header_of(entries)], buffers))


def _header_of(entries: Iterable[Entry]) -> bytes:
    """The start of the file that `_write_tensors` writes."""
    return build_header([(e.key, e.dtype, e.shape, e.nbytes) for e in entries], {"format": "pt"})


def _hook_files(folder: Path) -> list[tuple[str, tuple[int, str]]]:
    """Make durable what the trainer's hook wrote; name within `folder`, then size and digest of each file."""
    found = []
    for path, folders, files in os.walk(folder):
        for name in sorted([*files, *(name for name in folders if (Path(path) / name).is_symlink())]):
            file = Path(path) / name
            if file.is_symlink():
                _replace_link(file)
            fsync_file(file)
            found.append((file.relative_to(folder).as_posix(), hash_file(file)))
    return found


def _replace_link(link: Path) -> None:
    """Put the file that a link points to in its place: a link would not survive a move, nor be durable."""
    target = link.resolve()
    if not target.is_file():
        raise CheckpointError(f"save_checkpoint left a link that does not lead to a file: {link.name} -> {target}")
    link.unlink()
    shutil.copyfile(target, link)


def _relative_primary(meta: RecordMeta, staging: Staging) -> RecordMeta:
    """`meta` with a ``primary_path`` that holds after the folder got its name, and wherever it is moved to."""
    named = (meta.trainer_checkpoint or {}).get("primary_path")
    if meta.trainer_checkpoint is None or not isinstance(named, (str, os.PathLike)):
        return meta
    path, output = Path(named), (staging.path / TRAINER_FOLDER).absolute()
    if path.is_absolute() and path.is_relative_to(output):
        path = path.relative_to(output)
    return replace(meta, trainer_checkpoint={**meta.trainer_checkpoint, "primary_path": str(path)})


def _own_bytes(captured: Captured, rank: int) -> int:
    return captured.nbytes if rank == 0 else sum(entry.nbytes for entry in captured.slices)


def _write_part(rank: int, captured: Captured, staging: Staging) -> Part:
    """Write the slices of this rank, and on rank zero what is not sharded."""
    _wait_until_seen(staging.path, rank)
    slices: list[tuple[str, str, Slice, StoredSlice]] = []
    with naming_the_checkpoint(staging.record, _own_bytes(captured, rank)):
        files = _write_files(staging, captured) if rank == 0 else []
        for file, entries in _by_file(captured.slices):
            name = f"{staging.folder(part_folder(rank)).name}/{file}"
            facts = _write_tensors(staging.path / name, entries, _indexed(rank, entries, slices))
            files.append(FileEntry(name, *facts))
        if slices:
            fsync_directory(staging.folder(part_folder(rank)))
    return Part(None, files, slices, finite_weights(captured))


def _indexed(
    rank: int, entries: list[Entry], slices: list[tuple[str, str, Slice, StoredSlice]]
) -> Iterator[memoryview]:
    """The bytes of each entry, which is added to `slices` on the way."""
    begin = len(_header_of(entries))
    for entry in entries:
        assert entry.slice is not None
        data, box = bytes_of(entry.source), entry.slice.box
        slices.append((entry.file, entry.key, entry.slice, StoredSlice(rank, box, begin, block_digests(data))))
        begin += len(data)
        yield data


def _wait_until_seen(path: Path, rank: int, *, size: int | None = None, made_by: int = 0) -> None:
    """Return once `path` is there for this rank, with its size.

    Raises:
        CheckpointError: It is not; the directory is not the same one on all nodes.
    """
    end = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        try:
            found = os.stat(path).st_size
            if size is None or found == size:
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    directory = path.parent if size is None else path.parent.parent.parent
    raise CheckpointError(
        f"rank {rank} on {socket.gethostname()} does not see in {directory} what rank {made_by} wrote there: "
        "each rank writes its own part of a sharded checkpoint, so the directory must be on a file system that all "
        "nodes share; choose such a `dirpath`, or train without sharding"
    )
