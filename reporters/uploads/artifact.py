"""The files of one checkpoint or sample, as the queue remembers them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...adapter.contract.exceptions import UploadError
from .payloads import Kind

__all__ = ["Artifact", "ArtifactFile", "files_in", "layout_of", "pack", "stored_path", "files_outside"]


@dataclass(frozen=True)
class ArtifactFile:
    """One file of an artifact."""

    path: str
    """Where it lies (relative to the run's folder where it is inside)."""
    name: str
    """Its name in a file store, after the prefix that names the step; slashes become underscores there."""
    layout: str
    """Its path relative to the artifact's main file, for targets that keep folders."""
    size_bytes: int
    mtime_ns: int

    def location(self, root: Path) -> Path:
        """Where the file lies, the run's folder being at `root`."""
        return root / self.path

    def is_unchanged(self, root: Path) -> bool:
        """Whether the file still has the size and time that it was queued with."""
        try:
            found = os.stat(self.location(root))
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


@dataclass(frozen=True)
class Artifact:
    """The files of one upload; the one that makes the others count (a checkpoint's record) comes last."""

    local_path: str
    """The path that is reported (relative to the run's folder where it is inside)."""
    files: tuple[ArtifactFile, ...]
    subject: int | None
    """Index of the file that the message describes; None where it is a directory."""
    subject_bytes: int
    """Size of what the message describes."""
    main: str
    """The commit record, sample or only file, by the path with which it was queued."""
    final: bool = False

    def __post_init__(self) -> None:
        """Refuse what no process of ours can have queued: a layout, say, that leads out of its folder."""
        if not self.files or not (self.subject is None or 0 <= self.subject < len(self.files)):
            raise ValueError("it does not say which file it is about")
        for file in self.files:
            if not _is_inside(file.layout):
                raise ValueError(f"its layout {file.layout!r} leads out of its folder")
            if "\0" in file.path:
                raise ValueError(f"{file.path!r} is not a path")

    def is_same(self, other: Artifact) -> bool:
        """Whether `other` is about the same files, which may be held by other links."""

        def identity(artifact: Artifact) -> tuple[object, ...]:
            files = [(file.name, file.layout, file.size_bytes, file.mtime_ns) for file in artifact.files]
            return artifact.local_path, artifact.main, artifact.final, files

        return identity(self) == identity(other)


def files_outside(artifact: Artifact, root: Path, roots: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files of an artifact that lie neither in the run's folder at `root` nor in one of `roots`, links followed.

    A journal may have come with a folder from elsewhere. What it names there must not leave this machine.
    """
    allowed = [os.path.realpath(folder) for folder in (root, *roots)]
    places = {file.path: Path(os.path.realpath(file.location(root))) for file in artifact.files}
    return [path for path, place in places.items() if not any(place.is_relative_to(folder) for folder in allowed)]


def _is_inside(layout: str) -> bool:
    path = PurePosixPath(layout)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in layout


def pack(
    root: Path,
    main: str | os.PathLike[str],
    files: Iterable[str | os.PathLike[str]],
    *,
    kind: Kind = "checkpoint",
    primary: str | os.PathLike[str] | None = None,
    final: bool = False,
    links: Path | None = None,
) -> Artifact:
    """Look at the files of an artifact and put them in order.

    Args:
        root: The run's folder; paths inside it are remembered relative to it.
        main: The commit record of a checkpoint, the JSON of a sample, or the only file.
        files: The files that belong to it; a directory stands for all files in it.
        kind: Whether it is a checkpoint or a sample.
        primary: The path that the message describes instead of `main`; a file or a directory.
        final: Whether this is the end of the run.
        links: A folder with links to the files, in their layout, from which they are sent.

    Raises:
        UploadError: A file does not exist, or two would have the same name in a store.
    """
    main_path = Path(os.path.abspath(main))
    subject_path = Path(os.path.abspath(primary)) if primary is not None else main_path
    ordered = _in_order(main_path, files, subject_path)
    packed = tuple(_look_at(path, root, main_path, kind, links) for path in ordered)
    _refuse_same_names(packed)
    size = sum(file.size_bytes for path, file in zip(ordered, packed, strict=True) if path.is_relative_to(subject_path))
    subject = None if subject_path.is_dir() else ordered.index(subject_path)
    return Artifact(stored_path(subject_path, root), packed, subject, size, stored_path(main_path, root), final)


def stored_path(path: str | os.PathLike[str], root: Path) -> str:
    """`path` as the queue remembers it: relative to `root` when inside, else absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)


def _in_order(main: Path, files: Iterable[str | os.PathLike[str]], subject: Path) -> list[Path]:
    """Every file once: the given ones, the subject's, and `main` last."""
    found: dict[Path, None] = {}
    for given in (*files, subject):
        found.update(dict.fromkeys(files_in(given)))
    last = list(files_in(main))
    return [path for path in found if path not in last] + last


def files_in(given: str | os.PathLike[str]) -> Iterator[Path]:
    """`given`, or all files in it where it is a directory, as absolute paths in a stable order."""
    path = Path(os.path.abspath(given))
    if not path.is_dir():
        yield path
        return
    for top, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(top, name) for name in sorted(names))


def layout_of(path: Path, main: Path) -> Path:
    """The path of a file relative to the folder of `main`; its name where it lies elsewhere."""
    return path.relative_to(main.parent) if path.is_relative_to(main.parent) else Path(path.name)


def _look_at(path: Path, root: Path, main: Path, kind: Kind, links: Path | None) -> ArtifactFile:
    layout = layout_of(path, main)
    source = path if links is None else links / layout
    try:
        found = os.stat(source)
    except OSError as error:
        raise UploadError(f"{path} cannot be uploaded: {error.strerror}") from error
    name = _name_within(layout, main, kind)
    return ArtifactFile(stored_path(source, root), name, layout.as_posix(), found.st_size, found.st_mtime_ns)


def _name_within(layout: Path, main: Path, kind: Kind) -> str:
    """``trainer/lora.safetensors`` for ``step-00000200/trainer/lora.safetensors``.

    The folder of a checkpoint says no more than the step and the record's name; a step may have several samples, whose
    folders distinguish them.
    """
    folder = layout.parts[0]
    is_own_folder = len(layout.parts) > 1 and folder.partition("~")[0] in (main.stem, main.name)
    return Path(*layout.parts[1:]).as_posix() if is_own_folder and kind == "checkpoint" else layout.as_posix()


def _refuse_same_names(files: Sequence[ArtifactFile]) -> None:
    taken: dict[str, str] = {}
    for file in files:
        other = taken.setdefault(file.name.replace("/", "_"), file.path)
        if other != file.path:
            raise UploadError(
                f"{other} and {file.path} would have the same name in the file store; rename one of them."
            )
