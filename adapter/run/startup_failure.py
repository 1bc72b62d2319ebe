"""The report of a run that could not start, wherever its settings still name a place for one."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...reporters.events.event_log import EventLog
from ...reporters.uploads import TerminalPayload, UploadConfig, Uploader
from ..contract.exceptions import EventLogError, GenlightError, StartupContractError
from ..job.config import ARTIFACT_FOLDERS, UNKNOWN_RUN_ID, read_run_config
from ..plumbing.failures import EXIT_STARTUP, Failure, describe_failure
from .artifact_dirs import untrusted_dirs
from .failure_report import log_failure
from .ranks.this_rank import is_rank_zero

__all__ = ["UNKNOWN_RUN_ID", "FailureSinks", "report_startup_failure", "resolve_failure_sinks"]

log = logging.getLogger(__name__)

STARTUP_DEADLINE_S = 10.0
"""How long a run that cannot start tries to say so."""


@dataclass(frozen=True)
class FailureSinks:
    """Where the failure of a start goes; None where that could not be told."""

    run_id: str
    events_path: Path | None
    terminal_url: str | None = field(repr=False)
    token: str | None = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What no report may show; the token is one of them."""


def resolve_failure_sinks(
    *,
    spec_path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    default_artifacts_dir: str | os.PathLike[str] | None = None,
) -> FailureSinks:
    """What can be told of a run whose settings have faults; takes the arguments of `resolve_run_config`.

    Every sound setting counts, whatever is wrong with the others.
    """
    config, _ = read_run_config(
        spec_path=spec_path, overrides=overrides, environ=environ, default_artifacts_dir=default_artifacts_dir
    )
    paths = {name: getattr(config, name) for name in (*ARTIFACT_FOLDERS, "events_path")}
    template = default_artifacts_dir or ("" if spec_path is None else "{run_id}")
    placed = bool(config.run_id) or "{run_id}" not in str(template)
    safe = config.shared_artifacts or not untrusted_dirs(paths)
    given = any(config.source_of(name) != "default" for name in ("artifacts_dir", "metrics_dir", "events_path"))
    return FailureSinks(
        run_id=config.run_id or UNKNOWN_RUN_ID,
        events_path=config.events_path if safe and (placed or given) else None,
        terminal_url=config.uploads.terminal_url,
        token=config.token,
        secrets=config.secrets,
    )


def report_startup_failure(
    error: Exception,
    *,
    spec_path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> int:
    """Say why a run could not start, and leave a ``failed`` event where there is a place for it.

    Args:
        error: What kept it from starting.
        spec_path: The job file, as for `resolve_run_config`, like the two others.
        overrides: Settings of the command line.
        environ: The environment; None takes the process's own.

    Returns:
        The exit code.
    """
    sinks = resolve_failure_sinks(spec_path=spec_path, overrides=overrides, environ=environ)
    failure = describe_failure(error, stage="startup", has_checkpoint=False, secrets=sinks.secrets, environ=environ)
    log_failure(error, failure, secrets=sinks.secrets, environ=environ)
    if not is_rank_zero():
        return EXIT_STARTUP
    _send_terminal_message(sinks, failure)
    in_use = isinstance(error, StartupContractError) and error.code == "startup.artifacts_in_use"
    if sinks.events_path is not None and not in_use:
        try:
            with EventLog(sinks.events_path, run_id=sinks.run_id) as event_log:
                # Nothing began, so a restart has nothing to continue, whatever ended the start.
                event_log.record_failure(replace(failure, resumable=False), step=0)
        except (OSError, EventLogError, ValueError) as problem:
            log.error("the failed event was not written to %s: %s", sinks.events_path, problem)  # noqa: TRY400
    return EXIT_STARTUP


def _send_terminal_message(sinks: FailureSinks, failure: Failure) -> None:
    """Send the terminal message of a run that could not start, where its URL is known; a failure is only logged."""
    if sinks.terminal_url is None:
        return
    with tempfile.TemporaryDirectory() as spool:
        config = UploadConfig(
            run_id=sinks.run_id,
            spool_dir=Path(spool),
            token=sinks.token,
            terminal_url=sinks.terminal_url,
            deadline_s=STARTUP_DEADLINE_S,
        )
        error: GenlightError | OSError | None
        try:
            with contextlib.closing(Uploader(config)) as uploader:  # which needs no thread for this message
                error = uploader.deliver_terminal(TerminalPayload("failed", 0, error=failure.text)).error()
        except (GenlightError, OSError) as problem:
            error = problem
    if error is not None:
        log.error("the failure could not be reported: %s", error)
