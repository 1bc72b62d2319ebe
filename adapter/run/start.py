"""The start of a run or a fit: from nothing, a checkpoint, or its own end.

The module imports neither torch nor Lightning, so that a finished run is recognised without them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint.format.record import LARGEST_RECORD_BYTES, CheckpointRecord, is_record_of_callback
from ...callbacks.checkpoint.selection import FALLS_BACK, find_checkpoint, find_final, newest_valid
from ...callbacks.checkpoint.storage import checkpoint_files, folders_of_checkpoints, verify
from ..contract.exceptions import BrokenCheckpointError, InputError, StartupContractError
from ..job.config import JOB_NAME, RunConfig, read_job, read_run_config
from ..job.identity import differing_fields
from ..plumbing.durable import fsync_directory, make_directory, write_bytes_durably
from ..plumbing.redaction import HIDDEN
from ..plumbing.safe_open import read_regular

__all__ = [
    "RUNS_FILE",
    "Start",
    "WaysOut",
    "decide_start",
    "move_checkpoints_aside",
    "move_old_artifacts_aside",
    "newest_start",
    "refuse_to_overwrite",
]

log = logging.getLogger(__name__)

IN_USE = "startup.artifacts_in_use"
RUNS_FILE = "tracking.jsonl"
"""Which run of W&B or MLflow each logger has: one line, in the folder of a job's metrics or of a fit's checkpoints.

Not ``.json``, which would be looked at as the record of a checkpoint.
"""
_SAMPLE_NAME = re.compile(r"step-\d{8,}(-\d{2,})?(\.json|\.txt)?")


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    record: CheckpointRecord | None = None
    """The checkpoint to go on from; None starts at step 0."""
    finished_step: int | None = None
    """The step at which this very run has ended with `record`, so that nothing is left to train; what the job asks for
    where an older runtime's record does not tell."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class WaysOut:
    """What a user does where checkpoints are in the way of a start, in the words of the command."""

    go_on: str = "go on from them with `--set resume_from_latest=true`"
    anew: str = "move them aside and start at step 0 with `genlight run --fresh`"
    elsewhere: str = "choose another directory with `TRAINER_ARTIFACTS_DIR`"


def decide_start(
    config: RunConfig,
    *,
    resume_checkpoint: Path | None = None,
    allow_changed: bool = False,
    may_have_completed: bool = False,
    import_types: Callable[[], object] | None = None,
) -> Start:
    """Decide what the run of `config` starts from.

    Args:
        config: The run.
        resume_checkpoint: A record that the inputs brought here; asks for a resume from just this one.
        allow_changed: Resume although trainer, hyperparameters, data or inputs are not those of the checkpoint.
        may_have_completed: Recognize a completed run also without `resume_from_latest`, as an orchestrator may deliver
            a job again.
        import_types: Imports the trainer, whose types a checkpoint may hold; called once there is something to train.
            One with a type that is not known is passed over then. One that was named is not: loading says what is
            wrong with it.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: the directory holds checkpoints that this run must not
            touch, or of another spec, or none that is whole.
        InputError: The named checkpoint is missing or broken, or one cannot be read.
    """
    named = resume_checkpoint or config.resume_checkpoint_path
    try:
        if named is not None:
            return _going_on(Start(_named(named)), config)
        if not config.resume_from_latest:
            if may_have_completed and (finished := _finished_unchanged(config)) is not None:
                return finished
            refuse_to_overwrite(config.checkpoints_dir, WaysOut())
            return Start()
        finished = _finished(config, allow_changed)
        if finished is not None:
            return finished
        if import_types is not None:
            import_types()
        start = newest_start(config.checkpoints_dir, WaysOut(), knows_types=import_types is not None)
        if start.record is not None:
            _check_is_ours(start.record, config, allow_changed)
        return _going_on(start, config)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; let this user read it, or move it away") from error


def _finished(config: RunConfig, allow_changed: bool) -> Start | None:
    """The end of this very run, where it has come to it."""
    try:
        final = find_final(config.checkpoints_dir)
    except BrokenCheckpointError:
        return None  # `newest_valid` looks at it too, and says why it is passed over.
    if final is None:
        return None
    _check_is_ours(final, config, allow_changed)
    if final.is_old:  # It tells neither where it ended nor what it was to reach: it is the end all the same.
        return Start(final, finished_step=final.step or config.max_steps)
    target = final.max_steps if final.max_steps is not None else final.step
    return Start(final, finished_step=final.step) if config.max_steps <= max(target, final.step) else None


def _finished_unchanged(config: RunConfig) -> Start | None:
    try:
        return _finished(config, allow_changed=False)
    except StartupContractError:  # another run's, or of another job: the folder is in use
        return None


def newest_start(directory: Path, ways: WaysOut, *, knows_types: bool) -> Start:
    """The start from the newest whole checkpoint of `directory`, from nothing where there is none.

    Args:
        directory: The folder of checkpoints.
        ways: The ways out, in words.
        knows_types: As for `newest_valid`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: there are checkpoints, and none is whole.
        OSError: A checkpoint cannot be read.
    """
    record, warnings = newest_valid(directory, knows_types=knows_types)
    if record is None and warnings:
        broken = "; ".join(warning.removesuffix(FALLS_BACK) for warning in warnings)
        raise StartupContractError(
            IN_USE,
            f"no checkpoint in {str(directory)!r} is whole: {broken}. Restore one, or {ways.anew}.",
        )
    return Start(record, warnings=tuple(warnings))


def refuse_to_overwrite(directory: Path, ways: WaysOut) -> None:
    """Refuse a start from nothing where it would overwrite checkpoints, or files of their names.

    Args:
        directory: The folder of checkpoints.
        ways: The ways out, in words.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``.
    """
    if checkpoint_files(directory):
        raise StartupContractError(
            IN_USE,
            f"{str(directory)!r} holds checkpoints already: {ways.go_on}, {ways.elsewhere}, or {ways.anew}.",
        )
    for path in filter(is_record_of_callback, sorted(directory.iterdir()) if directory.is_dir() else ()):
        raise StartupContractError(
            IN_USE,
            f"{str(path)!r} is not a checkpoint, but has the name of one that this run may save. Move it away, or "
            f"{ways.elsewhere}.",
        )


def _going_on(start: Start, config: RunConfig) -> Start:
    """`start`, which says what the job has otherwise."""
    record = start.record
    if record is None or record.run_id != config.run_id or record.spec_digest in (None, config.spec_digest):
        return start
    said = f"The job has changed since {record.name}, from which the run goes on: {_changes(config, record)}"
    return dataclasses.replace(start, warnings=(*start.warnings, said))


def _named(path: Path) -> CheckpointRecord:
    try:
        return verify(find_checkpoint(path))
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except BrokenCheckpointError as error:
        raise InputError(
            f"{error}; name another checkpoint, or use resume_from_latest to fall back to an earlier one"
        ) from error


def _check_is_ours(record: CheckpointRecord, config: RunConfig, allow_changed: bool) -> None:
    if record.run_id and record.run_id != config.run_id:
        raise StartupContractError(
            IN_USE,
            f"{record.name} in {str(config.checkpoints_dir)!r} belongs to run {record.run_id!r}, not to "
            f"{config.run_id!r}. Choose another directory, or move its artifacts aside with `genlight run --fresh`.",
        )
    if record.spec_digest and record.spec_digest != config.spec_digest and not allow_changed:
        raise StartupContractError(
            "startup.job_changed",
            f"run {config.run_id!r} was started with another job. Changed since {record.name}: "
            f"{_changes(config, record)}. Change it back, choose another run_id or directory, or resume all the same "
            "with `genlight run --allow-changed`.",
        )


def _changes(config: RunConfig, record: CheckpointRecord) -> str:
    """The fields in which a job differs from the one that wrote `record`, as the folder of that run still has it."""
    is_own = record.path.parent == config.checkpoints_dir
    folder = config.artifacts_dir if is_own else record.path.parent.parent
    names: list[str] = []
    if read_job(folder) is not None:
        before, _ = read_run_config(spec_path=folder / JOB_NAME, environ={})
        differing = differing_fields(config.spec_fields, before.spec_fields)
        names = [name for name in differing if HIDDEN not in str(before.spec_fields.get(name))]
    # It is the job of the newest start, which need not have saved anything.
    return f"{', '.join(names)} ({folder / JOB_NAME} has the job as it was)" if names else "unknown fields"


def move_old_artifacts_aside(config: RunConfig) -> Path | None:
    """Move checkpoints, samples, the event log and the identity of logger runs of earlier attempts into a folder.

    Their job is copied into it.

    Everything else in their directories stays where it is, and so does an event log outside of the run's own directory,
    which others may read.

    Returns:
        The folder, or None if there was nothing to move.
    """
    root = config.artifacts_dir
    files = (config.events_path, config.events_path.parent / RUNS_FILE)
    logs = [path for path in files if path.is_relative_to(root) and path.is_file() and not path.is_symlink()]
    records = checkpoint_files(config.checkpoints_dir)
    aside = _move_aside(records, [*_samples_in(config.samples_dir), *logs], root)
    if aside is not None and read_job(root) is not None:  # a copy, since this run may have been started from it
        write_bytes_durably(aside / JOB_NAME, read_regular(root / JOB_NAME, limit=LARGEST_RECORD_BYTES))
    return aside


def move_checkpoints_aside(directory: Path) -> Path | None:
    """Move the checkpoints of `directory` into a folder in it; everything else stays where it is.

    Returns:
        The folder, or None if there was nothing to move.
    """
    return _move_aside(checkpoint_files(directory), [], directory)


def _move_aside(records: Sequence[Path], others: Sequence[Path], root: Path) -> Path | None:
    """Move checkpoints and others; a kill in between leaves each checkpoint whole, here or there."""
    # Folders first: a data folder without its record would be taken for what a killed run left.
    olds = [*folders_of_checkpoints(records), *records, *others]
    if not olds:
        return None
    try:
        return _moved_aside(olds, set(records), root)
    except OSError as error:
        text = f"what earlier attempts left cannot be moved aside: {error.filename or root}: {error.strerror}"
        way_out = "Let this user write there, or choose another folder"
        raise StartupContractError("startup.invalid_artifact_paths", f"{text}. {way_out}.") from error


def _moved_aside(olds: Sequence[Path], records: Collection[Path], root: Path) -> Path:
    aside = root / f"before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    targets = [(path, aside / path.parent.name / path.name) for path in olds]
    for path, target in targets:
        make_directory(target.parent, shared=None)
        if path in records and path.suffix == ".json" and os.access(path, os.R_OK):
            content = read_regular(path, limit=LARGEST_RECORD_BYTES)
            write_bytes_durably(target, content)  # so that its folder has it there at once
    for path, target in targets:
        path.rename(target)
    for directory in dict.fromkeys([*(target.parent for _, target in targets), *(path.parent for path, _ in targets)]):
        fsync_directory(directory)
    log.info("moved what earlier attempts left to %s", aside)
    return aside


def _samples_in(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _SAMPLE_NAME.fullmatch(path.name) and not path.is_symlink())
