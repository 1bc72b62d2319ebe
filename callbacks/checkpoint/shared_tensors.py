"""Tensors that training does not change: found by their bytes, written once, and shared by every later checkpoint.

What a tensor is said to be (``requires_grad``, a buffer) decides no more than whether it is looked at. At the start of
training and at each save its bytes are compared, by a digest, with those of the look before. A tensor that is as it was
goes into a file for several checkpoints, which each later one takes over for as long as every tensor in it still has
the bytes that the file holds. A tensor that changes leaves the file at that save: the others of its file are written
anew without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import xxhash

from ...adapter.contract.exceptions import BrokenCheckpointError
from ..finite import are_finite
from .base_weights import describe, is_describable
from .codec.tensor_bytes import bytes_of
from .codec.tensor_digest import content_digests
from .codec.tensor_table import Entry
from .format.contents import read_header
from .format.layout import MODEL_FILE, SHARED_FOLDER, shared_digest, shared_name
from .format.record import CheckpointRecord, FileEntry, LeftOut
from .selection import list_checkpoints
from .storage.commit import Staging
from .storage.shared_files import Identity, has_links, identity_of, is_whole, link, put_beside, remove_if_empty
from .storage.tensor_files import header_of, in_order, write_tensors

__all__ = ["Division", "NewFile", "SharedFile", "SharedTensors", "keep_file", "write_shared"]

log = logging.getLogger(__name__)

LEAST_BYTES = 4096
"""Fewer bytes are written again: a file, a folder and a link take as much."""
LARGEST_FILE = 512 << 20
"""Bytes of tensors in one file, which is what is written again when one of them begins to change."""

_Look = tuple[str, tuple[int, ...], str]
"""Element type, shape and digest of the bytes of a tensor, when it was looked at."""


@dataclass(frozen=True)
class SharedFile:
    """A file of a durable checkpoint whose tensors the next one may share."""

    size: int
    xxh3_128: str
    looks: Mapping[str, _Look]
    """What it holds, by key."""
    nonfinite: frozenset[str]
    """Which of that is not finite."""
    path: Path
    identity: Identity
    is_beside: bool
    """Whether it lies beside the records, for want of hard links."""

    @property
    def name(self) -> str:
        """Its path within a data folder, or beside the records."""
        return shared_name(self.xxh3_128, MODEL_FILE)


@dataclass(eq=False)
class NewFile:
    """Tensors that were found unchanged and lie in no shared file yet."""

    entries: list[Entry]
    looks: Mapping[str, _Look]
    earlier: Mapping[str, Path] = field(default_factory=dict)
    """Files of earlier attempts by digest, one of which may hold just these."""
    written: FileEntry | None = None
    is_beside: bool = False
    nonfinite: frozenset[str] = frozenset()

    def copied(self) -> NewFile:
        """The same with values as of now, in memory of its own: it is written once, and no buffer kept for it."""
        copies = [replace(entry, source=entry.source.detach().to("cpu", copy=True)) for entry in self.entries]
        return replace(self, entries=copies)


@dataclass(frozen=True)
class _Earlier:
    """A shared file of a checkpoint that an earlier attempt wrote."""

    keys: tuple[str, ...]
    path: Path


@dataclass(frozen=True)
class Division:
    """Where the tensors of a checkpoint go."""

    own: list[Entry]
    """For this checkpoint alone."""
    kept: list[SharedFile]
    """Files to take over."""
    new_files: list[NewFile]
    """Files to write for several checkpoints."""
    left_out: list[LeftOut]


class SharedTensors:
    """What is known of the tensors of one directory's checkpoints; belongs to the training thread and its writer."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}
        self._files: list[SharedFile] = []
        self._earlier: dict[str, _Earlier] = {}
        self._base: dict[str, tuple[_Look, LeftOut]] = {}
        self.nonfinite_base: frozenset[str] = frozenset()
        """Which tensors that may be left out are not finite."""

    def look(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Look at `tensors` for the first time, and for shared files of earlier attempts in `directory`."""
        self._looks = _looks_at(_plain(tensors))
        self._earlier = _earlier_files(directory)

    def leave_out(self, tensors: Mapping[str, torch.Tensor], base: Mapping[str, LeftOut] | None) -> None:
        """Leave out of checkpoints what of `tensors`, now and at the save, is as in `base`; None means as it is now."""
        plain = _plain(tensors)
        described = {key: describe(key, tensor) for key, tensor in plain.items()}
        equal = {key: left for key, left in described.items() if base is None or base.get(key) == left}
        self._base = {key: (self._looks[key], left) for key, left in equal.items()}
        if not are_finite([plain[key] for key in equal]):
            self.nonfinite_base = frozenset(key for key in equal if not are_finite([plain[key]]))

    def divide(self, entries: Sequence[Entry], trained: frozenset[str], keep: Callable[[SharedFile], bool]) -> Division:
        """Where `entries` go.

        Args:
            entries: What the checkpoint is to hold, with its values of now.
            trained: Keys of the model's tensors that training is said to change.
            keep: Takes a file over into the checkpoint; False where it is gone, so that it is written again.
        """
        known = {key for file in self._files for key in file.looks}
        asked = {e.key: e for e in entries if e.file == MODEL_FILE and (e.key not in trained or e.key in known)}
        looks = _looks_at({key: entry.source for key, entry in asked.items()})
        left_out = [left for key, (look, left) in self._base.items() if looks.get(key) == look]
        kept = [
            file
            for file in self._files
            if all(looks.get(key) == look for key, look in file.looks.items()) and keep(file)
        ]
        taken = {key for file in kept for key in file.looks} | {left.key for left in left_out}
        # What was not looked at before has just been frozen: the next look tells whether that is true.
        before = looks | self._looks
        unchanged = {key: e for key, e in asked.items() if key not in taken and looks[key] == before[key]}
        self._looks = looks
        if sum(entry.nbytes for entry in unchanged.values()) < LEAST_BYTES:
            unchanged = {}
        earlier = {digest: file.path for digest, file in self._earlier.items()}
        new = [
            NewFile(group, {entry.key: looks[entry.key] for entry in group}, earlier)
            for group in self._grouped(unchanged)
        ]
        own = [e for e in entries if e.file != MODEL_FILE or (e.key not in taken and e.key not in unchanged)]
        return Division(own, kept, new, left_out)

    def learn(self, record: CheckpointRecord, kept: Iterable[SharedFile], new: Iterable[NewFile]) -> None:
        """Take note of the files of `record`, which is durable: the next checkpoint shares them."""
        self._earlier = {}
        entries = {record.file_name(entry): entry for entry in record.files}
        self._files = []
        for file in kept:
            path = record.path.parent / entries[file.name].path
            self._files.append(replace(file, path=path))
        for group in new:
            assert group.written is not None
            path = record.path.parent / entries[group.written.path].path
            identity = identity_of(path)
            if identity is not None:
                facts = (group.written.size, group.written.xxh3_128, group.looks, group.nonfinite)
                self._files.append(SharedFile(*facts, path, identity, group.is_beside))

    def _grouped(self, entries: Mapping[str, Entry]) -> list[list[Entry]]:
        """In files of bounded size; as an earlier attempt had them, where those hold nothing else."""
        left, groups, size = dict(entries), list[list[Entry]](), LARGEST_FILE
        for file in self._earlier.values():
            if left.keys() >= set(file.keys):
                groups += [[left.pop(key) for key in file.keys]]
        for entry in left.values():
            if size + entry.nbytes > LARGEST_FILE:
                groups.append([])
                size = 0
            groups[-1].append(entry)
            size += entry.nbytes
        return groups


def keep_file(file: SharedFile, staging: Staging) -> bool:
    """Take `file` over into a checkpoint that is being made, at once, while it is there for certain."""
    if file.is_beside:
        staging.claim(file.path)
        return identity_of(file.path) == file.identity
    return link(file.path, staging.path / file.name, file.identity)


def write_shared(staging: Staging, group: NewFile) -> FileEntry:
    """Write a file for several checkpoints, into the staged folder or beside the records, and say in `group` how.

    One that an earlier attempt wrote with the same bytes is taken over.
    """
    if not are_finite([entry.source for entry in group.entries]):
        group.nonfinite = frozenset(entry.key for entry in group.entries if not are_finite([entry.source]))
    directory = staging.record.parent
    size, digest = _hash(group.entries) if group.earlier else (0, "")
    found = group.earlier.get(digest)
    if found is not None and is_whole(found, size, digest):
        group.written = FileEntry(shared_name(digest, MODEL_FILE), size, digest)
        group.is_beside = found == directory / group.written.path
        if group.is_beside:
            staging.claim(found)
        identity = identity_of(found)
        if group.is_beside or (identity and link(found, staging.path / group.written.path, identity)):
            return group.written
    folder = staging.folder(SHARED_FOLDER) / "new"
    folder.mkdir()
    part = folder / MODEL_FILE
    size, digest = write_tensors(part, group.entries, (bytes_of(e.source) for e in in_order(group.entries)))
    group.written = FileEntry(shared_name(digest, MODEL_FILE), size, digest)
    group.is_beside = not has_links(part)
    if not group.is_beside:
        folder.rename(folder.with_name(digest))
        return group.written
    staging.claim(directory / group.written.path)
    put_beside(part, directory, digest)
    remove_if_empty(folder)
    remove_if_empty(folder.parent)
    return group.written


def _hash(entries: Sequence[Entry]) -> tuple[int, str]:
    """Size and digest of the file that `write_tensors` would write."""
    header = header_of(entries)
    hasher, size = xxhash.xxh3_128(header), len(header)
    for entry in in_order(entries):
        data = bytes_of(entry.source)
        hasher.update(data)
        size += len(data)
    return size, hasher.hexdigest()


def _looks_at(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Look]:
    digests = content_digests(list(tensors.values()))
    return {
        key: (str(tensor.dtype), tuple(tensor.shape), digest)
        for (key, tensor), digest in zip(tensors.items(), digests, strict=True)
    }


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach() for key, tensor in tensors.items() if is_describable(tensor)}


def _earlier_files(directory: Path) -> dict[str, _Earlier]:
    """By digest, the shared files of the newest checkpoint in `directory` that has such."""
    for listed in reversed(list_checkpoints(directory)):
        if listed.record is None:
            continue
        record = listed.record
        found = {}
        for entry in record.files:
            if shared_digest(record.file_name(entry)) is None:
                continue
            try:
                found[entry.xxh3_128] = _Earlier(tuple(read_header(record, entry)), record.path.parent / entry.path)
            except (BrokenCheckpointError, OSError) as error:
                log.debug("not shared with an earlier attempt: %s", error)
        if found:
            return found
    return {}
