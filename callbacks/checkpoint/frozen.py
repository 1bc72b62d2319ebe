"""Frozen weights: written once in a run and shared by its checkpoints, or omitted.

They are the parameters that require no gradient and that no optimizer holds at the start of training. Each later
checkpoint has a hard link to their file, so that its folder is self-contained: it can be removed, copied or moved
independently of the others. On a file system without hard links they are written with every checkpoint. With
``weights="trained"`` they are omitted while they are as the class has built them. The record then has the digest of
their bytes, and a resume takes them from the module only if they have the same digest there.

At each save their bytes are compared with the bytes at the start of training. Torch's version counters would miss
writes through ``tensor.data``, with which many classes move their averaged copy of the weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from ..finite import are_finite
from ..optimizer_state import parameters_of
from .codec.tensors import Entry, bytes_of, content_digests, entry_of, is_plain, tensor_files
from .format.record import FROZEN_FILE, MODEL_FILE, CheckpointRecord, LeftOut, digest_of


@dataclass(frozen=True)
class FrozenFile:
    """A durable file of frozen tensors that later checkpoints link to."""

    keys: frozenset[str]
    size: int
    xxh3_128: str
    path: Path
    identity: tuple[int, int, int]
    """The file's `_identity_of` when it became durable: inode, size and time of change."""


_LEAST_BYTES = 4096
"""Fewer bytes than this are written with every checkpoint: a separate file and its links would cost as much."""


def frozen_in(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return by name the finite parameters of `module` that require no gradient and that no optimizer holds."""
    held = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
    parameters = module.named_parameters(remove_duplicate=False)
    frozen: dict[str, torch.Tensor] = {
        name: p for name, p in parameters if not p.requires_grad and id(p) not in held and is_plain(p)
    }
    is_worth_it = sum(p.nbytes for p in frozen.values()) >= _LEAST_BYTES
    return frozen if is_worth_it and are_finite([p.detach() for p in frozen.values()]) else {}


def describe_omitted(tensors: Mapping[str, torch.Tensor]) -> dict[str, LeftOut]:
    """Return a record's descriptions of omitted tensors. Tensors of which this process has only a part are skipped."""
    return {
        key: LeftOut(key, *entry_of(MODEL_FILE, key, tensor).stored_as, digest_of(bytes_of(tensor.detach())))
        for key, tensor in tensors.items()
        if is_plain(tensor)
    }


class Frozen:
    """The frozen weights of a training, from one checkpoint to the next.

    Args:
        tensors: The result of `frozen_in` at the start.
        leaves_out: Whether checkpoints omit weights that are unchanged since the class built them.
        loaded: The checkpoint that the training resumes from. Only the weights that it omits are known to be as the
            class built them. Later checkpoints share its file of frozen weights if the bytes are the same.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, leaves_out: bool = False, loaded: CheckpointRecord | None = None
    ) -> None:
        self._digests = dict(zip(tensors, content_digests(list(tensors.values())), strict=True))
        self._left_out = describe_omitted(tensors) if leaves_out else {}
        self._file: FrozenFile | None = None
        if loaded is not None:
            built = set(loaded.left_out)
            self._left_out = {key: left for key, left in self._left_out.items() if left in built}
            stored = {key: tensor for key, tensor in tensors.items() if key not in self._left_out}
            file = _file_of(loaded, frozenset(stored))
            self._file = file if file is not None and _has_the_bytes(file, stored) else None

    def divide(
        self, entries: Sequence[Entry], sources: Sequence[torch.Tensor], folder: Path
    ) -> tuple[list[Entry], list[torch.Tensor], FrozenFile | None, list[LeftOut]]:
        """Separate the frozen weights of a checkpoint: omitted, linked from the last checkpoint, or in a separate file.

        Args:
            entries: The tensors of the checkpoint.
            sources: Their values.
            folder: The folder in which it is made; gets the link.

        Returns:
            The tensors to write, their values, the linked file, and descriptions of the omitted tensors.
        """
        if not self._digests:
            return list(entries), list(sources), None, []
        tensors = list(zip(entries, sources, strict=True))
        present = {e.key: source for e, source in tensors if e.file == MODEL_FILE and e.key in self._digests}
        digests = content_digests(list(present.values()))
        same = {key for key, digest in zip(present, digests, strict=True) if digest == self._digests[key]}
        left_out = [left for key, left in self._left_out.items() if key in same]
        keys = frozenset(same - self._left_out.keys())
        linked = None
        if self._file is not None and keys == self._file.keys:
            # Link at once, while the file certainly exists.
            linked = self._file if _link(self._file, folder / FROZEN_FILE) else None
        gone = same if linked is not None else same - keys
        written = [(e, source) for e, source in tensors if e.file != MODEL_FILE or e.key not in gone]
        facts = [replace(e, file=FROZEN_FILE) if e.file == MODEL_FILE and e.key in keys else e for e, _ in written]
        return facts, [source for _, source in written], linked, left_out

    def learn(self, record: CheckpointRecord, written: Iterable[Entry], linked: FrozenFile | None) -> None:
        """Have the next checkpoint link to the frozen weights of the durable `record`.

        Args:
            record: The checkpoint.
            written: The tensors in its files, as `divide` has returned them.
            linked: The linked file, as `divide` has returned it.
        """
        keys = frozenset(entry.key for entry in written if entry.file == FROZEN_FILE)
        self._file = _file_of(record, keys if linked is None else linked.keys)


def _link(file: FrozenFile, target: Path) -> bool:
    """Make `target` a hard link to `file`; return False if that fails, so that the file is written again."""
    with contextlib.suppress(OSError):  # the file is gone; links are not supported, too many, or not permitted
        os.link(file.path, target, follow_symlinks=False)
        if _identity_of(target) == file.identity:
            return True
        os.unlink(target)
    return False


def _file_of(record: CheckpointRecord, keys: frozenset[str]) -> FrozenFile | None:
    entry = next((entry for entry in record.files if record.file_name(entry) == FROZEN_FILE), None)
    path = record.path.parent / (entry.path if entry else "")
    if entry is None or not path.is_file():
        return None
    return FrozenFile(keys, entry.size, entry.xxh3_128, path, _identity_of(path))


def _identity_of(path: Path) -> tuple[int, int, int]:
    """Return inode, bytes and time of change; they differ after a file was replaced or written to."""
    status = os.lstat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_the_bytes(file: FrozenFile, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether writing `tensors` would give the same bytes as `file`, whose digest was proven at the load."""
    hasher = xxhash.xxh3_128()
    sources = [tensor.detach() for tensor in tensors.values()]
    for content in tensor_files([entry_of(FROZEN_FILE, *item) for item in zip(tensors, sources, strict=True)], sources):
        hasher.update(content.header)
        for piece in content.pieces():
            hasher.update(piece)
    return hasher.hexdigest() == file.xxh3_128
