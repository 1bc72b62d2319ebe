"""Checkpoints of a directory with their scores: which of them to resume from, and which a run keeps.

A score may come after its checkpoint was saved, from a command that evaluates it while training continues. A record
never changes, so such scores go into a separate file in the checkpoint's folder, and are removed with it.

The module imports neither torch nor Lightning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ...adapter.contract.exceptions import BrokenCheckpointError
from ...adapter.plumbing.durable import write_bytes_durably
from ...adapter.plumbing.text import require
from .contents import check_contents
from .format.record import FINAL_NAME, SCORES_FILE, CheckpointRecord, name_of, read_record, record_path
from .listing import Listed, list_checkpoints, read_scores, record_of_folder
from .memory_tier import is_in_memory, list_tiers
from .storage import missing_file, verify_files

if TYPE_CHECKING:
    from ...reporters.uploads import Uploader


log = logging.getLogger(__name__)

MOST_WARNINGS = 10
"""Limit on warnings that name one broken checkpoint each."""

FALLS_BACK = "; falling back to the one before it"
"""End of the warning about a broken checkpoint."""


def newest_valid(
    directory: str | os.PathLike[str],
    *,
    accept: Callable[[CheckpointRecord], bool] = lambda _: True,
    knows_types: bool = False,
    prove: Callable[[CheckpointRecord], None] = verify_files,
) -> tuple[CheckpointRecord | None, list[str]]:
    """Return the newest intact checkpoint, and a warning for each newer one that is broken.

    Checkpoints in memory count too, if their weights are finite.

    Args:
        directory: The folder of the records.
        accept: Which records to consider, for example by run or spec digest; called before the files are proven.
        knows_types: Whether this process has imported the classes that it trains. A checkpoint with an unknown type
            then counts as broken.
        prove: Compares the files with the record; `read_ahead` also keeps what it has read for the load.

    Returns:
        The record, or None if there is none, and the warnings; each names a broken checkpoint and the reason.

    Raises:
        OSError: A checkpoint cannot be read, but may be intact and newer than all others.
    """
    newest, warnings = None, list[str]()
    for listed in reversed(list_tiers(directory)):
        if listed.error is not None:
            raise listed.error
        try:
            if listed.record is None:
                raise BrokenCheckpointError(name_of(listed.path), listed.problem)
            is_lost = listed.record.finite_weights is False and is_in_memory(listed.path)
            if is_lost or not accept(listed.record):
                continue
            prove(listed.record)
            check_contents(listed.record, knows_types=knows_types)
            newest = listed.record
            break
        except BrokenCheckpointError as error:
            warnings.append(f"{error}{FALLS_BACK}")
    if (others := len(warnings) - MOST_WARNINGS) > 0:
        warnings[MOST_WARNINGS:] = [f"{others:,} more checkpoints in {os.fspath(directory)} are broken"]
    return newest, warnings


def newest_complete(directory: str | os.PathLike[str]) -> CheckpointRecord | None:
    """Return the newest checkpoint whose record is intact and whose files exist with the right sizes, or None.

    It is fast whatever the size of the files, and raises nothing. `newest_valid` also compares the content.
    """
    try:
        listed = list_tiers(directory)
    except OSError:
        return None
    records = (each.record for each in reversed(listed))
    return next((record for record in records if record is not None and not missing_file(record)), None)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Return the record that a user means by `path`.

    A path may be a record (also without its suffix), the folder of one checkpoint, or a folder of checkpoints or of a
    run. A folder of several checkpoints stands for the newest one. The files of the checkpoint are not proven. A file
    of torch is a checkpoint too if its name ends in ``.ckpt``.

    Raises:
        FileNotFoundError: There is no checkpoint; the message says what `path` is instead, and what to name.
        OSError: The newest checkpoint cannot be read.
    """
    record = record_path(path)
    if record.is_file():
        return record
    if (owner := record_of_folder(Path(os.path.abspath(path)))) is not None:
        return owner
    folder = folder_of_checkpoints(path)
    listed = [] if folder is None else list_tiers(folder)
    for entry in reversed(listed):
        if entry.error is not None:
            raise entry.error
        if entry.record is not None:
            return Path(os.path.abspath(entry.path))
    there = os.fspath(path)
    problem = f"{there} is not a checkpoint" if os.path.lexists(path) else f"there is nothing at {there}"
    if listed:
        problem = f"no checkpoint in {there} can be read: {name_of(listed[-1].path)}: {listed[-1].problem}"
    raise FileNotFoundError(f"{problem}; name the JSON record of a checkpoint, or the folder that holds it")


def folder_of_checkpoints(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of checkpoints at or in the folder `path`; None if `path` is a checkpoint or no folder."""
    if record_path(path).is_file() or not os.path.isdir(path):
        return None
    inside = Path(path) / "checkpoints"
    return inside if inside.is_dir() else Path(path)


def find_final(directory: str | os.PathLike[str]) -> CheckpointRecord | None:
    """Return the proven final checkpoint of `directory`, or None if there is none.

    Raises:
        BrokenCheckpointError: There is one, but it is not intact.
    """
    try:
        record = read_record(Path(directory) / f"{FINAL_NAME}.json")
    except (FileNotFoundError, IsADirectoryError):
        return None
    verify_files(record)
    return record


def add_score(record: CheckpointRecord, name: str, value: float) -> None:
    """Store the score `value` of `record`; durable when this returns.

    Raises:
        OSError: The file cannot be written.
    """
    assert record.data_path is not None
    scores = {**read_scores(record), name: value}
    write_bytes_durably(record.data_path / SCORES_FILE, msgspec.json.encode(scores))


WRITER = "Checkpoint"
"""The `writer` in records of the `Checkpoint` callback; it removes only checkpoints with this writer."""


@dataclass(frozen=True)
class Retention:
    """Rules of retention; a checkpoint stays if any rule keeps it.

    Raises:
        ValueError: A number is out of range.
    """

    keep_last: int | None = 2
    """How many of the newest step checkpoints to keep; None keeps all."""
    keep_best: int = 1
    """How many of the best by `monitor` to keep, if it is set."""
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        require(
            (self.keep_last is None or self.keep_last >= 1, "keep_last", "a number >= 1", self.keep_last),
            (self.keep_best >= 0, "keep_best", "a number >= 0", self.keep_best),
            (self.mode in ("min", "max"), "mode", "'min' or 'max'", self.mode),
        )


def to_delete(
    records: Sequence[CheckpointRecord], retention: Retention, in_use: Collection[str] = ()
) -> list[CheckpointRecord]:
    """Return the records of one run, oldest first, that `retention` does not keep and that are not `in_use`.

    It never returns a final checkpoint, one that an older runtime wrote, or the newest one with finite weights: after a
    run has diverged, only that one is worth continuing from.
    """
    if retention.keep_last is None:
        return []
    steps = sorted((r for r in records if not r.final and not r.is_old), key=lambda r: (r.step, r.created_at_ms))
    keep = {record.path for record in steps[-retention.keep_last :]}
    sound = [r for r in steps if r.finite_weights] or [r for r in steps if r.finite_weights is not False]
    keep |= {record.path for record in sound[-1:]}
    keep |= {record.path for record in best_first(steps, retention.monitor, retention.mode)[: retention.keep_best]}
    return [record for record in steps if record.path not in keep and not _is_named(record, in_use)]


def monitored(records: Sequence[CheckpointRecord]) -> tuple[str | None, Literal["min", "max"] | None]:
    """Return the score by which the run of `records` is judged, and whether low or high is better; None if unknown."""
    job = next((record.metadata["job"] for record in reversed(records) if "job" in record.metadata), None)
    if isinstance(job, dict) and isinstance(named := job.get("checkpoints.monitor"), str):
        return named, "max" if job.get("checkpoints.mode") == "max" else "min"
    scores = {name for record in records for name, value in record.metrics.items() if value is not None}
    return (scores.pop() if len(scores) == 1 else None), None


def best_first(
    records: Sequence[CheckpointRecord], monitor: str | None, mode: Literal["min", "max"]
) -> list[CheckpointRecord]:
    """Return the `records` with a finite score `monitor`, best first; the older one first if equal."""
    sign = 1.0 if mode == "min" else -1.0
    values = [(record.metrics.get(monitor or ""), record) for record in records]
    scored = [(sign * value, record) for value, record in values if value is not None and math.isfinite(value)]
    return [record for _, record in sorted(scored, key=lambda each: (each[0], each[1].step))]


def own_records(listed: Sequence[Listed]) -> list[CheckpointRecord]:
    """Return the checkpoints of the `Checkpoint` callback."""
    records = [entry.record for entry in listed if entry.record is not None and not entry.path.is_symlink()]
    return [record for record in records if record.writer == WRITER]


def _is_named(record: CheckpointRecord, paths: Collection[str]) -> bool:
    """Whether `paths` has the record, its folder, one of its files, or the path that ``save_checkpoint`` named."""
    own = [record.path, *(record.path.parent / file.path for file in record.files)]
    return any(str(path) in paths for path in (*own, record.data_path, record.primary_path))


def never_queued(uploader: Uploader, record: CheckpointRecord) -> list[CheckpointRecord]:
    """Return older step checkpoints in the folder and run of `record` that `uploader` never queued; oldest first.

    A process may have been killed after a checkpoint was durable and before it was queued. The search goes back to the
    newest checkpoint that was queued. If none was queued, the result is empty: a run whose uploads begin only now does
    not send its past.
    """
    missed: list[CheckpointRecord] = []
    for older in (each for listed in reversed(list_checkpoints(record.path.parent)) for each in own_records([listed])):
        if older.run_id != record.run_id or older.final or older.step > record.step or older.path == record.path:
            continue
        if uploader.has_queued(older.path):
            return missed[::-1]
        missed.append(older)
    return []


def enqueue(uploader: Uploader, record: CheckpointRecord) -> None:
    """Queue the checkpoint of `record` for upload, with all its files.

    Raises:
        UploadError: A file is missing, or the queue cannot be written.
    """
    # The older runtime has reported its final checkpoint to the endpoint itself, but sent no files to a file store.
    if not (record.is_old and record.final and uploader.config.checkpoint_url is not None):
        files = [record.path.parent / file.path for file in record.files]
        step, final, reported = record.step, record.final, record.reported_path
        uploader.enqueue("checkpoint", record.path, files, step=step, final=final, primary_path=reported)
