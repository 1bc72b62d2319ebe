"""The training of an attempt: its start, its inputs, and the Lightning fit, on every rank.

Modules that load torch are imported only once there is something to train.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks.checkpoint.format.layout import FINAL_NAME
from ...callbacks.checkpoint.format.record import CheckpointRecord, RecordMeta
from ...callbacks.checkpoint.format.record_file import read_record
from ...callbacks.checkpoint.storage.commit import sweep
from ...callbacks.stop.signals import StopSignals
from ...callbacks.stop.sources import StopSources
from ..contract.exceptions import BrokenCheckpointError, ContractError, StartupContractError, TrainingCanceled
from ..helpers import seed_everything
from ..inputs import MaterializedInputs, materialize_inputs
from ..inputs.progress import shown_progress
from ..job.config import RunConfig
from ..job.identity import numbers_of, sealed_fields
from ..job.parser_errors import is_about_what_was_given
from ..module.plugin_loading import find_trainer, make_trainer, misspelled_hooks, on_sys_path
from ..plumbing.redaction import text_of
from ..plumbing.run_metadata import project_folder, run_metadata
from .other_weights import about_other_weights
from .outcome import Completion, Outcome
from .port_in_use import about_port_in_use
from .preflight import prepare_training
from .progress import Progress
from .ranks.child_processes import RankProcesses, watching_node
from .ranks.failure_notes import watch_ranks
from .ranks.launcher_watch import launcher_check
from .ranks.paused_ranks import watching_paused_ranks
from .ranks.rank_zero_watch import rank_zero_announced
from .ranks.rendezvous_watch import watching_rendezvous
from .results import shown_path
from .resume import Start, decide_start
from .shadow import check_shadow_start, shadowed
from .uploads import queue_record

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..contract.types import TrainerPlugin
    from ..module.module import ContractModule

__all__ = ["Training", "stop_sources"]

log = logging.getLogger(__name__)


def stop_sources(config: RunConfig, signals: StopSignals) -> StopSources:
    """What can ask the run of `config` to stop; others add their checks to it."""
    stop = StopSources(
        config.cancel_file, max_runtime_s=config.max_runtime_s, canceled=config.canceled, signals=signals
    )
    stop.add_check(launcher_check())
    return stop


class Training:
    """One attempt to train.

    Args:
        config: The run.
        stop: The sources of a stop.
        progress: Where the attempt notes how far it came.
        outcome: What reports the end; None on ranks other than rank zero.
        end_now: Reports a failure from a thread that watches the training, and ends the process.
    """

    def __init__(
        self,
        config: RunConfig,
        stop: StopSources,
        progress: Progress,
        outcome: Outcome | None,
        end_now: Callable[[Exception], None],
    ) -> None:
        self.config = config
        self.stop = stop
        self.progress = progress
        self.outcome = outcome
        self.end_now = end_now

    def run(self, *, allow_changed: bool, shadow: int = 0) -> Completion:
        """Train from what the run's folder holds to the end of the job.

        Args:
            allow_changed: Resume although the job is not that of the checkpoint.
            shadow: How many of the first steps are compared with a plain loop.

        Raises:
            TrainingCanceled: The run was stopped.
        """
        config = self.config
        self.stop.raise_if_signalled()
        from_ref = config.inputs.resume_checkpoint_ref is not None
        self.progress.preparing = "input"
        start = Start() if from_ref else decide_start(config, allow_changed=allow_changed)
        for warning in start.warnings:
            log.warning(warning)
        if start.is_finished:
            return self._already_finished(start)
        self.stop.raise_if_stopped()
        with shown_progress() as progress:
            inputs = materialize_inputs(config, progress=progress, raise_if_stopped=self.stop.raise_if_stopped)
        if from_ref:
            start = decide_start(config, resume_checkpoint=inputs.resume_checkpoint, allow_changed=allow_changed)
        if start.record is not None and self.outcome is not None:
            place = shown_path(start.record.path)
            log.info("going on after step %d of %d, from %s", start.record.step, config.job.max_steps, place)
        self.progress.preparing = "model-load"
        if config.seed is not None:
            seed_everything(config.seed)
        with on_sys_path([config.spec_dir, Path.cwd()]):
            return self._train(_load_trainer(config), inputs, start, shadow)

    def _already_finished(self, start: Start) -> Completion:
        assert start.record is not None
        if self.outcome is not None:
            sweep(self.config.checkpoints_dir)  # A kill may have come after the last commit.
            self.outcome.event_log.started(metadata=self._metadata(self.config.spec_dir))
            if self.outcome.uploader is not None:
                queue_record(self.outcome.uploader, start.record)
        log.info("run %s has completed before; nothing to train", self.config.run_id)
        return Completion(start.finished_step, _reported_final(self.config))

    def _train(self, plugin: TrainerPlugin, inputs: MaterializedInputs, start: Start, shadow: int) -> Completion:
        from ..module.module import ContractModule
        from ..module.trainer_files import trainer_directory

        if self.outcome is not None:
            for misspelled in misspelled_hooks(plugin):
                log.warning(misspelled)
        paths = [str(path) for path in inputs.parquet_paths]
        trainer, data = prepare_training(self.config, plugin, parquet_paths=paths)
        module = self.progress.module = ContractModule(
            plugin,
            self.config.job,
            model_handles=inputs.model_handles(),
        )
        record = start.record
        beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if shadow and check_shadow_start(shadow, None if record is None else record.step):
            beside = self._shadowed(trainer, inputs, shadow)
        if record is not None and record.is_old:
            folder = trainer_directory(record.path, plugin)
            module.resume_from(step=record.step, payload=record.state, checkpoint_dir=folder)
        resumes = record is not None and not record.is_old
        with beside:
            self._attach(trainer, plugin, self._metadata(project_folder(plugin)))
            self._continue_runs(trainer, record)
            with self._watching_ranks(trainer), watching_rendezvous(trainer, self.stop.raise_if_stopped, self.end_now):
                self._fit(trainer, module, data, ckpt_path=str(record.path) if record and resumes else None)
        return Completion(module.completed_steps, _reported_final(self.config), module.stopped)

    def _shadowed(
        self, trainer: pl.Trainer, inputs: MaterializedInputs, steps: int
    ) -> contextlib.AbstractContextManager[None]:
        return shadowed(
            self.config,
            trainer,
            steps,
            parquet_paths=[str(path) for path in inputs.parquet_paths],
            model_handles=inputs.model_handles(),
            compares=self.outcome is not None,
            event_log=None if self.outcome is None else self.outcome.event_log,
            look=self.stop.raise_if_stopped,
        )

    def _fit(
        self, trainer: pl.Trainer, module: ContractModule, data: pl.LightningDataModule | None, *, ckpt_path: str | None
    ) -> None:
        from lightning.fabric.utilities.exceptions import MisconfigurationException

        from ...callbacks.monitor_errors import monitor_error

        if self.outcome is not None:
            self.stop.signals.what_next = "the run saves a checkpoint after the current step, and stops"
        try:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        except (ValueError, RuntimeError, MisconfigurationException) as error:
            if about_it := monitor_error(error) or about_other_weights(error) or about_port_in_use(error):
                raise about_it from error
            if isinstance(error, RuntimeError):
                raise
            if self.progress.stage == "train-step" or not is_about_what_was_given(error, by=("lightning.",)):
                raise
            text = f"The `lightning` block of the job cannot be used: {text_of(error).strip()}"
            raise StartupContractError("startup.invalid_job_spec", text) from error
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes one of the other
                raise TrainingCanceled("canceled") from error.__context__
            raise

    @contextlib.contextmanager
    def _watching_ranks(self, trainer: pl.Trainer) -> Iterator[None]:
        """End the run when another rank fails, also while this one hangs in a collective."""
        if trainer.world_size == 1:
            yield
            return
        children = RankProcesses(trainer)
        self.stop.signals.before_exit = children.kill_at_once
        if self.outcome is None:
            with watching_node(children, self.end_now):
                yield
            return
        ranks = self.outcome.rank_failures
        ranks.expects_ranks = True
        ranks.children = children
        self.outcome.children = children
        stop = watch_ranks(ranks, self.outcome.fail_and_exit)
        try:
            with rank_zero_announced(), watching_paused_ranks(children.ids, self.stop.is_stopping, self.end_now):
                yield
        finally:
            stop()
            self.stop.signals.before_exit = lambda: None

    def _metadata(self, project: Path) -> dict[str, Any]:
        """How this attempt came to be; only rank zero writes it down."""
        config = self.config
        if self.outcome is None:
            return {}
        found = run_metadata(project, secrets=config.secrets, tags=config.tags, notes=config.notes)
        return found if config.seed is None else {**found, "seed": config.seed}

    def _attach(self, trainer: pl.Trainer, plugin: TrainerPlugin, metadata: Mapping[str, Any]) -> None:
        """Give the callbacks and loggers that were made from the configuration what lives in this process."""
        from ...callbacks.hook.events import callbacks_of, run_state_of
        from ...callbacks.hook.run_context import RunContext, join_run
        from ...callbacks.upload_artifacts import UploadArtifacts
        from ...reporters.events.event_logger import RecordEvents
        from .ranks.node_check import NodeCheck

        event_log = None if self.outcome is None else self.outcome.event_log
        attempt = 1 if event_log is None else event_log.attempt
        state = self.stop.run_state = run_state_of(trainer)
        state.run_id, state.attempt = self.config.run_id, attempt
        join_run(trainer, RunContext(self.stop, self._record_meta(attempt, metadata), self.end_now, event_log))
        if trainer.num_nodes > 1:
            callbacks_of(trainer).append(NodeCheck(self.config.artifacts_dir, plugin))
        if event_log is not None:
            callbacks_of(trainer).insert(0, RecordEvents(event_log, metadata))
        if self.outcome is not None and self.outcome.uploader is not None:
            callbacks_of(trainer).append(UploadArtifacts(self.outcome.uploader))

    def _continue_runs(self, trainer: pl.Trainer, record: CheckpointRecord | None) -> None:
        """Have W&B and MLflow go on with the runs of the last attempt where this one goes on with its training."""
        from ...callbacks.tracking.continue_runs import continue_runs

        if self.outcome is None:
            return
        config = self.config
        step = (0 if config.resume_from_latest else None) if record is None else record.step
        if record is not None and record.spec_digest not in (None, config.spec_digest):
            step = None  # another training, with hyperparameters of its own, which MLflow does not change
        continue_runs(trainer, config.events_path.parent, resumed_step=step, events_path=config.events_path)

    def _record_meta(self, attempt: int, metadata: Mapping[str, Any]) -> RecordMeta:
        """What every checkpoint of this run says of it."""
        config = self.config
        return RecordMeta(
            run_id=config.run_id,
            attempt=attempt,
            max_steps=config.job.max_steps,
            spec_digest=config.spec_digest,
            spec=sealed_fields(config.spec_fields, numbers=numbers_of(config.job.hyperparams)),
            metadata=metadata,
        )


def _reported_final(config: RunConfig) -> Path | None:
    """What stands for the final checkpoint in reports: what the trainer's hook named, else the record."""
    final = config.checkpoints_dir / f"{FINAL_NAME}.json"
    try:
        return read_record(final).reported_path
    except FileNotFoundError:
        return None
    except BrokenCheckpointError:  # of an earlier run, where this one saves none
        return final


def _load_trainer(config: RunConfig) -> TrainerPlugin:
    """The trainer of the job; what its constructor raises passes as it is.

    Raises:
        StartupContractError: ``startup.invalid_trainer``: it cannot be imported or does not conform.
    """
    try:
        target = find_trainer(config.trainer)
    except (Exception, SystemExit) as error:
        context = "" if isinstance(error, ContractError) else f"importing {config.trainer!r} raised {_kind(error)}: "
        raise StartupContractError("startup.invalid_trainer", f"{context}{text_of(error)}") from error
    return make_trainer(target)


def _kind(error: BaseException) -> str:
    return type(error).__name__
