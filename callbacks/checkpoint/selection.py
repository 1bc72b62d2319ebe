"""Which checkpoint of a directory to resume from.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...adapter.contract.exceptions import BrokenCheckpointError
from .format.contents import check_contents
from .format.layout import (
    FINAL_NAME,
    RECORD_SUFFIXES,
    is_record_of_callback,
    is_temporary,
    name_of,
    record_path,
    record_paths,
    step_of_name,
)
from .format.record import CheckpointRecord
from .format.record_file import read_record
from .format.verification import verify_files
from .ownership import is_checkpoint_file
from .scores import read_scores, with_scores

__all__ = ["Listed", "find_checkpoint", "find_final", "folder_of_checkpoints", "list_checkpoints", "newest_valid"]

log = logging.getLogger(__name__)

MOST_WARNINGS = 10
"""How many broken checkpoints are told of one by one."""

FALLS_BACK = "; falling back to the one before it"
"""How the warning of a broken checkpoint ends."""


@dataclass(frozen=True)
class Listed:
    """A file that has the name of a record: the parsed record, or why it is broken."""

    path: Path
    record: CheckpointRecord | None
    problem: str = ""
    error: OSError | None = None
    """Why it cannot be told whether it is broken: this user may not read it, for example."""


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Listed]:
    """Every record in `directory`, oldest step first, with scores that came later; files are not proven."""
    found = []
    scores = read_scores(directory)
    for path in record_paths(directory):
        try:
            found.append(Listed(path, with_scores(read_record(path), scores)))
        except BrokenCheckpointError as error:
            found.append(Listed(path, None, error.reason))
        except FileNotFoundError:
            continue
        except OSError as error:
            found.append(Listed(path, None, f"it cannot be read: {error.strerror}", error))
    return sorted(found, key=_order)


def newest_valid(
    directory: str | os.PathLike[str],
    *,
    accept: Callable[[CheckpointRecord], bool] = lambda _: True,
    knows_types: bool = False,
) -> tuple[CheckpointRecord | None, list[str]]:
    """The newest checkpoint that proves whole, and a warning for each newer one that does not.

    Args:
        directory: Where the records are.
        accept: Which records to consider, by run or spec digest say; asked before the files are proven.
        knows_types: Whether this process has imported what it trains, so that a checkpoint with a type that is not
            known cannot be loaded.

    Returns:
        The record, None if there is none, and the warnings: which checkpoint is broken, and why.

    Raises:
        OSError: A newer one cannot be read, which does not mean that it is broken.
    """
    warnings = []
    checkpoints = list_checkpoints(directory)
    for listed in reversed(checkpoints):
        if listed.error is not None:
            raise listed.error
        try:
            if listed.record is None:
                if not (is_record_of_callback(listed.path) or is_checkpoint_file(listed.path)):
                    continue  # another program's JSON file
                raise BrokenCheckpointError(name_of(listed.path), listed.problem)
            if not accept(listed.record):
                continue
            verify_files(listed.record)
            check_contents(listed.record, knows_types=knows_types)
        except BrokenCheckpointError as error:
            warnings.append(f"{error}{FALLS_BACK}")
            continue
        return listed.record, _few(warnings, directory)
    _tell_of_foreign(directory, {listed.path.name for listed in checkpoints})
    return None, _few(warnings, directory)


def _tell_of_foreign(directory: str | os.PathLike[str], records: set[str]) -> None:
    """Say once what was passed over: the checkpoint that a user looks for may have been renamed or damaged."""
    named = [
        name
        for name in (os.listdir(directory) if os.path.isdir(directory) else ())
        if name.endswith(RECORD_SUFFIXES) and name not in records and not is_temporary(name)
    ]
    if named:
        place, example = os.fspath(directory), min(named)
        log.warning(
            "%d files in %s are not checkpoint records and were skipped, such as %s", len(named), place, example
        )


def _few(warnings: list[str], directory: str | os.PathLike[str]) -> list[str]:
    """`warnings`, of many the first and a word about the others."""
    others = len(warnings) - MOST_WARNINGS
    if others <= 0:
        return warnings
    return [*warnings[:MOST_WARNINGS], f"{others:,} more checkpoints in {os.fspath(directory)} are broken"]


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The record that a user means by `path`: itself, that of its name or folder, or the newest of a folder or run.

    Its files are not proven. A file that torch wrote counts where its name ends in ``.ckpt``.

    Raises:
        FileNotFoundError: There is none; says what there is, and what to name.
        OSError: The newest cannot be read.
    """
    record = record_path(path)
    if record.is_file():
        return record
    folder = folder_of_checkpoints(path)
    listed = [] if folder is None else list_checkpoints(folder)
    for found in reversed(listed):
        if found.error is not None:
            raise found.error
        if found.record is not None:
            return Path(os.path.abspath(found.path))
    way_out = "name the JSON record of a checkpoint, or the folder that holds it"
    raise FileNotFoundError(f"{_what_is_at(Path(path), listed)}; {way_out}")


def folder_of_checkpoints(path: str | os.PathLike[str]) -> Path | None:
    """The folder of checkpoints that `path` means, which may be a run's artifacts; None where it is a checkpoint."""
    if record_path(path).is_file() or not os.path.isdir(path):
        return None
    inside = Path(path) / "checkpoints"
    return inside if inside.is_dir() else Path(path)


def _what_is_at(path: Path, broken: list[Listed]) -> str:
    if broken:
        return f"no checkpoint in {path} can be read: {name_of(broken[-1].path)}: {broken[-1].problem}"
    if path.is_dir():
        return f"{path} is a folder without checkpoints"
    if path.suffix == ".safetensors" and path.exists():
        return f"{path} holds only weights, from which no run can resume"
    return f"{path} is not a checkpoint" if path.exists() else f"there is nothing at {path}"


def find_final(directory: str | os.PathLike[str]) -> CheckpointRecord | None:
    """The proven final checkpoint of `directory`, or None where there is none.

    Raises:
        BrokenCheckpointError: There is one, and it is not whole.
    """
    try:
        record = read_record(Path(directory) / f"{FINAL_NAME}.json")
    except FileNotFoundError:
        return None
    verify_files(record)
    return record


def _order(listed: Listed) -> tuple[int, int, int]:
    """By step; of one step a final checkpoint last, else the one committed last. An unreadable ``final`` is newest."""
    if listed.record is None:
        name = name_of(listed.path)
        return (sys.maxsize if name == FINAL_NAME else step_of_name(name) or 0, 0, 0)
    return (listed.record.step, int(listed.record.final), listed.record.created_at_ms)
