"""The arguments of a job's callbacks: from the runner inside of it, and from the client that waits for its end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..cluster.job_context import JobContext

__all__ = ["CompletedContext", "RunBeginContext", "RunEndContext", "Status", "emit"]

log = logging.getLogger("genlight.runner")

Status = Literal["success", "failure"]


@dataclass(frozen=True, kw_only=True)
class RunBeginContext:
    """The function is about to be called."""

    job_context: JobContext | None
    """None where the variables of the scheduler could not be read, which is a failure."""
    module: str
    function: str
    hostname: str
    process_id: int
    python_executable: str
    python_version: str
    working_directory: Path
    started_at: float
    """Seconds since 1970."""
    job_dir: Path | None = None
    stdout_path: Path | None = None
    stderr_path: Path | None = None
    pre_submission_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of the function."""

    status: Status
    exit_code: int
    error_type: str | None = None
    error_message: str | None = None
    duration: float
    """Seconds since `started_at`; of the client, since it began to wait."""
    output_file: Path | None = None
    """Holds the result; None after a failure, and on ranks other than 0."""


@dataclass(frozen=True, kw_only=True)
class RunEndContext(Outcome, RunBeginContext):
    """The function has returned or failed, or could not be called."""

    traceback: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletedContext(Outcome):
    """The runner is done, and its process ends after this; or, from the client, Slurm says that the job has ended."""

    job_context: JobContext | None
    pre_submission_id: str | None = None
    emitted_by: Literal["runner", "client"] = "runner"


def emit(callbacks: Iterable[Any], event: str, context: object) -> None:
    """Call the method named `event` of every callback that has it; one that fails or exits is logged, and no more.

    Args:
        callbacks: Objects of any class.
        event: Name of the method.
        context: Its one argument.
    """
    for callback in callbacks:
        try:
            method = getattr(callback, event, None)
            if method is not None:
                method(context)
        except (Exception, SystemExit, KeyboardInterrupt):
            log.exception("%s.%s failed; the run goes on", type(callback).__name__, event)
