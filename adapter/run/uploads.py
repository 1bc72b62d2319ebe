"""The uploads of a run: where they go, and what a killed attempt did not queue."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

import msgspec

from ...callbacks.checkpoint.format.record import CheckpointRecord
from ...callbacks.checkpoint.selection import enqueue, never_queued
from ...reporters.uploads import QUEUE_DIRECTORY, UploadConfig, Uploader
from ...reporters.uploads.queue import read_entries
from ..contract.exceptions import StartupContractError, UploadError
from ..job.config import RunConfig

__all__ = ["open_uploader", "queue_record", "upload_config"]

log = logging.getLogger(__name__)


def upload_config(config: RunConfig, **changes: Any) -> UploadConfig:
    """The uploads that the settings of a run ask for, with `changes` of `UploadConfig`.

    Raises:
        ValueError: As `UploadConfig`.
    """
    asked: dict[str, Any] = {
        "run_id": config.run_id,
        "queue_dir": config.artifacts_dir / QUEUE_DIRECTORY,
        "owner": config.owner,
        "token": config.capability_token,
        "file_store_url": config.file_store_url,
        "token_origins": sorted(config.token_origins),
        "roots": (config.checkpoints_dir, config.samples_dir),
        "deadline_s": config.upload_deadline_seconds,
        **msgspec.structs.asdict(config.uploads),
    }
    return UploadConfig(**(asked | changes))


def open_uploader(config: RunConfig) -> Uploader | None:
    """The uploader of a run, which still has to be started; None where nothing is to be sent.

    Raises:
        UploadError: A file of the queue is damaged.
        StartupContractError: Another run has the queue open; the queue cannot be written; a target is not a place for
            uploads; or the environment's proxies cannot be used.
    """
    wanted = upload_config(config)
    lacking = wanted.lacks_for_files()
    if lacking and bool(wanted.owner) != bool(wanted.token):  # else the store is there for `cozy:` references
        log.warning("%s", lacking)
    if not any(wanted.wants(kind) for kind in ("metrics", "checkpoint", "sample", "terminal")):
        _tell_of_what_waits(Path(wanted.queue_dir))
        return None
    try:
        return Uploader(wanted)
    except ValueError as error:
        raise StartupContractError("startup.invalid_job_spec", f"{error} Correct `uploads.targets`.") from error


def _tell_of_what_waits(queue_dir: Path) -> None:
    """A start without destinations delivers nothing, and would look as if all had arrived."""
    try:
        waiting = sum(entry.kind in ("checkpoint", "sample") for entry in read_entries(queue_dir))
    except (UploadError, OSError) as error:
        log.warning("what is waiting for upload cannot be determined: %s", error)
        return
    if waiting:
        run_dir = shlex.quote(str(queue_dir.parent))
        text = "uploads of earlier starts are waiting (%d), but no destination is set: set the URLs, or see %s"
        log.warning(text, waiting, f"`genlight uploads list {run_dir}`")


def queue_record(uploader: Uploader, record: CheckpointRecord) -> None:
    """Queue a checkpoint that a kill may have kept from its queue, and those before it that one kept from it.

    One that has arrived is known by its content.
    """
    for each in (*never_queued(uploader, record), record):
        enqueue(uploader, each)
