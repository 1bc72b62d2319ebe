"""The uploader of a fit that no caller has made one for: opened when the fit begins, settled when it ends."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from ..adapter.contract.exceptions import BrokenCheckpointError, StartupContractError, ThreadLimitError
from ..adapter.plumbing.failures import describe_failure
from ..adapter.plumbing.redaction import secrets_of_module
from ..reporters.uploads import SPOOL_DIRECTORY, TerminalPayload, UploadConfig, Uploader
from ..reporters.uploads.config import ENVIRONMENT
from ..reporters.uploads.targets import target_fault
from .checkpoint.format.record import CheckpointRecord
from .checkpoint.format.record_file import read_record
from .checkpoint.policy import Checkpoint, wait_after_failure
from .hook.events import callbacks_of

__all__ = ["await_checkpoints", "model_checkpoints", "open_uploader", "record_at", "settle_fit"]

log = logging.getLogger(__name__)


def require_usable(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of ``UploadConfig`` before a fit begins.

    Raises:
        ValueError: Some cannot be used; all of them are named.
    """
    UploadConfig(spool_dir=SPOOL_DIRECTORY, **settings)
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
        config = replace(settings, token=os.environ.get(ENVIRONMENT["token"], "").strip() or None)
    else:
        folders = [path for callback in callbacks_of(trainer) if (path := getattr(callback, "dirpath", None))]
        arguments = {"roots": [trainer.default_root_dir, *folders], **settings}
        config = UploadConfig.from_environment(os.environ, spool_dir=directory / SPOOL_DIRECTORY, **arguments)
    try:
        uploader = Uploader(config)
    except OSError as error:
        raise StartupContractError(
            "startup.invalid_artifact_paths",
            f"The upload queue {str(config.spool_dir)!r} cannot be written: {error.strerror or error}. "
            "Choose another `directory`.",
        ) from error
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
        newest: The newest checkpoint of genlight's own format.

    Raises:
        UploadError: A required upload, or the terminal message, was not acknowledged, and the fit has no other
            `error` to end with.
    """
    refusal = uploader.settle(progress=log.info).error()
    payload = _terminal(trainer, error if error is not None else refusal, uploader.starts, newest)
    unacknowledged = uploader.deliver_terminal(payload).error()  # sent whether or not an upload was refused
    failure = refusal or unacknowledged
    if failure is not None and error is None:
        raise failure
    if failure is not None:
        log.error("uploads of the failed run: %s", failure)


def _terminal(
    trainer: pl.Trainer, error: BaseException | None, attempt: int, newest: CheckpointRecord | None
) -> TerminalPayload:
    """How the run ended, with the text that its event log gets too."""
    step = trainer.global_step
    of_lightning = [callback.last_model_path or callback.best_model_path for callback in model_checkpoints(trainer)]
    own = None if newest is None else str(newest.reported_path)
    checkpoint = next(filter(None, of_lightning), own)
    if error is None:
        return TerminalPayload("completed", step, checkpoint, attempt=attempt)
    secrets = secrets_of_module(trainer.lightning_module)
    text = describe_failure(error, has_checkpoint=checkpoint is not None, secrets=secrets).text
    return TerminalPayload("failed", step, checkpoint, error=text, attempt=attempt)


def await_checkpoints(trainer: pl.Trainer) -> None:
    """Have checkpoints in flight become durable: after an exception these callbacks get their turn after this one."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, Checkpoint):
            wait_after_failure(functools.partial(callback.wait, trainer))


def model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    """Lightning's own checkpoint callbacks of `trainer`."""
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelCheckpoint)]


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
