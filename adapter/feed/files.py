"""Where Parquet and Arrow files lie: local paths, folders, patterns, and URLs of any file system.

A plain path is local. A URL goes to the file system that Arrow has for it (``s3://``, ``gs://``, ``hdfs://``), else to
the one that fsspec has (``hf://``, ``memory://``, ``az://``, …).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import fs

from ..exceptions import InputError

__all__ = ["DataFile", "PathLike", "expand"]

PathLike: TypeAlias = str | os.PathLike[str]

_ARROW_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class DataFile:
    """One file, as the user named it and as its file system knows it."""

    name: str
    filesystem: fs.FileSystem
    path: str

    @property
    def local(self) -> bool:
        """Whether looking at the file costs no network access."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def stamp(self) -> tuple[int, int]:
        """Size in bytes and modification time in ns, to see whether the file changed.

        Raises:
            InputError: There is no such file.
        """
        info = self.filesystem.get_file_info(self.path)
        if info.type != fs.FileType.File:
            kind = "is a folder" if info.type == fs.FileType.Directory else "does not exist"
            raise InputError(f"{self.name} {kind}")
        return info.size or 0, info.mtime_ns or 0


def expand(
    paths: PathLike | Iterable[PathLike], *, filesystem: Any = None, suffixes: Sequence[str] = (".parquet",)
) -> list[DataFile]:
    """The files behind `paths`: a folder stands for the files in it with one of `suffixes`, a pattern for its matches.

    Folders and patterns come sorted by path, so that every rank sees the same order. A path that does not exist is
    returned as it is; reading its metadata tells.

    Args:
        paths: One or many paths or URLs.
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system that all paths belong to; None finds it from each.
        suffixes: What counts as data in a folder.

    Raises:
        InputError: No path was given, a pattern or folder matches nothing, or nobody knows the URL's scheme.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise InputError("No data files: `parquet_paths` is empty.")
    return [file for path in given for file in _expand_one(os.fspath(path), filesystem, suffixes)]


def _expand_one(name: str, filesystem: Any, suffixes: Sequence[str]) -> list[DataFile]:
    system, path = _locate(name, filesystem)
    if _PATTERN & set(path) and system.get_file_info(path).type == fs.FileType.NotFound:
        found = _matches(system, path)
    elif system.get_file_info(path).type == fs.FileType.Directory:
        selector = fs.FileSelector(path, recursive=True)
        found = [i.path for i in system.get_file_info(selector) if i.type == fs.FileType.File]
        found = sorted(p for p in found if p.endswith(tuple(suffixes)))
    else:
        return [DataFile(name, system, path)]
    if not found:
        raise InputError(f"{name} matches no file that ends in {' or '.join(suffixes)}")
    return [DataFile(p if isinstance(system, fs.LocalFileSystem) else _renamed(name, p), system, p) for p in found]


def _renamed(name: str, path: str) -> str:
    scheme, separator, _ = name.partition("://")
    return f"{scheme}://{path.lstrip('/')}" if separator else path


def _matches(system: fs.FileSystem, pattern: str) -> list[str]:
    from fsspec.implementations.arrow import ArrowFSWrapper

    handler = getattr(system, "handler", None)
    wrapped = handler.fs if isinstance(handler, fs.FSSpecHandler) else ArrowFSWrapper(system)
    return sorted(str(path) for path in wrapped.glob(pattern))


def _locate(name: str, filesystem: Any) -> tuple[fs.FileSystem, str]:
    if filesystem is not None:
        system = filesystem if isinstance(filesystem, fs.FileSystem) else fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        return system, name
    scheme, separator, rest = name.partition("://")
    if not separator:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(name))
    if scheme == "file":
        return fs.LocalFileSystem(), rest
    try:
        if scheme in _ARROW_SCHEMES:
            system, path = fs.FileSystem.from_uri(name)
            return system, path
        return _locate_with_fsspec(name)
    except (ImportError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{name}: no file system for {scheme}:// ({error})") from error


def _locate_with_fsspec(name: str) -> tuple[fs.FileSystem, str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(name)
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path
