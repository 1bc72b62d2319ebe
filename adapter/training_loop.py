"""The contract's loop for callers with their own reporter, writer and uploader."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from ..callbacks.hook.cadence import crossed, suppressed
from ..callbacks.hook.events import publish_metrics, run_state_of
from ..callbacks.hook.hook import Hook
from .contract.types import (
    ArtifactUploader,
    ArtifactWriter,
    BatchSource,
    StepContext,
    TrainerPlugin,
    TrainingJobSpec,
    TrainingReporter,
)
from .module.module import ContractModule
from .plumbing.devices import accelerator, isolated_random_numbers, release_memory

log = logging.getLogger(__name__)


def run_training_loop(
    job: TrainingJobSpec,
    ctx: StepContext,
    trainer: TrainerPlugin,
    batches: Iterable[Any] | BatchSource,
    reporter: TrainingReporter,
    artifact_writer: ArtifactWriter,
    uploader: ArtifactUploader | None = None,
    start_step: int = 0,
    resume_state_payload: dict[str, object] | None = None,
    resume_checkpoint_path: str | Path | None = None,
) -> int:
    """Train on one device: the device of `ctx` if this machine has it, or else the CPU.

    All calls of `reporter`, `artifact_writer` and `uploader` for a step are made before the next step begins. The final
    artifact is written while the modules are still on their device.

    Args:
        job: Identity, step limit and cadences.
        ctx: Context for the trainer. Its ``device``, ``rank``, ``world_size`` and ``run_state`` are filled in. If its
            ``dataset`` is None, it becomes `batches`.
        trainer: The trainer.
        batches: One pass of raw batches: an iterable, or an object whose ``iter_batches()`` returns one.
        reporter: Receives events; its ``is_canceled()`` is called before the first step and after every step.
        artifact_writer: Writes checkpoints, samples and the final artifact.
        uploader: Sends metrics, and each checkpoint and sample after it was written. The caller uploads the final
            artifact and reports completion.
        start_step: Steps that count as completed; no batch is skipped for them.
        resume_state_payload: Argument for the trainer's ``load_state_dict``.
        resume_checkpoint_path: Checkpoint for the trainer's ``load_checkpoint``: its directory, or its record.

    Returns:
        The number of completed steps, including the `start_step` steps before this call.

    Raises:
        TrainingCanceled: The reporter requested a stop.
        BaseException: The exception that ended training, after ``reporter.failed``.
    """
    context = ctx if ctx.dataset is not None else dataclasses.replace(ctx, dataset=batches)
    module = ContractModule(trainer, job, context=context)
    module.resume_from(
        step=start_step,
        payload=resume_state_payload,
        checkpoint_dir=None if resume_checkpoint_path is None else _trainer_directory(Path(resume_checkpoint_path)),
    )
    caller = _Caller(module, reporter, artifact_writer, uploader)
    try:
        one_device = pl.Trainer(
            **_arguments_of_device(torch.device(ctx.device)),
            max_steps=job.max_steps,
            max_epochs=1,
            callbacks=[caller],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            limit_val_batches=0,
        )
        one_device.fit(module, BatchStream(batches))
        if not caller.has_finished:  # no step was left to train
            caller.finish()
    except BaseException as error:
        # Lightning turns a KeyboardInterrupt into a SystemExit.
        cause = error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error
        try:
            reporter.failed(step=module.failed_step or start_step, error=str(cause) or type(cause).__name__)
        except Exception:
            log.exception("the reporter's failed() raised; the failure of training is raised instead")
        if cause is error:
            raise
        raise cause from None
    return module.completed_steps


class BatchStream:
    """Raw batches as one loader; Lightning would treat a list of batches as a list of loaders."""

    def __init__(self, source: Iterable[Any] | BatchSource) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        iter_batches = getattr(self.source, "iter_batches", None)
        return iter(iter_batches() if iter_batches is not None else self.source)  # type: ignore[arg-type]


def _arguments_of_device(device: torch.device) -> dict[str, Any]:
    """Return the Lightning trainer's arguments for one device, or for the CPU if the device does not exist."""
    here = accelerator()
    if here is None or here.type != device.type:
        return {"accelerator": "cpu", "devices": 1}
    index = device.index or 0
    if device.type in ("cuda", "mps"):
        return {"accelerator": device.type, "devices": [index]}
    # Lightning would use the CPU instead of a device that it does not know.
    return {"strategy": SingleDeviceStrategy(torch.device(device.type, index), accelerator=_OneDevice())}


class _OneDevice(CPUAccelerator):
    """An accelerator for any device of torch; the strategy chooses the device."""

    @override
    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    @override
    def teardown(self) -> None:
        release_memory()


def _trainer_directory(path: Path) -> Path:
    """Return the folder that the trainer's ``save_checkpoint`` wrote, given this folder or a checkpoint's record."""
    if path.is_dir():
        return path
    in_genlight, in_older_runtime = path.with_suffix("") / "trainer", path.with_suffix("")
    return next((folder for folder in (in_genlight, in_older_runtime) if folder.is_dir()), path.parent)


class _Caller(Hook):
    """Passes the events of the loop to the caller's reporter, writer and uploader."""

    critical = True
    writes = ("loss_stats",)

    def __init__(
        self,
        module: ContractModule,
        reporter: TrainingReporter,
        writer: ArtifactWriter,
        uploader: ArtifactUploader | None,
    ) -> None:
        self.module, self.reporter, self.writer, self.uploader = module, reporter, writer, uploader
        self.has_finished = False

    @override
    def on_new_training_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.reporter.started(run_id=self.module.ctx.job.run_id)
        self._check_for_stop(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        job, step = self.module.ctx.job, trainer.global_step
        acts = (
            (job.metric_every, self._metrics),
            (job.checkpoint_every, self._checkpoint),
            (job.sample_every, self._samples),
        )
        for every, act in () if suppressed(self.module) else acts:
            if crossed(step - 1, step, every):
                act(step)
        self._check_for_stop(trainer)

    @override
    def on_training_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish()  # the modules are still on their device

    def finish(self) -> None:
        """Write the final artifact, then report ``completed``; the caller uploads the final artifact itself."""
        step = self.module.completed_steps
        self.reporter.completed(step=step, final_checkpoint=self.writer.finalize(**self._payload()))
        self.has_finished = True

    def _check_for_stop(self, trainer: pl.Trainer) -> None:
        if self.reporter.is_canceled():
            run_state_of(trainer).stop_reason = getattr(self.reporter, "cancel_reason", None) or "canceled"

    def _metrics(self, step: int) -> None:
        metrics = self.module.metrics()
        publish_metrics(self.module.trainer, metrics, step)
        for name, value in metrics.items():
            self.reporter.metric(name=name, value=value, step=step)
        if self.uploader is not None and metrics:
            self.uploader.upload_metrics(metrics=metrics, step=step)

    def _checkpoint(self, step: int) -> None:
        path = self.writer.write_checkpoint(step=step, **self._payload())
        self.reporter.checkpoint(path=path, step=step)
        if self.uploader is not None:
            self.uploader.upload_checkpoint(local_path=path, step=step)

    def _samples(self, step: int) -> None:
        with isolated_random_numbers():
            paths = list(self.writer.write_samples(step=step, state=self.module.contract_state, ctx=self.module.ctx))
        for path in paths:
            self.reporter.sample(path=path, step=step)
            if self.uploader is not None:
                self.uploader.upload_sample(local_path=path, step=step)

    def _payload(self) -> dict[str, Any]:
        module = self.module
        payload = module.hosted_trainer.state.payload()
        return {"state_payload": payload, "trainer": module.plugin, "state": module.contract_state, "ctx": module.ctx}
