"""Writing what was captured: files into a staged folder, then the record. In any thread."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from ...adapter.contract.exceptions import CheckpointError
from .capture import Captured, capture, finite_weights
from .codec.tensor_bytes import bytes_of
from .codec.tensor_table import Entry
from .format.layout import FROZEN_FILE, STATE_FILE, TRAINER_FOLDER, record_path
from .format.record import CheckpointRecord, FileEntry, RecordMeta
from .format.record_file import read_record, serialise_record
from .format.safetensors_header import build_header
from .frozen import link
from .ownership import choose_folder
from .storage.commit import SPACE_FOR_THE_REST, Staging, commit, require_space, stage
from .storage.write_file import hash_file, naming_the_checkpoint, write_file

__all__ = ["header_of", "in_order", "publish", "save", "write", "write_files", "write_tensors"]


def save(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    meta: RecordMeta | None = None,
    staging: Staging | None = None,
) -> CheckpointRecord:
    """Write a checkpoint; whole and durable when this returns.

    Args:
        path: Its record, with or without suffix: ``<directory>/step-00000200``.
        checkpoint: Lightning's dump, or any dictionary. ``checkpoint["genlight"]["state"]`` goes into the record.
        meta: What the record says beside that.
        staging: The folder that already holds what the trainer's hook wrote to its ``trainer`` folder.

    Raises:
        UnstorableStateError: A value cannot be stored; nothing was written.
        CheckpointError: The disk has no space for it; nothing was written.
        UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
    """
    return write(record_path(path), capture(checkpoint, meta or RecordMeta(), staging))


def write(path: Path, captured: Captured) -> CheckpointRecord:
    """Write `captured`; whole and durable when this returns. Its staged folder is gone if that fails.

    Raises:
        CheckpointError: The disk has no space for it, or it holds sharded tensors; nothing was written.
        UnwrittenCheckpointError: It could not be written; the checkpoint that was there before still is.
    """
    try:
        if captured.wholes:
            raise CheckpointError(
                f"{next(iter(captured.wholes))[1]} is sharded over several ranks, which save it together: use the "
                "Checkpoint callback under ModelParallelStrategy, or gather it first with full_tensor()"
            )
        with naming_the_checkpoint(path, captured.nbytes):
            require_space(path.parent, captured.nbytes + SPACE_FOR_THE_REST)
            captured.staging = captured.staging or stage(path)
            files = write_files(captured.staging, captured)
            return publish(path, captured, captured.staging, files, finite_weights=finite_weights(captured))
    except BaseException:
        if captured.staging is not None:
            captured.staging.discard()
        raise


def publish(
    path: Path, captured: Captured, staging: Staging, files: Iterable[FileEntry], *, finite_weights: bool | None
) -> CheckpointRecord:
    """Commit what was staged; `files` are named relative to the staging folder.

    Raises:
        CheckpointError: Something that is not a checkpoint has its name.
        OSError: It could not be committed; the checkpoint that was there before still is.
    """
    folder = choose_folder(path)
    record = serialise_record(
        _relative_primary(captured.meta, staging),
        step=captured.step,
        state=captured.state,
        folder=folder,
        files=[replace(file, path=f"{folder}/{file.path}") for file in sorted(files, key=lambda file: file.path)],
        created_at_ms=time.time_ns() // 1_000_000,
        left_out=captured.left_out,
        finite_weights=finite_weights,
    )
    commit(staging, folder, record)
    return read_record(path)


def write_files(staging: Staging, captured: Captured) -> list[FileEntry]:
    """Write everything but slices; files are named relative to the staging folder."""
    written = [(f"{TRAINER_FOLDER}/{name}", *facts) for name, facts in _hook_files(staging.path / TRAINER_FOLDER)]
    by_file: dict[str, list[Entry]] = {}
    for entry in captured.entries:
        by_file.setdefault(entry.file, []).append(entry)
    for file, entries in by_file.items():
        if file != FROZEN_FILE or not _links_earlier(staging, captured, entries, written):
            buffers = (bytes_of(entry.source) for entry in in_order(entries))
            written.append((file, *write_tensors(staging.path / file, entries, buffers)))
    if captured.linked is not None:
        written.append((FROZEN_FILE, captured.linked.size, captured.linked.xxh3_128))
    written.append((STATE_FILE, *write_file(staging.path / STATE_FILE, [captured.rest])))
    return [FileEntry(name, size, digest) for name, size, digest in written]


def _links_earlier(
    staging: Staging, captured: Captured, entries: list[Entry], written: list[tuple[str, int, str]]
) -> bool:
    """Link the frozen weights of an earlier attempt, and add them to `written`, where they are whole and the same."""
    earlier = captured.earlier
    if earlier is None:
        return False
    hasher = xxhash.xxh3_128(header_of(entries))
    for entry in in_order(entries):
        hasher.update(bytes_of(entry.source))
    if hasher.hexdigest() != earlier.xxh3_128 or not link(earlier, staging.path / FROZEN_FILE):
        return False
    if hash_file(staging.path / FROZEN_FILE, most=earlier.size) != (earlier.size, earlier.xxh3_128):
        (staging.path / FROZEN_FILE).unlink()
        return False
    written.append((FROZEN_FILE, earlier.size, earlier.xxh3_128))
    return True


def write_tensors(path: Path, entries: Iterable[Entry], buffers: Iterable[memoryview]) -> tuple[int, str]:
    """Write a safetensors file of `entries`, whose bytes `buffers` gives `in_order`; its size and digest."""
    return write_file(path, _chained(header_of(entries), buffers))


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries as they follow each other in a file: large elements first, so that every tensor is aligned."""
    return sorted(entries, key=lambda entry: -int(entry.source.dtype.itemsize))


def header_of(entries: Iterable[Entry]) -> bytes:
    """The start of the file that `write_tensors` writes."""
    return build_header([(e.key, e.dtype, e.shape, e.nbytes) for e in in_order(entries)], {"format": "pt"})


def _chained(first: bytes, rest: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    yield first
    yield from rest


def _hook_files(folder: Path) -> list[tuple[str, tuple[int, str]]]:
    """Make durable what the trainer's hook wrote; name within `folder`, then size and digest of each file."""
    found = []
    for path, folders, files in os.walk(folder):
        for name in sorted([*files, *(name for name in folders if (Path(path) / name).is_symlink())]):
            file = Path(path) / name
            if file.is_symlink():
                _replace_link(file)
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
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
