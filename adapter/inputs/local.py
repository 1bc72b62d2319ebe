"""Inputs that are on this machine already."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from ..exceptions import InputError
from .refs import PATTERN_CHARACTERS

__all__ = ["parquet_files", "readable_file"]


def parquet_files(text: str) -> list[Path]:
    """The Parquet files behind a path: the file, those of a folder, or those that a pattern matches, sorted by name.

    Raises:
        InputError: There is no such file, or none that can be read.
    """
    path = Path(text)
    if path.is_dir():
        found = sorted(path.rglob("*.parquet"))
        if not found:
            raise InputError(f"The folder {text!r} holds no *.parquet file.")
    elif not path.exists() and any(character in text for character in PATTERN_CHARACTERS):
        found = sorted(Path(match) for match in glob.glob(text, recursive=True))
        if not found:
            raise InputError(f"No file matches {text!r}.")
    else:
        found = [path]
    return [readable_file(file) for file in found]


def readable_file(path: Path) -> Path:
    """`path`, absolute.

    Raises:
        InputError: It is no file, or one that may not be read.
    """
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder. Expected a file.")
    if not path.exists():
        raise InputError(f"There is no file {str(path)!r}.")
    if not os.access(path, os.R_OK):
        raise InputError(f"The file {str(path)!r} may not be read by this user.")
    return path.absolute()
