"""Checkpoints at a URL that fsspec opens, for a ``default_root_dir`` or ``dirpath`` of ``memory://`` or ``s3://``.

A checkpoint is made in a temporary folder of this machine and then copied, its record last; one that replaces another
of its name leaves that whole until its own record has taken the place. So what is there is whole or absent, as far as
the store keeps what it has acknowledged.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import fsspec

from .format.ckpt_file import CKPT_FILE_START, is_torch_file
from .format.layout import record_path
from .format.record import CheckpointRecord
from .format.record_file import read_record
from .saving import Prepared, write

__all__ = ["fetch", "is_remote", "local_directory", "local_text", "remove", "save"]


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a URL of something else than a local file."""
    return "://" in local_text(path)


def local_text(path: str | os.PathLike[str]) -> str:
    """`path` without the ``file:`` that fsspec, too, takes off; Lightning makes ``file:/a`` of ``file:///a``."""
    text = os.fspath(path)
    return text.removeprefix("file:").removeprefix("//") if text.startswith("file:/") else text


def local_directory(dirpath: str | os.PathLike[str]) -> Path:
    """`dirpath` as a path of a local file system.

    Raises:
        ValueError: It is a URL.
    """
    if is_remote(dirpath):
        raise ValueError(
            f"Invalid `dirpath`. Checkpoint writes to a local file system, from which a run resumes, but received "
            f"{os.fspath(dirpath)!r}. Name a local `dirpath`, and `uploads.targets` of a job, or `targets` of "
            "UploadArtifacts, for copies elsewhere."
        )
    return Path(local_text(dirpath))


def save(url: str, prepared: Prepared) -> None:
    """Write what `prepare` took apart to `url`.

    Raises:
        CheckpointError: The temporary folder has no space for it.
        OSError: The store refused it; the checkpoint that was there before still is.
    """
    store, place = fsspec.core.url_to_fs(url)
    folder = store._parent(place)
    with tempfile.TemporaryDirectory(prefix="genlight-") as scratch:
        local = record_path(Path(scratch, os.path.basename(place)))
        remote = f"{folder}/{local.name}"
        # With the older record beside it, the new one takes a folder of another name.
        replaced = _folders(_record_of(store, remote, local)) if store.exists(remote) else set()
        for name in replaced:
            (local.parent / name / "taken").mkdir(parents=True)
        record = write(local, prepared)
        for entry in record.files:
            target = f"{folder}/{entry.path}"
            store.makedirs(store._parent(target), exist_ok=True)
            store.put_file(str(local.parent / entry.path), target)
        store.put_file(str(local), remote)
        for name in replaced - _folders(record):
            _remove_tree(store, f"{folder}/{name}")


def fetch(url: str, scratch: Path) -> Path:
    """Copy the checkpoint at `url` into `scratch`, without proving it; returns its record, or a file of torch.

    Raises:
        FileNotFoundError: There is none.
        BrokenCheckpointError: Its record cannot be read.
    """
    store, place = fsspec.core.url_to_fs(url)
    local = record_path(scratch / os.path.basename(place))
    remote = f"{store._parent(place)}/{local.name}"
    if not store.exists(remote):
        raise FileNotFoundError(f"there is no checkpoint at {url}")
    store.get_file(remote, str(local))
    if _is_of_torch(local):
        return local
    for entry in read_record(local).files:
        target = local.parent / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(f"{store._parent(place)}/{entry.path}", str(target))
    return local


def remove(url: str) -> None:
    """Remove the checkpoint at `url`, its record first; a file or folder of another format as a whole."""
    store, place = fsspec.core.url_to_fs(url)
    folder = store._parent(place)
    with tempfile.TemporaryDirectory(prefix="genlight-") as scratch:
        local = record_path(Path(scratch, os.path.basename(place)))
        remote = f"{folder}/{local.name}"
        if not store.isfile(remote):
            _remove_tree(store, place)
            return
        store.get_file(remote, str(local))
        folders = set() if _is_of_torch(local) else _folders(read_record(local))
        store.rm_file(remote)
        for name in folders:
            _remove_tree(store, f"{folder}/{name}")


def _is_of_torch(path: Path) -> bool:
    with path.open("rb") as file:
        return is_torch_file(file.read(CKPT_FILE_START))


def _record_of(store: Any, remote: str, local: Path) -> CheckpointRecord:
    store.get_file(remote, str(local))
    return read_record(local)


def _folders(record: CheckpointRecord) -> set[str]:
    return {Path(entry.path).parts[0] for entry in record.files}


def _remove_tree(store: Any, path: str) -> None:
    if store.exists(path):
        store.rm(path, recursive=True)
