"""The report of a run that could not start, wherever its settings still name a place for one.

Apart from `Session`, which needs a folder that it holds: here it is the folder or the settings that cannot be used.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...reporters.events.event_log import EventLog
from ...reporters.uploads import TerminalPayload, UploadConfig, Uploader
from ..contract.exceptions import EventLogError, GenlightError, StartupContractError
from ..job.config import ARTIFACT_FOLDERS, UNKNOWN_RUN_ID, RunConfig
from ..plumbing.failures import EXIT_STARTUP, Failure, describe_failure
from .artifact_dirs import untrusted_dirs
from .failure_report import log_failure
from .ranks.this_rank import is_rank_zero

__all__ = ["log_of_failed_start", "report_startup_failure"]

log = logging.getLogger(__name__)

STARTUP_DEADLINE_S = 10.0
"""How long a run that cannot start tries to say so."""


def report_startup_failure(
    error: Exception, config: RunConfig, *, is_from_file: bool, environ: Mapping[str, str] | None = None
) -> int:
    """Say why a run could not start, and leave a ``failed`` event where there is a place for it.

    Args:
        error: What kept it from starting.
        config: What can be told of the run; every sound setting counts, whatever is wrong with the others.
        is_from_file: Whether the caller named a job file, beside which artifacts go by default.
        environ: The environment; None takes the process's own.

    Returns:
        The exit code.
    """
    failure = describe_failure(error, stage="startup", has_checkpoint=False, secrets=config.secrets, environ=environ)
    log_failure(error, failure, secrets=config.secrets, environ=environ)
    if not is_rank_zero():
        return EXIT_STARTUP
    _send_terminal_message(config, failure)
    path = log_of_failed_start(config, is_from_file=is_from_file)
    in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
    if path is not None and not in_use:
        try:
            with EventLog(path, run_id=config.run_id or UNKNOWN_RUN_ID) as event_log:
                # Nothing began, so a restart has nothing to continue, whatever ended the start.
                event_log.record_failure(replace(failure, resumable=False), step=0)
        except (OSError, EventLogError, ValueError) as problem:
            log.error("the failed event was not written to %s: %s", path, problem)  # noqa: TRY400
    return EXIT_STARTUP


def log_of_failed_start(config: RunConfig, *, is_from_file: bool) -> Path | None:
    """The event log of a run that could not start; None where its folder is not known, or others may write there."""
    paths = {name: getattr(config, name) for name in (*ARTIFACT_FOLDERS, "events_path")}
    is_given = any(config.source_of(name) != "default" for name in ("artifacts_dir", "metrics_dir", "events_path"))
    is_known = is_given or bool(config.run_id) or not is_from_file  # beside a file the folder has the run's name
    is_safe = config.shared_artifacts or not untrusted_dirs(paths)
    return config.events_path if is_known and is_safe else None


def _send_terminal_message(config: RunConfig, failure: Failure) -> None:
    """Send the terminal message of a run that could not start, where its URL is known; a failure is only logged."""
    if config.uploads.terminal_url is None:
        return
    with tempfile.TemporaryDirectory() as spool:
        target = UploadConfig(
            run_id=config.run_id or UNKNOWN_RUN_ID,
            spool_dir=Path(spool),
            token=config.token,
            terminal_url=config.uploads.terminal_url,
            deadline_s=STARTUP_DEADLINE_S,
        )
        error: GenlightError | OSError | None
        try:
            with contextlib.closing(Uploader(target)) as uploader:  # which needs no thread for this message
                error = uploader.deliver_terminal(TerminalPayload("failed", 0, error=failure.text)).error()
        except (GenlightError, OSError) as problem:
            error = problem
    if error is not None:
        log.error("the failure could not be reported: %s", error)
