"""Where a start that failed can still be reported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..job.errors import ConfigErrors
from ..job.sources import artifact_paths, artifacts_template, read_settings
from .artifact_dirs import untrusted_dirs

__all__ = ["UNKNOWN_RUN_ID", "FailureSinks", "resolve_failure_sinks"]

UNKNOWN_RUN_ID = "unknown"
"""Stands for the run's id in a report about a job spec that names none."""


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
    reading = read_settings(spec_path, overrides, os.environ if environ is None else environ, ConfigErrors())
    template = artifacts_template(spec_path, default_artifacts_dir)
    run_id = reading.spec.run_id
    paths = artifact_paths(reading, template, run_id or UNKNOWN_RUN_ID)
    placed = run_id is not None or "{run_id}" not in template
    safe = bool(reading.pick("shared_artifacts")) or not untrusted_dirs(paths)
    given = any(reading.pick(name) is not None for name in ("artifacts_dir", "metrics_dir", "events_path"))
    return FailureSinks(
        run_id=run_id or UNKNOWN_RUN_ID,
        events_path=paths["events_path"] if safe and (placed or given) else None,
        terminal_url=reading.pick("uploads.terminal_url"),
        token=reading.pick("capability_token"),
        secrets=reading.secrets,
    )
