"""Decide how a run or a fit starts: at step 0, from a checkpoint, or not at all because it has completed.

The module imports neither torch nor Lightning, so that a completed run is recognized without them.
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

from ...callbacks.checkpoint.format.record import (
    LARGEST_RECORD_BYTES,
    CheckpointRecord,
    is_record_of_callback,
    read_record,
)
from ...callbacks.checkpoint.listing import checkpoint_files, folders_of_checkpoints
from ...callbacks.checkpoint.memory_tier import discard_memory, is_in_memory
from ...callbacks.checkpoint.selection import FALLS_BACK, find_checkpoint, find_final, newest_valid
from ...callbacks.checkpoint.storage import verify_files
from ..contract.exceptions import BrokenCheckpointError, InputError, StartupContractError
from ..job.config import JOB_NAME, RunConfig, read_job, read_run_config
from ..job.identity import differing_fields
from ..plumbing.durable import fsync_directory, make_directory, write_bytes_durably
from ..plumbing.redaction import HIDDEN
from ..plumbing.safe_open import read_regular
from .deaths import (
    FOLDER,
    MOST_AT_A_STEP,
    MOST_AT_THE_START,
    Death,
    RepeatedDeathError,
    describe_deaths,
    repeated_deaths,
)

log = logging.getLogger(__name__)

IN_USE = "startup.artifacts_in_use"
RUNS_FILE = "tracking.jsonl"
"""File with the W&B or MLflow run of each logger, next to a job's event log or a fit's checkpoints.

Not ``.json``, since such a file would be taken for the record of a checkpoint.
"""
_SAMPLE_NAME = re.compile(r"step-\d{8,}(-\d{2,})?(\.json|\.txt)?")


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    record: CheckpointRecord | None = None
    """The checkpoint to continue from; None starts at step 0."""
    finished_step: int | None = None
    """Step at which this run has completed with `record`, so nothing is left to train; None if it has not. If an
    older runtime's record has no step, this is the job's `max_steps`."""
    warnings: tuple[str, ...] = ()
    deaths: tuple[Death, ...] = ()
    """The last attempts, if all of them were killed in the same step."""
    went_back: bool = False
    """Whether `record` is not the newest one, because of these deaths."""
    is_newest: bool = False
    """Whether a newer checkpoint in the memory of any node replaces `record`, once the ranks have met
    (`Checkpoint.takes_newest`)."""


@dataclass(frozen=True)
class ExitHints:
    """Ways out, in words, for a user whose start is blocked by existing checkpoints."""

    resume: str = "continue from them with `--set resume_from_latest=true`"
    start_over: str = "move them aside and start at step 0 with `genlight run --fresh`"
    other_folder: str = "choose another directory with `TRAINER_ARTIFACTS_DIR`"


def decide_start(
    config: RunConfig,
    *,
    resume_checkpoint: Path | None = None,
    allow_changed: bool = False,
    may_have_completed: bool = False,
    import_types: Callable[[], object] | None = None,
    prove: Callable[[CheckpointRecord], None] = verify_files,
) -> Start:
    """Decide how the run of `config` starts.

    Args:
        config: The run.
        resume_checkpoint: A record that the inputs downloaded; the run resumes from this one and no other.
        allow_changed: Resume although trainer, hyperparameters, data or inputs differ from the checkpoint's.
        may_have_completed: Recognize a completed run even without `resume_from_latest`, since an orchestrator may
            deliver a job twice.
        import_types: Imports the trainer, whose types a checkpoint may hold; called once there is something to train.
            From then on a checkpoint with an unknown type is skipped. A checkpoint that the job names is not skipped:
            loading it reports the error.
        prove: Compares the files of the checkpoint to continue from with its record, as for `newest_valid`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: the directory holds checkpoints of another run, or none of
            its checkpoints is complete, or the run does not resume; ``startup.job_changed``: they are from a different
            job.
        InputError: The named checkpoint is missing or broken, or a checkpoint cannot be read.
    """
    path = resume_checkpoint or config.resume_checkpoint_path
    try:
        if path is not None:
            return _warn_of_changes(Start(_verify_named(path, prove)), config)
        if not config.resume_from_latest:
            if may_have_completed and (completed := _find_unchanged_end(config)) is not None:
                return completed
            refuse_to_overwrite(config.checkpoints_dir, ExitHints())
            return _go_back_from_deaths(Start(), config, knows_types=False)
        if (completed := _find_end(config, allow_changed)) is not None:
            return completed
        if import_types is not None:
            import_types()
        start = newest_start(config.checkpoints_dir, ExitHints(), knows_types=import_types is not None, prove=prove)
        if start.record is not None:
            _check_is_ours(start.record, config, allow_changed)
            if config.resume.overlap:
                start = overlapping(start, config.checkpoints_dir, knows_types=import_types is not None)
        start = _go_back_from_deaths(start, config, knows_types=import_types is not None)
        return _warn_of_changes(start, config)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; let this user read it, or move it away") from error


def overlapping(start: Start, directory: Path, *, knows_types: bool) -> Start:
    """Return the start from the checkpoint before the one of `start`, to repeat and compare the steps in between.

    Args:
        start: A start from the newest checkpoint of `directory`.
        directory: The folder of checkpoints.
        knows_types: As for `newest_valid`.
    """
    newest = start.record
    if newest is None or newest.is_old or newest.final:
        return start
    earlier, warnings = _newest_before(newest, directory, knows_types=knows_types)
    if earlier is None:
        reason = f"There is no checkpoint before {newest.name}, so `overlap` compares nothing"
        return dataclasses.replace(start, warnings=(*start.warnings, *warnings, reason))
    return dataclasses.replace(start, record=earlier, is_newest=False, warnings=(*start.warnings, *warnings))


def _newest_before(
    newest: CheckpointRecord, directory: Path, *, knows_types: bool
) -> tuple[CheckpointRecord | None, list[str]]:
    def is_earlier(record: CheckpointRecord) -> bool:
        return record.step < newest.step and record.run_id == newest.run_id and not record.is_old

    return newest_valid(directory, accept=is_earlier, knows_types=knows_types)


def _go_back_from_deaths(start: Start, config: RunConfig, *, knows_types: bool) -> Start:
    folder, job = config.artifacts_dir, config.spec_digest
    return before_deaths(start, folder, config.checkpoints_dir, ExitHints(), job=job, knows_types=knows_types)


def before_deaths(
    start: Start, folder: Path, directory: Path, ways: ExitHints, *, job: str, knows_types: bool
) -> Start:
    """Return `start`, or, if attempts from its checkpoint were killed in one step, a start from the checkpoint before.

    Args:
        start: A start from the newest checkpoint of `directory`, or at step 0.
        folder: The run's folder, with the notes of killed attempts.
        directory: The folder of checkpoints.
        ways: The ways out, in words.
        job: Digest of the job.
        knows_types: As for `newest_valid`.

    Raises:
        RepeatedDeathError: There is no earlier checkpoint, or an attempt from it was killed in that step too.
    """
    deaths = repeated_deaths(folder, job)
    start = dataclasses.replace(start, deaths=tuple(deaths))
    newest = start.record
    here = [death for death in deaths if death.record == (0 if newest is None else newest.step)]
    most = MOST_AT_A_STEP if deaths and deaths[-1].step else MOST_AT_THE_START
    if len(deaths) < most or (len(here) < most and not deaths[-1].went_back):
        return start
    earlier = None
    if newest is not None and not newest.is_old and not any(death.went_back for death in deaths):
        earlier, _ = _newest_before(newest, directory, knows_types=knows_types)
    if newest is None or earlier is None:
        raise RepeatedDeathError(
            f"{describe_deaths(deaths)}. Another attempt would be killed there, too. Correct the cause, and remove the "
            f"folder {str(folder / FOLDER)!r}; or give up its checkpoints: {ways.start_over}"
        )
    text = f"{describe_deaths(deaths)}. This attempt begins at the checkpoint before, {earlier.name}"
    return dataclasses.replace(start, record=earlier, went_back=True, is_newest=False, warnings=(*start.warnings, text))


def _find_end(config: RunConfig, allow_changed: bool) -> Start | None:
    """Return the end of this run if it has completed."""
    try:
        final = find_final(config.checkpoints_dir)
    except BrokenCheckpointError:
        return None  # `newest_valid` reads it too and warns why it is skipped.
    if final is None:
        return None
    _check_is_ours(final, config, allow_changed)
    if final.is_old:  # a final record of an older runtime may lack `step` and `max_steps`
        return Start(final, finished_step=final.step or config.max_steps)
    target = final.max_steps if final.max_steps is not None else final.step
    return Start(final, finished_step=final.step) if config.max_steps <= max(target, final.step) else None


def _find_unchanged_end(config: RunConfig) -> Start | None:
    """Return the end of this run if it has completed with the same job."""
    try:
        return _find_end(config, allow_changed=False)
    except StartupContractError:  # the checkpoint is of another run or another job, so the folder is in use
        return None


def newest_start(
    directory: Path, ways: ExitHints, *, knows_types: bool, prove: Callable[[CheckpointRecord], None] = verify_files
) -> Start:
    """Return the start from the newest complete checkpoint of `directory`, or at step 0 if there is no checkpoint.

    Args:
        directory: The folder of checkpoints.
        ways: The ways out, in words.
        knows_types: As for `newest_valid`.
        prove: As for `newest_valid`.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: there are checkpoints, and none is complete.
        OSError: A checkpoint cannot be read.
    """
    record, warnings = newest_valid(directory, knows_types=knows_types, prove=prove)
    if record is None and warnings:
        broken = "; ".join(warning.removesuffix(FALLS_BACK) for warning in warnings)
        raise StartupContractError(
            IN_USE,
            f"no checkpoint in {str(directory)!r} can be resumed from: {broken}. Restore one, or {ways.start_over}.",
        )
    return Start(record, warnings=tuple(warnings), is_newest=record is None or not record.is_old)


def refuse_to_overwrite(directory: Path, ways: ExitHints) -> None:
    """Refuse to start at step 0 if that would overwrite checkpoints or files with their names.

    Args:
        directory: The folder of checkpoints.
        ways: The ways out, in words.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: there are such files.
    """
    if checkpoint_files(directory):
        raise StartupContractError(
            IN_USE,
            f"{str(directory)!r} holds checkpoints already: {ways.resume}, {ways.other_folder}, or {ways.start_over}.",
        )
    for path in filter(is_record_of_callback, sorted(directory.iterdir()) if directory.is_dir() else ()):
        raise StartupContractError(
            IN_USE,
            f"{str(path)!r} is not a checkpoint, but has the name of one that this run may save. Move it away, or "
            f"{ways.other_folder}.",
        )


def _warn_of_changes(start: Start, config: RunConfig) -> Start:
    """Return `start` with a warning if the job has changed since its checkpoint."""
    record = start.record
    if record is None or record.run_id != config.run_id or record.spec_digest in (None, config.spec_digest):
        return start
    warning = f"The run continues from {record.name}, but its job has changed since: {_changes(config, record)}"
    return dataclasses.replace(start, warnings=(*start.warnings, warning))


def _verify_named(path: Path, prove: Callable[[CheckpointRecord], None]) -> CheckpointRecord:
    """Return the record of a checkpoint that the job names, after its files were compared with it."""
    try:
        record = read_record(find_checkpoint(path))
        prove(record)
        return record
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except BrokenCheckpointError as error:
        raise InputError(
            f"{error}; name another checkpoint, or use resume_from_latest to fall back to an earlier one"
        ) from error


def _check_is_ours(record: CheckpointRecord, config: RunConfig, allow_changed: bool) -> None:
    """Refuse a checkpoint of another run, or of a job that has changed since."""
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
            f"{_changes(config, record)}. Change it back, choose another run_id or directory, or resume anyway with "
            "`genlight run --allow-changed`.",
        )


def _changes(config: RunConfig, record: CheckpointRecord) -> str:
    """List the fields in which the job differs from the job that wrote `record`, if that job is still in its folder."""
    is_own = record.path.parent == config.checkpoints_dir or is_in_memory(record.path)
    folder = config.artifacts_dir if is_own else record.path.parent.parent
    names: list[str] = []
    if read_job(folder) is not None:
        before, _ = read_run_config(spec_path=folder / JOB_NAME, environ={})
        differing = differing_fields(config.spec_fields, before.spec_fields)
        names = [name for name in differing if HIDDEN not in str(before.spec_fields.get(name))]
    # The file has the job of the newest start. If that is not the start that wrote `record`, all names may be missing.
    return f"{', '.join(names)} ({folder / JOB_NAME} has the earlier job)" if names else "unknown fields"


def move_old_artifacts_aside(config: RunConfig) -> Path | None:
    """Move checkpoints, samples, the event log and the ids of logger runs of earlier attempts into a folder.

    Their job is copied into it. All other files stay in place. So does an event log outside of the run's own
    directory, since others may read it.

    Returns:
        The folder, or None if there was nothing to move.
    """
    root = config.artifacts_dir
    discard_memory(config.checkpoints_dir)
    files = (config.events_path, config.events_path.parent / RUNS_FILE)
    logs = [path for path in files if path.is_relative_to(root) and path.is_file() and not path.is_symlink()]
    records = checkpoint_files(config.checkpoints_dir)
    aside = _move_aside(records, [*_samples_in(config.samples_dir), *logs], root)
    if aside is not None and read_job(root) is not None:  # a copy, since this run may have been started from it
        write_bytes_durably(aside / JOB_NAME, read_regular(root / JOB_NAME, limit=LARGEST_RECORD_BYTES))
    return aside


def move_checkpoints_aside(directory: Path) -> Path | None:
    """Move the checkpoints of `directory` into a folder in it; all other files stay in place.

    Returns:
        The folder, or None if there was nothing to move.
    """
    discard_memory(directory)
    return _move_aside(checkpoint_files(directory), [], directory)


def _move_aside(records: Sequence[Path], others: Sequence[Path], root: Path) -> Path | None:
    """Move checkpoints and other files. A kill in between leaves each checkpoint complete, in one of the two places."""
    # Records last: a data folder without its record would be taken for the remains of a killed run.
    if not (olds := [*folders_of_checkpoints(records), *records, *others]):
        return None
    try:
        return _move_files_aside(olds, set(records), root)
    except OSError as error:
        text = f"files of earlier attempts cannot be moved aside: {error.filename or root}: {error.strerror}"
        way_out = "Let this user write there, or choose another folder"
        raise StartupContractError("startup.invalid_artifact_paths", f"{text}. {way_out}.") from error


def _move_files_aside(olds: Sequence[Path], records: Collection[Path], root: Path) -> Path:
    """Move files into a new folder below `root`; return that folder."""
    aside = root / f"before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    targets = [(path, aside / path.parent.name / path.name) for path in olds]
    for path, target in targets:
        make_directory(target.parent, shared=None)
        if path in records and path.suffix == ".json" and os.access(path, os.R_OK):
            content = read_regular(path, limit=LARGEST_RECORD_BYTES)
            write_bytes_durably(target, content)  # so that the moved data folder has a record at once
    for path, target in targets:
        path.rename(target)
    for directory in dict.fromkeys([*(target.parent for _, target in targets), *(path.parent for path, _ in targets)]):
        fsync_directory(directory)
    log.info("moved files of earlier attempts to %s", aside)
    return aside


def _samples_in(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _SAMPLE_NAME.fullmatch(path.name) and not path.is_symlink())
