"""Train a run: choose the start, load inputs and trainer class, and run the Lightning fit, on every rank.

Modules that load torch are imported only once there is something to train.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks.checkpoint.format.record import FINAL_NAME, CheckpointRecord, RecordMeta, read_record
from ...callbacks.checkpoint.memory_tier import discard_memory
from ...callbacks.checkpoint.selection import enqueue, never_queued
from ...callbacks.checkpoint.storage import sweep
from ...reporters.events.run_metadata import run_metadata
from ..contract.exceptions import BrokenCheckpointError, ContractError, StartupContractError
from ..helpers import seed_everything
from ..inputs.materialize import MaterializedInputs, materialize_inputs
from ..job.config import JOB_NAME, RunConfig, write_job
from ..job.identity import logged_settings
from ..module.plugin_loading import (
    find_trainer,
    make_trainer,
    misspelled_hooks,
    on_sys_path,
    optional_hook,
    signature_faults,
)
from ..plumbing.failures import text_of_error
from ..plumbing.imports import collect_as_usual
from ..plumbing.redaction import safe_str
from .deaths import forget_deaths
from .proof import changes_since_proof
from .ranks import TIMES
from .report import shown_path, working_directory
from .session import Completion, Session
from .start import Start, decide_start

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..contract.types import TrainerPlugin


log = logging.getLogger(__name__)


def train(
    config: RunConfig, session: Session, *, allow_changed: bool = False, may_have_completed: bool = False
) -> Completion:
    """Train until the end of the job, from the start that `decide_start` chooses.

    Args:
        config: The run.
        session: Its session.
        allow_changed: Resume although the job differs from the checkpoint's.
        may_have_completed: As for `decide_start`.

    Raises:
        TrainingCanceled: The run was stopped.
    """
    session.stop.raise_if_signalled()
    session.preparing = "input"
    here = [path for path in (config.spec_dir, working_directory()) if path is not None]
    from_ref = config.inputs.resume_checkpoint_ref is not None
    decide = functools.partial(
        decide_start, config, allow_changed=allow_changed, may_have_completed=may_have_completed, prove=_read_ahead
    )
    start = Start() if from_ref else decide(import_types=lambda: import_seeded(config, here))
    if start.record is not None and start.finished_step is not None:
        return _report_finished(config, session, start.record, start.finished_step)
    session.stop.raise_if_stopped()
    inputs = materialize_inputs(config, raise_if_stopped=session.stop.raise_if_stopped)
    if from_ref:
        start = decide(resume_checkpoint=inputs.resume_checkpoint)
    for warning in start.warnings:
        log.warning(warning)
    session.begin(start, config.spec_digest)
    if start.record is not None and session.is_rank_zero:
        place = shown_path(start.record.path)
        log.info("continuing after step %d of %d, from %s", start.record.step, config.job.max_steps, place)
    session.preparing = "model-load"
    target = import_seeded(config, here)
    with on_sys_path(here):
        return _fit(config, session, target, inputs, start)


def _read_ahead(record: CheckpointRecord) -> None:
    from ...callbacks.checkpoint.loading import read_ahead

    read_ahead(record)


def import_seeded(config: RunConfig, here: Sequence[Path]) -> Any:
    """Set the seed and import the job's trainer.

    Imports may draw random numbers, so the caller has to set the seed again before it constructs the trainer.
    """
    if config.seed is not None:
        importlib.import_module("lightning.pytorch")  # before the seed: it imports rich, which draws a random number
        seed_everything(config.seed)
    with on_sys_path(here):
        return import_trainer(config)


def _report_finished(config: RunConfig, session: Session, record: CheckpointRecord, step: int) -> Completion:
    """Report a run that had completed before, and queue the uploads that a kill may have prevented."""
    if session.event_log is not None:
        sweep(config.checkpoints_dir)  # remove what is left over if a kill came after the last commit
        discard_memory(config.checkpoints_dir)
        forget_deaths(config.artifacts_dir)
        session.event_log.started(metadata=_metadata(config))
        if session.uploader is not None:
            # A kill may have prevented these from being queued; the queue recognizes what it already holds by content.
            for each in (*never_queued(session.uploader, record), record):
                enqueue(session.uploader, each)
    log.info("run %s has completed before; nothing to train", config.run_id)
    return _completion(config, step)


def _fit(config: RunConfig, session: Session, target: Any, inputs: MaterializedInputs, start: Start) -> Completion:
    """Make the objects of the training, and run the Lightning fit."""
    from ...callbacks.checkpoint.policy import savers_of
    from ..module.module import ContractModule
    from ..module.trainer_files import trainer_directory
    from .fit import continue_runs, fit, join

    collect_as_usual()
    record = start.record
    if config.seed is not None:
        seed_everything(config.seed)  # again, because imports may draw random numbers
    plugin = make_trainer(target)
    if session.is_rank_zero:
        for misspelled in misspelled_hooks(plugin):
            log.warning(misspelled)
    paths = [str(path) for path in inputs.parquet_paths]
    trainer, data = prepare_training(config, plugin, parquet_paths=paths)
    handles = inputs.model_handles()
    module = ContractModule(plugin, config.job, model_handles=handles, keep_on_resume=config.resume.keep)
    ckpt_path = None
    if record is not None and record.is_old:
        folder = trainer_directory(record.path, plugin)
        module.resume_from(step=record.step, payload=record.state, checkpoint_dir=folder)
    elif record is not None:
        ckpt_path = str(record.path)
    for saver in savers_of(trainer):
        saver.takes_newest = start.is_newest
    _add_callbacks(config, session, trainer, plugin)
    join(session, trainer, module)
    if session.is_rank_zero:
        if changes := changes_since_proof(config, type(plugin)):
            log.info("the job has changed since `genlight prove` (%s): prove it again", ", ".join(changes))
        if not write_job(config, session.environ):
            own = config.artifacts_dir / JOB_NAME
            log.warning("%s is your own file, so the job of this run is not written there", own)
        # MLflow cannot change the hyperparameters of its runs, so after a change of the job, loggers begin new ones.
        is_same = record is not None and record.spec_digest in (None, config.spec_digest)
        resumes = config.resume_from_latest if record is None else is_same
        continue_runs(trainer, config.events_path.parent, resumes=resumes, versions=True)
    session.refuse = _unusable_lightning_block
    fit(session, trainer, module, datamodule=data, ckpt_path=ckpt_path)
    return _completion(config, module.completed_steps, module.stopped)


def _unusable_lightning_block(error: Exception) -> StartupContractError | None:
    if isinstance(error, OSError):  # about a file of the run
        return None
    text = f"The `lightning` block of the job cannot be used: {text_of_error(error)}"
    return StartupContractError("startup.invalid_job_spec", text)


def _add_callbacks(config: RunConfig, session: Session, trainer: pl.Trainer, plugin: TrainerPlugin) -> None:
    """Add the callbacks that need objects of this process; the others were made from the configuration."""
    from ...callbacks.hook.events import callbacks_of, run_state_of
    from ...callbacks.upload_artifacts import UploadArtifacts
    from ...reporters.events.event_logger import RecordEvents
    from .fit import NodeCheck, RestartTimes

    attempt = 1 if session.event_log is None else session.event_log.attempt
    state = run_state_of(trainer)
    state.run_id, state.attempt = config.run_id, attempt
    metadata = _metadata(config, plugin) if session.is_rank_zero else {}
    session.record = RecordMeta(
        run_id=config.run_id,
        attempt=attempt,
        max_steps=config.job.max_steps,
        spec_digest=config.spec_digest,
        metadata=metadata,
    )
    if trainer.num_nodes > 1:
        callbacks_of(trainer).append(NodeCheck(config.artifacts_dir, plugin))
    if session.event_log is not None:
        callbacks_of(trainer).insert(0, RecordEvents(session.event_log, metadata))
        if (times := os.environ.pop(TIMES, None)) is not None:
            callbacks_of(trainer).append(RestartTimes(session.event_log, times))
    if session.uploader is not None:
        callbacks_of(trainer).append(UploadArtifacts(session.uploader))


def _metadata(config: RunConfig, plugin: object = None) -> dict[str, Any]:
    """Return the metadata of this attempt: machine, code, job and seed."""
    secrets, tags, notes = config.secrets, config.tags, config.notes
    metadata = run_metadata(plugin, project=config.spec_dir, secrets=secrets, tags=tags, notes=notes)
    metadata["job"] = logged_settings(config)
    return metadata if config.seed is None else {**metadata, "seed": config.seed}


def _completion(config: RunConfig, step: int, stopped: str | None = None) -> Completion:
    """Return the outcome of the run, with its final checkpoint if it saved one."""
    path = config.checkpoints_dir / f"{FINAL_NAME}.json"
    try:
        return Completion.of_record(read_record(path), step, stopped)
    except FileNotFoundError:
        return Completion.of_record(None, step, stopped)
    except BrokenCheckpointError:  # an earlier run left it, and this one saves none
        return Completion(step, path, stopped)


def import_trainer(config: RunConfig) -> Any:
    """Import the job's trainer without constructing it.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: it cannot be imported or does not conform.
    """
    try:
        return find_trainer(config.trainer)
    except (Exception, SystemExit) as error:
        context = (
            "" if isinstance(error, ContractError) else f"importing {config.trainer!r} raised {type(error).__name__}: "
        )
        raise StartupContractError("startup.invalid_trainer", f"{context}{safe_str(error)}") from error


def prepare_training(
    config: RunConfig, plugin: Any, *, parquet_paths: Sequence[str] = (), brings_data: bool = False
) -> tuple[pl.Trainer, pl.LightningDataModule | None]:
    """Check a job and create its Lightning trainer and its data module.

    Args:
        config: The job.
        plugin: Its trainer class, or an instance of it.
        parquet_paths: Data files that its inputs downloaded.
        brings_data: Whether its inputs will download such files.

    Returns:
        The trainer and the data module, which is None if the trainer class collects its own data.

    Raises:
        StartupContractError: Hooks cannot be called, or the job needs a missing hook; its ``lightning`` block has
            unusable arguments, or does not fit the tasks of srun.
    """
    from ..cluster.placement import placement_fault
    from ..job.lightning_objects import instantiate
    from ..module.supported import check_trainer_arguments

    check_plugin(config, plugin)
    trainer, data = instantiate(config, parquet_paths=parquet_paths)
    has_own = any(optional_hook(plugin, hook) is not None for hook in ("rollout", "train_loader"))
    if data is None and not brings_data and not has_own:
        raise StartupContractError(
            "startup.invalid_job_spec",
            "The job names no data, and its trainer has neither `train_loader` nor `rollout`. Add "
            "`dataset.parquet_paths`, `inputs.dataset_parquet_refs`, `data` or `mock_batches`.",
        )
    check_trainer_arguments(trainer)
    if (fault := placement_fault(trainer)) is not None:
        raise StartupContractError("startup.invalid_job_spec", fault)
    return trainer, data


def check_plugin(config: RunConfig, plugin: Any) -> None:
    """Refuse a trainer class whose hooks do not fit the job; needs neither torch nor Lightning.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: hooks do not take their arguments;
            ``startup.invalid_job_spec``: the job has `validate`, and the trainer has no ``evaluate``.
    """
    if wrong := signature_faults(plugin):
        raise StartupContractError(
            "startup.invalid_trainer", f"{'; '.join(wrong)}. Give the hooks the parameters of the contract."
        )
    if config.validate is not None and optional_hook(plugin, "evaluate") is None:
        name = getattr(plugin, "__name__", type(plugin).__name__)
        raise StartupContractError(
            "startup.invalid_job_spec",
            f"{name} has no `evaluate(state, ctx)`. Add one, or remove `validate` from the job.",
        )
