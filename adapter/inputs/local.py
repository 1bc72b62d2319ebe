"""Inputs that are on this machine already."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint.selection import find_checkpoint
from ..contract.exceptions import InputError
from ..plumbing.urls import PATTERN_CHARACTERS, looks_like_path
from .refs import Kind, LocalRef, Ref, parse_ref

__all__ = ["Found", "checked_ref", "local_checkpoint", "local_input", "parquet_files", "readable_file"]


@dataclass(frozen=True)
class Found:
    """A resolved reference: its path, and its name without credentials."""

    path: Path
    label: str


def checked_ref(kind: Kind, text: str) -> Ref:
    """The meaning of a reference, after a look at what it needs on this machine.

    Raises:
        InputError: It is malformed, or names files that are not there.
    """
    pattern = kind == "dataset" and looks_like_path(text) and any(c in text for c in PATTERN_CHARACTERS)
    ref = LocalRef(Path(text)) if pattern else parse_ref(text)
    if isinstance(ref, LocalRef):
        local_input(kind, ref)
    return ref


def local_input(kind: Kind, ref: LocalRef) -> Found:
    """An input that is here: a model's folder, a checkpoint's record, or Parquet files by file, folder or pattern.

    Raises:
        InputError: It cannot be used as what it is named for.
    """
    if kind == "checkpoint":
        return Found(local_checkpoint(ref.path), ref.label)
    if kind == "dataset":
        parquet_files(str(ref.path))
        return Found(ref.path, ref.label)
    return Found(ref.path if ref.path.is_dir() else readable_file(ref.path).parent, ref.label)


def local_checkpoint(path: Path) -> Path:
    """The record that `path` means: itself, the one of its name, or in a folder of checkpoints the newest.

    Raises:
        InputError: There is no record.
    """
    try:
        return find_checkpoint(path)
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; let this user read it") from error


def parquet_files(text: str) -> list[Path]:
    """The data files behind a path: the file, those of a folder, or those that a pattern matches, as the feed has it.

    Raises:
        InputError: There is no such file, or none that can be read.
    """
    from ..feed.files import expand  # loads pyarrow

    return [readable_file(Path(file.path)) for file in expand(text)]


def readable_file(path: Path) -> Path:
    """`path`, absolute.

    Raises:
        InputError: It is not a file, or may not be read.
    """
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder. Expected a file.")
    if not path.exists():
        raise InputError(f"There is no file {str(path)!r}.")
    if not os.access(path, os.R_OK):
        raise InputError(f"The file {str(path)!r} is not readable for this user.")
    return path.absolute()
