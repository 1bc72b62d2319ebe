"""Checkpoints, samples, metrics and the end of a run on their way to their receivers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from typing_extensions import override

from ..adapter.contract.exceptions import BrokenCheckpointError, ThreadLimitError, UploadError
from ..adapter.plumbing.failures import describe_failure
from ..adapter.plumbing.redaction import secrets_of_module
from ..adapter.plumbing.settings import keys_of
from ..reporters.uploads import QUEUE_DIRECTORY, UploadConfig, Uploader
from ..reporters.uploads.destinations import target_fault
from .checkpoint.format.record import CheckpointRecord, read_record
from .checkpoint.policy import savers_of, wait_after_failure
from .checkpoint.selection import enqueue, find_checkpoint, never_queued
from .hook.cadence import Boundaries
from .hook.events import callbacks_of
from .hook.hook import Hook

__all__ = ["UploadArtifacts"]

log = logging.getLogger(__name__)


class UploadArtifacts(Hook):
    """Queues every checkpoint, sample and metric of a run for upload without waiting for the network.

    Works with any LightningModule. Checkpoints are those of `Checkpoint`, with all their files, which stay until they
    are delivered whatever it keeps; files of Lightning's ``ModelCheckpoint`` are not sent. Metrics are those that
    genlight's loop reports; for other modules, ``trainer.callback_metrics`` every `metric_every` steps.

    Args:
        uploader: An uploader that the caller starts, waits for and closes. None creates one for each fit, whose end
            waits for required uploads. If something cannot be delivered, the fit fails, and the next one delivers it.
        run_id: Name of the run at the receiver; required without `uploader`.
        directory: Folder of the run, which holds the queue; None means the trainer's ``default_root_dir``.
        owner: Owner of the files in the file store.
        metrics_url: Endpoint for metrics. This and the URLs below default to the environment
            (``TRAINER_UPLOAD_METRICS_URL`` and so on, ``TENSORHUB_URL``). The token always comes from there
            (``TRAINER_CAPABILITY_TOKEN``), so that no configuration file holds one.
        checkpoint_url: Endpoint for checkpoints.
        sample_url: Endpoint for samples.
        terminal_url: Endpoint for the end of the run.
        file_store_url: Base of the file store for bytes.
        targets: Further destinations for checkpoints and samples, such as ``hf://owner/name`` or ``s3://bucket/prefix``.
        metric_every: Cadence of metrics in steps, for modules other than `ContractModule`; 0 turns it off.
        deadline_s: Seconds to wait for uploads at the end of a fit.
        critical: Whether the run ends when the receiver refuses an upload permanently.

    Raises:
        ValueError: Neither `uploader` nor `run_id` is given, a number is out of range, or a URL is none.
    """

    reads = ("loss_stats",)  # or a step could be queued before it is known that genlight's loop reports it

    def __init__(
        self,
        uploader: Uploader | None = None,
        *,
        run_id: str = "",
        directory: str | os.PathLike[str] | None = None,
        owner: str = "",
        metrics_url: str | None = None,
        checkpoint_url: str | None = None,
        sample_url: str | None = None,
        terminal_url: str | None = None,
        file_store_url: str | None = None,
        targets: Sequence[str] = (),
        metric_every: int = 10,
        deadline_s: float = 60.0,
        critical: bool = True,
    ) -> None:
        for name, value in (("metric_every", metric_every), ("deadline_s", deadline_s)):
            if not value >= 0:  # nan is not
                raise ValueError(f"Invalid `{name}`. Expected a number >= 0, but received {value}.")
        self.critical = critical
        self.metric_every = metric_every
        self._given = uploader
        self._config = None if uploader is None else uploader.config
        """Of an uploader that a caller made."""
        self._uploader = uploader
        self._directory = directory
        self._settings = {
            "run_id": run_id,
            "owner": owner,
            "metrics_url": metrics_url,
            "checkpoint_url": checkpoint_url,
            "sample_url": sample_url,
            "terminal_url": terminal_url,
            "file_store_url": file_store_url,
            "targets": targets if isinstance(targets, str) else tuple(targets),
            "deadline_s": deadline_s,
        }
        if uploader is None:
            require_usable(self._settings)
        self._hears_metrics = False
        """Whether events bring the metrics of this fit."""
        self._newest: CheckpointRecord | None = None
        self._metrics_due = Boundaries(self, every=metric_every)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy makes an uploader of its own, with the token of its environment.
        config = None if self._config is None else msgspec.structs.replace(self._config, token=None)
        return {**super().__getstate__(), "_given": None, "_uploader": None, "_config": config}

    @property
    def waiting(self) -> int:
        """How many checkpoints and samples have not been delivered yet."""
        queue = None if self._uploader is None else self._uploader.queue
        return 0 if queue is None else len(queue.entries("checkpoint", "sample"))

    # what a run reports

    def queue_samples(self, paths: Sequence[str | os.PathLike[str]], *, step: int) -> None:
        """Queue samples that are durable: each JSON or text with the files that follow it.

        Raises:
            UploadError: A file is missing, or the queue cannot be written; the other samples are queued all the same.
        """
        if self._uploader is None:
            return
        errors: list[UploadError] = []
        for sample, files in _samples_with_files([Path(path) for path in paths]):
            try:
                self._uploader.enqueue("sample", sample, files, step=step)
            except UploadError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # Lightning's events

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._given is not None:
            return
        directory = Path(self._directory if self._directory is not None else trainer.default_root_dir)
        self._uploader = open_uploader(trainer, directory, self._config or self._settings)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._hears_metrics = False
        self._metrics_due = Boundaries(self, trainer.global_step, every=self.metric_every)
        self._newest = None
        savers = savers_of(trainer)
        for saver in savers:
            saver.keep_while_in_use(self._waiting_files)
        if not savers and trainer.checkpoint_callbacks and self._uploader and self._uploader.config.wants("checkpoint"):
            log.warning(
                "UploadArtifacts sends no file of %s: give the trainer a `Checkpoint` of genlight.callbacks",
                ", ".join(type(callback).__name__ for callback in trainer.checkpoint_callbacks),
            )
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._take_over(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:  # FSDP knows only by now what it resumes from
            self._take_over(trainer)

    @override
    def on_checkpoint_durable(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, record: CheckpointRecord
    ) -> None:
        self._queue_record(record)

    @override
    def on_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Mapping[str, float], step: int
    ) -> None:
        self._hears_metrics = True
        self._queue_metrics(metrics, step)

    @override
    def on_scores(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, scores: Mapping[str, float], step: int
    ) -> None:
        self._queue_metrics(scores, step)

    @override
    def on_samples_written(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, paths: Sequence[Path], step: int
    ) -> None:
        self.queue_samples(paths, step=step)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._uploader is not None and self._uploader.failure is not None:
            raise self._uploader.failure

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._metrics_due.crosses(step) and not self._hears_metrics:
            self._queue_metrics(trainer.callback_metrics, step)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._given is None:
            self._finish(trainer, None)

    @override
    def on_training_failed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._uploader is not None and self._given is None:
            await_checkpoints(trainer)
            self._finish(trainer, exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._uploader is not None and self._given is None:
            self._close()

    def _take_over(self, trainer: pl.Trainer) -> None:
        """Begin where the run that is resumed ended."""
        if trainer.ckpt_path is not None:
            self._queue_resumed(Path(trainer.ckpt_path), [saver.directory for saver in savers_of(trainer)])

    def _queue_resumed(self, path: Path, own_directories: Sequence[Path]) -> None:
        """Queue what the run resumes from, and what came before: its last process may have been killed before it did.

        What was delivered before is not sent again, and another run's checkpoint is not ours to send. One without a
        `run_id`, of a module that genlight does not host, is ours where this fit goes on saving.
        """
        if self._uploader is None:
            return
        try:
            found = find_checkpoint(path)
        except FileNotFoundError:
            return
        record = record_at(found)
        if record is None:
            return
        if record.run_id == self._uploader.config.run_id or (not record.run_id and found.parent in own_directories):
            for older in never_queued(self._uploader, record):
                self._queue_record(older)
            self._queue_record(record)

    def _queue_record(self, record: CheckpointRecord) -> None:
        if self._uploader is None:
            return
        self._newest = record
        if not record.path.exists():
            log.warning("%s was deleted before it could be queued for upload; keep more checkpoints", record.path)
            return
        enqueue(self._uploader, record)

    def _waiting_files(self) -> set[Path]:
        return set() if self._uploader is None else self._uploader.queue.unlinked_files()

    def _queue_metrics(self, metrics: Any, step: int) -> None:
        if self._uploader is not None:
            self._uploader.enqueue_metrics({name: float(value) for name, value in metrics.items()}, step)

    def _finish(self, trainer: pl.Trainer, error: BaseException | None) -> None:
        assert self._uploader is not None
        try:
            settle_fit(self._uploader, trainer, error, self._newest)
        finally:
            self._close()

    def _close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None


def _samples_with_files(paths: Sequence[Path]) -> list[tuple[Path, list[Path]]]:
    """Each sample with the files of its own folder, which follow it."""
    samples: list[tuple[Path, list[Path]]] = []
    for path in paths:
        if samples and path.is_relative_to(samples[-1][0].with_suffix("")):
            samples[-1][1].append(path)
        else:
            samples.append((path, []))
    return samples


def require_usable(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of ``UploadConfig`` before a fit begins.

    Raises:
        ValueError: Some cannot be used; all of them are named.
    """
    UploadConfig(queue_dir=QUEUE_DIRECTORY, **settings)
    if faults := [fault for target in settings["targets"] if (fault := target_fault(target)) is not None]:
        raise ValueError(" ".join(faults))


def open_uploader(trainer: pl.Trainer, directory: Path, settings: UploadConfig | Mapping[str, Any]) -> Uploader:
    """An uploader that runs, with the token of the environment.

    Args:
        trainer: The trainer whose files are uploaded.
        directory: Folder of the run, in which the queue lies unless `settings` are whole.
        settings: The configuration, or arguments of ``UploadConfig.from_environment``.

    Raises:
        StartupContractError: ``startup.invalid_artifact_paths``: the queue cannot be written.
    """
    if isinstance(settings, UploadConfig):
        given = os.environ.get(keys_of(UploadConfig)["token"].variable, "").strip()
        config = msgspec.structs.replace(settings, token=given or None)
    else:
        folders = [path for callback in callbacks_of(trainer) if (path := getattr(callback, "dirpath", None))]
        arguments = {"roots": [trainer.default_root_dir, *folders], **settings}
        config = UploadConfig.from_environment(os.environ, queue_dir=directory / QUEUE_DIRECTORY, **arguments)
    uploader = Uploader(config)
    if lacking := config.lacks_for_files():
        log.warning("%s", lacking)
    try:
        uploader.start()
    except ThreadLimitError:
        uploader.close()
        raise
    return uploader


def settle_fit(
    uploader: Uploader, trainer: pl.Trainer, error: BaseException | None, newest: CheckpointRecord | None
) -> None:
    """Wait for required uploads, then send the terminal message, which says how the fit ended.

    Args:
        uploader: Stays open.
        trainer: The trainer whose fit has ended.
        error: What ended it; None where it ended as planned.
        newest: The newest checkpoint.

    Raises:
        UploadError: A required upload, or the terminal message, was not acknowledged, and the fit has no other
            `error` to end with.
    """
    refusal = uploader.settle(progress=log.info)
    ended_by, step, text = error if error is not None else refusal, trainer.global_step, ""
    checkpoint = None if newest is None else str(newest.reported_path)
    if ended_by is not None:  # with the text that the event log gets too
        secrets = secrets_of_module(trainer.lightning_module)
        text = describe_failure(ended_by, has_checkpoint=checkpoint is not None, secrets=secrets).text
    # Sent whether or not an upload was refused.
    unacknowledged = uploader.deliver_terminal("failed" if text else "completed", step, checkpoint, text)
    failure = refusal or unacknowledged
    if failure is not None and error is None:
        raise failure
    if failure is not None:
        log.error("uploads of the failed run: %s", failure)


def await_checkpoints(trainer: pl.Trainer) -> None:
    """Have checkpoints in flight become durable: after an exception these callbacks get their turn after this one."""
    for saver in savers_of(trainer):
        wait_after_failure(functools.partial(saver.wait, trainer))


def record_at(path: Path) -> CheckpointRecord | None:
    """The commit record at `path`; None for a checkpoint of another format."""
    if path.is_dir():
        return None
    with path.open("rb") as file:
        if file.read(1) != b"{":
            return None
    try:
        return read_record(path)
    except BrokenCheckpointError:
        return None
