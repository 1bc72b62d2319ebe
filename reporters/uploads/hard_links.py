"""Hard links to files that may be deleted before they are uploaded.

Lightning's ``ModelCheckpoint`` deletes what is no longer among the best without asking. A hard link in the spool keeps
the bytes at no cost until they have arrived.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...adapter.plumbing.durable import temporary_name

__all__ = ["HELD_DIRECTORY", "HardLinks", "hold", "release", "release_others"]

HELD_DIRECTORY = "held"


@dataclass(frozen=True)
class HardLinks:
    """Hard links to the files of an artifact, in its layout."""

    folder: Path
    origin: Path
    """What `folder` stands for."""

    def link_of(self, path: Path) -> Path:
        """The link, or the folder of links, that stands for `path`."""
        return self.folder / (path.relative_to(self.origin) if path.is_relative_to(self.origin) else path.name)


def hold(spool: Path, main: Path, files: Iterable[Path]) -> HardLinks:
    """Link every one of `files` into the spool; those beside `main` and below keep their layout.

    Raises:
        OSError: The file system has no hard links, or the spool is on another one.
    """
    held = HardLinks(spool / HELD_DIRECTORY / temporary_name(main.name).lstrip("."), main.parent)
    try:
        for file in dict.fromkeys(files):
            link = held.link_of(file)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(os.path.realpath(file), link)
    except OSError:
        shutil.rmtree(held.folder, ignore_errors=True)
        raise
    return held


def release(spool: Path, link: Path) -> None:
    """Drop `link` and all that were made with it; a path that is not below the spool's own folder of links stays."""
    folder = _folder_of(spool, link)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def release_others(spool: Path, wanted: Iterable[Path]) -> None:
    """Drop every link that was not made with one of `wanted`: a process may die between linking and enqueueing."""
    keep = {folder.name for link in wanted if (folder := _folder_of(spool, link)) is not None}
    try:
        names = os.listdir(spool / HELD_DIRECTORY)
    except FileNotFoundError:
        return
    for name in names:
        if name not in keep:
            shutil.rmtree(spool / HELD_DIRECTORY / name, ignore_errors=True)


def _folder_of(spool: Path, link: Path) -> Path | None:
    """The folder that was made with `link`; None for a path that the journal names and that is not a link of ours."""
    inside = Path(os.path.abspath(spool)) / HELD_DIRECTORY
    path = Path(os.path.abspath(link))
    return inside / path.relative_to(inside).parts[0] if inside in path.parents else None
