"""Upload of checkpoints, samples, metrics and the end of a run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ..adapter.contract.exceptions import BrokenCheckpointError
from ..adapter.plumbing.failures import describe_failure
from ..adapter.plumbing.redaction import secrets_of_module
from ..reporters.uploads import QUEUE_DIRECTORY, UploadConfig, Uploader
from ..reporters.uploads.destinations import target_fault
from .checkpoint.format.record import CheckpointRecord, read_record
from .checkpoint.listing import list_checkpoints
from .checkpoint.memory_tier import is_in_memory
from .checkpoint.policy import savers_of
from .checkpoint.selection import enqueue, find_checkpoint, never_queued, own_records
from .checkpoint.store import wait_after_failure
from .hook.cadence import Boundaries, step_cadence
from .hook.events import callbacks_of, hosted_by
from .hook.hook import Hook, RunContext

log = logging.getLogger(__name__)


class UploadArtifacts(Hook):
    """Queues every checkpoint, sample and metric of a run for upload without waiting for the network.

    Works with any LightningModule. It sends the checkpoints of `Checkpoint` with all their files, and keeps these
    files until they are delivered. It does not send files of Lightning's ``ModelCheckpoint``. For a trainer class, it
    sends the metrics that loggers receive. For other modules, it sends ``trainer.callback_metrics`` every
    `metric_every` steps.

    Endpoints, the file store, the token and the deadline come from the environment (``TRAINER_UPLOAD_METRICS_URL`` and
    so on, ``TENSORHUB_URL``, ``TRAINER_CAPABILITY_TOKEN``, ``TRAINER_UPLOAD_DEADLINE_SECONDS``), so that no
    configuration file holds a secret. The queue is the folder ``uploads`` in the trainer's ``default_root_dir``.

    Args:
        uploader: An uploader that the caller starts, waits for and closes. None creates an uploader for each fit. The
            end of the fit then waits for required uploads. If one cannot be delivered, the fit fails, and the next fit
            delivers it.
        run_id: Name of the run at the receiver; required without `uploader`.
        owner: Owner of the files in the file store.
        targets: Further destinations for checkpoints and samples, such as ``hf://owner/name`` or ``s3://bucket/prefix``.
        metric_every: Cadence of metrics in steps, for modules other than `ContractModule`; 0 turns it off.
        critical: Whether the run ends when the receiver refuses an upload permanently.

    Raises:
        ValueError: Neither `uploader` nor `run_id` is given, a number is out of range, or a URL is invalid.
    """

    _of_this_process = frozenset({"_external", "_run", "_uploader"})
    _external: Uploader | None = None
    _run: RunContext | None = None
    _uploader: Uploader | None = None

    def __init__(
        self,
        uploader: Uploader | None = None,
        *,
        run_id: str = "",
        owner: str = "",
        targets: Sequence[str] = (),
        metric_every: int = 10,
        critical: bool = True,
    ) -> None:
        self.critical = critical
        self.metric_every = step_cadence("metric_every", metric_every)
        self._external = self._uploader = uploader
        targets = targets if isinstance(targets, str) else tuple(targets)
        self._settings: dict[str, Any] = {"run_id": run_id, "owner": owner, "targets": targets}
        if uploader is None:
            self._make_config(queue_dir=QUEUE_DIRECTORY)  # raises for invalid settings before a fit begins
            if faults := [fault for target in targets if (fault := target_fault(target)) is not None]:
                raise ValueError(" ".join(faults))
        self._newest: CheckpointRecord | None = None
        self._metrics_due = Boundaries(self, every=metric_every)

    def _make_config(self, **folders: Any) -> UploadConfig:
        return UploadConfig.from_environment(os.environ, **folders, **self._settings)

    @property
    def waiting(self) -> int:
        """Number of checkpoints and samples that have not been delivered yet."""
        queue = None if self._uploader is None else self._uploader.queue
        return 0 if queue is None else len(queue.entries("checkpoint", "sample"))

    @override
    def join_run(self, run: RunContext) -> None:
        self._run = run

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._external is not None:
            return
        folders = [path for callback in callbacks_of(trainer) if (path := getattr(callback, "dirpath", None))]
        root = trainer.default_root_dir
        config = self._make_config(queue_dir=Path(root) / QUEUE_DIRECTORY, roots=[root, *folders])
        if lacking := config.file_store_fault():
            log.warning("%s", lacking)
        self._uploader = Uploader(config).__enter__()
        run = self._run
        if run is not None and run.uploader is None:  # from now on the run settles and closes it
            run.uploader = self._external = self._uploader
            run.requires_uploads, run.deadline_s = self.critical, config.deadline_s

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._metrics_due = Boundaries(self, trainer.global_step, every=self.metric_every)
        self._newest = None
        savers = savers_of(trainer)
        for saver in savers:
            saver.keep_while_in_use(self._waiting_files)
        if not savers and trainer.checkpoint_callbacks and self._uploader and self._uploader.config.wants("checkpoint"):
            log.warning(
                "UploadArtifacts does not send files of %s: give the trainer a `Checkpoint` of genlight.callbacks",
                ", ".join(type(callback).__name__ for callback in trainer.checkpoint_callbacks),
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Queue the checkpoint from which the run resumes, and earlier ones that a killed attempt did not queue.

        Delivered checkpoints are not sent again, and checkpoints of other runs are not sent. A checkpoint without a
        `run_id`, of a module that genlight does not host, belongs to this run if this fit saves to the same folder.
        """
        if self._uploader is None or trainer.ckpt_path is None:  # under FSDP, earlier events have no path
            return
        try:
            path = find_checkpoint(trainer.ckpt_path)
            record = read_record(path)
        except (FileNotFoundError, BrokenCheckpointError):  # it may not be a checkpoint of genlight
            return
        if is_in_memory(path):  # never sent; instead queue the newest on disk
            on_disk = (each for saver in savers_of(trainer) for each in own_records(list_checkpoints(saver.directory)))
            if (newest := max(on_disk, key=lambda each: each.step, default=None)) is None:
                return
            path, record = newest.path, newest
        is_in_folder = path.parent in [saver.directory for saver in savers_of(trainer)]
        if record.run_id == self._uploader.config.run_id or (not record.run_id and is_in_folder):
            for each in (*never_queued(self._uploader, record), record):
                self.on_checkpoint_durable(trainer, pl_module, each)

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        if self._uploader is not None:
            self._newest = record
            enqueue(self._uploader, record)

    @override
    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        if self._uploader is not None:
            self._uploader.enqueue_metrics(metrics, step)

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        self.on_metrics(trainer, pl_module, scores, step)

    @override
    def on_samples_written(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, samples: Mapping[Path, Sequence[Path]], step: int
    ) -> None:
        if self._uploader is not None:
            for record, files in samples.items():
                self._uploader.enqueue("sample", record, files, step=step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._uploader is None:
            return
        if self._uploader.failure is not None:
            raise self._uploader.failure
        if self._metrics_due.crosses(trainer.global_step) and hosted_by(pl_module) is None:
            self._uploader.enqueue_metrics(trainer.callback_metrics, trainer.global_step)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, None)

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._external is None:
            for saver in savers_of(trainer):  # Lightning calls their `on_exception` only after this callback's
                wait_after_failure(functools.partial(saver.wait, trainer))
        self._finish(trainer, exception)

    def _waiting_files(self) -> set[Path]:
        return set() if self._uploader is None else self._uploader.queue.unlinked_files()

    def _finish(self, trainer: pl.Trainer, error: BaseException | None) -> None:
        """Wait for required uploads, then send the terminal message; does nothing if the caller owns the uploader.

        Raises:
            UploadError: A required upload or the terminal message was not acknowledged, and the fit has no other
                `error`.
        """
        uploader = self._uploader
        if uploader is None or self._external is not None:
            return
        self._uploader = None
        step, final = trainer.global_step, None if self._newest is None else str(self._newest.reported_path)
        with contextlib.closing(uploader):
            refusal = uploader.settle(progress=log.info)
            if (ended_by := error or refusal) is None:
                unacknowledged = uploader.deliver_terminal("completed", step, final)
            else:  # send the failure even if an upload was refused
                secrets = secrets_of_module(trainer.lightning_module)
                text = describe_failure(ended_by, has_checkpoint=final is not None, secrets=secrets).text
                unacknowledged = uploader.deliver_terminal("failed", step, final, text)
        failure = refusal or unacknowledged
        if failure is not None and error is None:
            raise failure
        if failure is not None:
            log.error("uploads of the failed run: %s", failure)
