"""The job of a run as its folder keeps it: all that file, environment and ``--set`` gave, in one file, without secrets.

`job_file` starts the same job again, from wherever it lies: its paths are absolute, and `base_dir` names the folder of
the job file that was read. What a job file cannot say, such as where artifacts go, is not in it. A secret is spelled
``<hidden>``, which a start from this file refuses by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..plumbing.durable import write_bytes_durably
from ..plumbing.redaction import HIDDEN, secrets_of_environment, without_secrets
from ..plumbing.safe_open import read_regular
from ..plumbing.settings import Block
from .config import RunConfig
from .sources import COMMENT, DEFAULT, LARGEST_FILE_BYTES
from .spec import JobSpec

__all__ = ["JOB_NAME", "job_file", "read_job", "write_job"]

JOB_NAME = "job.json"
_WRITTEN_BY = "Written by genlight"
"""How the comment of a file begins that a run may replace."""
_DIGEST = re.compile("sha256=[0-9a-fA-F]{64}")
_COMMENT = f"{_WRITTEN_BY} when the run started: its job with every setting, without secrets."


def job_file(config: RunConfig, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The job of `config` as a file that starts it again.

    Args:
        config: The run.
        environ: The environment, none of whose secrets is written; None takes the process's own.
    """
    # As it was asked for: what one setting says for others, such as a seed, would keep them from following it later.
    job = _given({name: getattr(config.asked, name) for name in JobSpec.__struct_fields__})
    if "dataset" in job and config.source_of("dataset.seed") == DEFAULT and config.seed is not None:
        del job["dataset"]["seed"]
    job["base_dir"] = str(config.spec_dir)
    shown = without_secrets(job, secrets=[*config.secrets, *secrets_of_environment(environ)])
    return {COMMENT: _COMMENT, **_with_marks(job, shown)}


def write_job(config: RunConfig, environ: Mapping[str, str] | None = None) -> bool:
    """Write `job_file` into the folder of the run, whole or not at all; False where a file of the user's has its place.

    Raises:
        OSError: It cannot be written.
    """
    path = config.artifacts_dir / JOB_NAME
    if os.path.lexists(path) and read_job(config.artifacts_dir) is None:
        return False
    write_bytes_durably(path, json.dumps(job_file(config, environ), indent=1).encode() + b"\n")
    return True


def read_job(folder: Path) -> dict[str, Any] | None:
    """The job that `write_job` wrote into the folder of a run; None where there is none."""
    try:
        job = json.loads(read_regular(folder / JOB_NAME, limit=LARGEST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(job, dict) and str(job.get(COMMENT, "")).startswith(_WRITTEN_BY)
    return {name: value for name, value in job.items() if name != COMMENT} if is_ours else None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are given, as JSON; an empty entry of what a class or a library gets stays."""
    plain: dict[str, Any] = msgspec.to_builtins(values, enc_hook=os.fspath)
    given = {name: value for name, value in plain.items() if value is not None and value not in ("", [], ())}
    blocks = {name for name, value in values.items() if dataclasses.is_dataclass(value) or isinstance(value, Block)}
    return {name: _given(value) if name in blocks else value for name, value in given.items()}


def _with_marks(value: Any, shown: Any) -> Any:
    """`shown` with a mark where a URL of `value` lost something to it; a digest that it names is none of that."""
    if isinstance(shown, dict):
        return {name: _with_marks(value[name], inner) for name, inner in shown.items()}
    if isinstance(shown, list):
        return [_with_marks(*pair) for pair in zip(value, shown, strict=True)]
    if value == shown or HIDDEN in shown:
        return shown
    plain, _, fragment = value.partition("#")
    return value if plain == shown and _DIGEST.fullmatch(fragment) else f"{shown}{HIDDEN}"
