"""The start of a run: from nothing, a checkpoint, or its own end.

The module imports neither torch nor Lightning, so that a finished run is recognised without them.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...callbacks.checkpoint.contents import check_contents
from ...callbacks.checkpoint.format.record import CheckpointRecord, is_record_of_callback, record_paths
from ...callbacks.checkpoint.selection import FALLS_BACK, find_checkpoint, find_final, newest_valid
from ...callbacks.checkpoint.storage import checkpoint_files, folders_of_checkpoints, verify
from ..contract.exceptions import BrokenCheckpointError, InputError, StartupContractError
from ..job.config import RunConfig
from ..job.identity import differing_fields
from ..job.resolved import JOB_NAME, read_job
from ..plumbing.durable import write_bytes_durably

__all__ = [
    "RUNS_FILE",
    "Start",
    "decide_start",
    "move_checkpoints_aside",
    "move_old_artifacts_aside",
    "start_that_loads",
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
    is_finished: bool = False
    """Whether `record` is the end of this very run, so that nothing is left to train."""
    finished_step: int = 0
    """The step at which that run ended; what the job asks for where an older runtime's record does not tell."""
    warnings: tuple[str, ...] = ()


def decide_start(config: RunConfig, *, resume_checkpoint: Path | None = None, allow_changed: bool = False) -> Start:
    """Decide what the run of `config` starts from.

    Args:
        config: The run.
        resume_checkpoint: A record that the inputs brought here; asks for a resume from just this one.
        allow_changed: Resume although trainer, hyperparameters, data or inputs are not those of the checkpoint.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: the directory holds checkpoints that this run must not
            touch, or of another spec, or none that is whole.
        InputError: The named checkpoint is missing or broken, or one cannot be read.
    """
    named = resume_checkpoint or config.resume_checkpoint_path
    try:
        return _start(config, allow_changed) if named is None else _going_on(_named(named), config)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; let this user read it, or move it away") from error


def start_that_loads(config: RunConfig, start: Start, *, allow_changed: bool) -> Start:
    """`start` once the trainer is imported, whose types its checkpoint may hold; else an older one that can be loaded.

    A checkpoint that was named stays: loading says what is wrong with it.

    Raises:
        StartupContractError: As of `decide_start`.
    """
    is_named = config.resume_checkpoint_path is not None or config.inputs.resume_checkpoint_ref is not None
    if start.record is None or is_named:
        return start
    try:
        check_contents(start.record, knows_types=True)
    except BrokenCheckpointError:
        return _start(config, allow_changed, knows_types=True)
    return start


def _start(config: RunConfig, allow_changed: bool, *, knows_types: bool = False) -> Start:
    if not config.resume_from_latest:
        _refuse_to_overwrite(config)
        return Start()
    final = _final(config)
    if final is not None:
        _check_is_ours(final, config, allow_changed)
        if final.is_old:  # It tells neither where it ended nor what it was to reach: it is the end all the same.
            return Start(final, is_finished=True, finished_step=final.step or config.job.max_steps)
        target = final.max_steps if final.max_steps is not None else final.step
        if config.job.max_steps <= max(target, final.step):
            return Start(final, is_finished=True, finished_step=final.step)
    record, warnings = newest_valid(config.checkpoints_dir, knows_types=knows_types)
    if record is not None:
        _check_is_ours(record, config, allow_changed)
    elif warnings:
        broken = "; ".join(warning.removesuffix(FALLS_BACK) for warning in warnings)
        raise StartupContractError(
            IN_USE,
            f"no checkpoint in {str(config.checkpoints_dir)!r} is whole: {broken}. Restore one, or move them aside "
            "and start at step 0 with `genlight run --fresh`.",
        )
    return Start(warnings=tuple(warnings)) if record is None else _going_on(record, config, warnings)


def _going_on(record: CheckpointRecord, config: RunConfig, warnings: Sequence[str] = ()) -> Start:
    """The start from `record`, which says what the job has otherwise."""
    spec = _texts(record.spec)
    changed = differing_fields(config.spec_fields, spec) if record.run_id == config.run_id and spec else []
    said = f"The job has changed since {record.name}, from which the run goes on: {', '.join(changed)}"
    return Start(record, warnings=(*warnings, said) if changed else tuple(warnings))


def _named(path: Path) -> CheckpointRecord:
    try:
        return verify(find_checkpoint(path))
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except BrokenCheckpointError as error:
        raise InputError(
            f"{error}; name another checkpoint, or use resume_from_latest to fall back to an earlier one"
        ) from error


def _final(config: RunConfig) -> CheckpointRecord | None:
    try:
        return find_final(config.checkpoints_dir)
    except BrokenCheckpointError:
        return None  # `newest_valid` looks at it too, and says why it is passed over.


def _refuse_to_overwrite(config: RunConfig) -> None:
    if checkpoint_files(config.checkpoints_dir):
        raise StartupContractError(
            IN_USE,
            f"{str(config.checkpoints_dir)!r} holds checkpoints already. Go on from them with "
            "`--set resume_from_latest=true`, choose another directory with `TRAINER_ARTIFACTS_DIR`, or move them "
            "aside with `genlight run --fresh`.",
        )
    for path in filter(is_record_of_callback, record_paths(config.checkpoints_dir)):
        raise StartupContractError(
            IN_USE,
            f"{str(path)!r} is not a checkpoint, but has the name of one that this run may save. Move it away, or "
            "choose another directory with `TRAINER_ARTIFACTS_DIR`.",
        )


def _check_is_ours(record: CheckpointRecord, config: RunConfig, allow_changed: bool) -> None:
    if record.run_id and record.run_id != config.run_id:
        raise StartupContractError(
            IN_USE,
            f"{record.name} in {str(config.checkpoints_dir)!r} belongs to run {record.run_id!r}, not to "
            f"{config.run_id!r}. Choose another directory, or move its artifacts aside with `genlight run --fresh`.",
        )
    if record.spec_digest and record.spec_digest != config.spec_digest and not allow_changed:
        changed = ", ".join(differing_fields(config.spec_fields, _texts(record.spec))) or "unknown fields"
        raise StartupContractError(
            "startup.job_changed",
            f"run {config.run_id!r} was started with another job. Changed since {record.name}: {changed}; "
            f"{JOB_NAME} in its folder has the job as it was. Change it back, choose another run_id or directory, or "
            "resume all the same with `genlight run --allow-changed`.",
        )


def _texts(spec: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in spec.items()}


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
        write_bytes_durably(aside / JOB_NAME, (root / JOB_NAME).read_bytes())
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
    aside = root / f"before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    targets = [(path, aside / path.parent.name / path.name) for path in olds]
    for path, target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in records and path.suffix == ".json" and os.access(path, os.R_OK):
            write_bytes_durably(target, path.read_bytes())  # so that its folder has it there at once
    for path, target in targets:
        path.rename(target)
    log.info("moved what earlier attempts left to %s", aside)
    return aside


def _samples_in(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _SAMPLE_NAME.fullmatch(path.name) and not path.is_symlink())
