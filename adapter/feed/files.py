"""Find Parquet files by local paths, folders, patterns, and URLs of any file system.

A plain path is local, and so is a ``file:`` URL, in which ``%20`` means a blank. Any other URL is opened by Arrow if it
has a file system for the scheme (``s3://``, ``gs://``, ``hdfs://``), otherwise by fsspec (``hf://``, ``memory://``,
``az://``, …).

Names in a folder that begin with a dot or an underscore are not data, as in Spark, Hive and Arrow: ``_SUCCESS``,
``_temporary``, ``._part-0.parquet``.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import fs

from ..contract.exceptions import InputError
from ..plumbing.text import HUB_LOGIN, closest
from ..plumbing.urls import PATTERN_CHARACTERS, path_of_url

PathLike: TypeAlias = str | os.PathLike[str]

DATA_SUFFIXES = (".parquet", ".parq")
_ARROW_SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")


@dataclass(frozen=True)
class DataFile:
    """A file: the user's name for it, its file system, and its path there."""

    name: str
    filesystem: fs.FileSystem
    path: str

    @property
    def local(self) -> bool:
        """Whether the file can be checked without network access."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def stamp(self) -> tuple[int, int]:
        """Return size in bytes and modification time in ns, which show whether the file has changed.

        Raises:
            InputError: The file does not exist or is not a regular file.
        """
        info = self.filesystem.get_file_info(self.path)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"{self.name} does not exist{self._nearest() if self.local else _hub_hint(self.name)}")
        if info.type != fs.FileType.File:
            raise InputError(f"{self.name} is not a regular file")
        return info.size or 0, info.mtime_ns or 0

    def require(self, stamp: tuple[int, int], label: str) -> None:
        """Check that a local file still has this `stamp`; remote files are not checked.

        Raises:
            InputError: It has changed or is gone; the message begins with `label`.
        """
        try:
            changed = self.local and self.stamp() != stamp
        except InputError as error:
            raise InputError(f"Cannot read {label}: {error}") from error
        if changed:
            raise InputError(f"Cannot read {label}: the file changed while it was read; start again with the new file")

    def _nearest(self) -> str:
        folder, name = os.path.split(self.path)
        with contextlib.suppress(OSError):
            near = closest(name, os.listdir(folder), alike=0.6)
            return f"; did you mean {near!r}?" if near else ""
        return f"; there is no folder {folder}"


def expand(paths: PathLike | Iterable[PathLike], *, filesystem: Any = None) -> list[DataFile]:
    """Return the files for `paths`: all Parquet files in a folder, and all matches of a pattern.

    The files of a folder or pattern are sorted by path, so that every rank sees the same order. A path that does not
    exist is returned unchanged; reading its metadata will fail.

    Args:
        paths: One or many paths or URLs.
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system of all paths; None finds it from each path.

    Raises:
        InputError: No path was given, a pattern or folder matches nothing, or the scheme of the URL is unknown.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise InputError("No data files: `parquet_paths` is empty.")
    return [file for path in given for file in _expand_one(os.fspath(path), filesystem)]


def _expand_one(name: str, filesystem: Any) -> list[DataFile]:
    """Return the files for one path, folder, pattern or URL."""
    with _name_in_errors(name):
        system, path = _locate(name, filesystem)
        if set(PATTERN_CHARACTERS) & set(path) and system.get_file_info(path).type == fs.FileType.NotFound:
            matches = _matches(system, path)
            found = [p for match, folder in matches for p in (_data_in(system, match) if folder else [match])]
        elif system.get_file_info(path).type == fs.FileType.Directory:
            found = _data_in(system, path)
        else:
            return [DataFile(name, system, path)]
    if not found:
        raise InputError(f"{name} matches no file that ends in {' or '.join(DATA_SUFFIXES)}")
    local = isinstance(system, fs.LocalFileSystem)
    return [DataFile(p if local else _rename(name, p), system, p) for p in found]


@contextlib.contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    """Turn every error of a file system, whatever its type, into an `InputError` that names `name`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        hint, shown = _hub_hint(name), os.fsencode(name).decode("utf-8", "replace")
        text = str(error).partition("\n")[0] if hint else str(error)
        raise InputError(f"{shown}: {type(error).__name__}: {text}{hint}") from error


def _hub_hint(name: str) -> str:
    """Return a hint if `name` is on the Hugging Face hub, which hides files that a user may not read."""
    return f"; or it may not be read: {HUB_LOGIN}" if name.startswith("hf://") else ""


def _rename(name: str, path: str) -> str:
    scheme, separator, _ = name.partition("://")
    return f"{scheme}://{path.lstrip('/')}" if separator else path


def _data_in(system: fs.FileSystem, folder: str) -> list[str]:
    infos = system.get_file_info(fs.FileSelector(folder, recursive=True))
    files = [info.path for info in infos if info.type == fs.FileType.File and info.path.endswith(DATA_SUFFIXES)]
    return sorted(path for path in files if not _is_hidden(path.removeprefix(folder)))


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _matches(system: fs.FileSystem, pattern: str) -> list[tuple[str, bool]]:
    """Return each match, and whether it is a folder."""
    if isinstance(system, fs.LocalFileSystem):
        return [(path, os.path.isdir(path)) for path in sorted(glob.glob(pattern, recursive=True))]
    from fsspec.implementations.arrow import ArrowFSWrapper

    found = ArrowFSWrapper(system).glob(pattern, detail=True)
    return sorted((str(path), info["type"] == "directory") for path, info in found.items())


def _locate(name: str, filesystem: Any) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URL, and the path in it."""
    if filesystem is not None:
        system = filesystem if isinstance(filesystem, fs.FileSystem) else fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        return system, name
    if name[:5].lower() == "file:":
        try:
            return fs.LocalFileSystem(), path_of_url(name)
        except ValueError as error:
            raise InputError(f"{name}: {error}") from None
    scheme, separator, _ = name.partition("://")
    if not separator:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(name))
    try:
        if scheme in _ARROW_SCHEMES:
            system, path = fs.FileSystem.from_uri(name)
            return system, path
        from fsspec.core import url_to_fs

        found, path = url_to_fs(name)
        return fs.PyFileSystem(fs.FSSpecHandler(found)), path
    except (ImportError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{name}: no file system for {scheme}:// ({error})") from error
