"""What callbacks of the runner are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cluster.job_context import JobContext

__all__ = ["CompletedContext", "RunBeginContext", "RunEndContext", "Status"]

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
class RunEndContext(RunBeginContext):
    """The function has returned or failed, or could not be called."""

    status: Status
    exit_code: int
    error_type: str | None = None
    error_message: str | None = None
    traceback: str | None = None
    duration: float
    """Seconds since `started_at`."""
    output_file: Path | None = None
    """Holds the result; None after a failure, and on ranks other than 0."""


@dataclass(frozen=True, kw_only=True)
class CompletedContext:
    """The runner is done, and its process ends after this."""

    job_context: JobContext | None
    status: Status
    exit_code: int
    error_type: str | None = None
    error_message: str | None = None
    duration: float
    """Seconds."""
    output_file: Path | None = None
    pre_submission_id: str | None = None
    emitted_by: Literal["runner", "client"] = "runner"
