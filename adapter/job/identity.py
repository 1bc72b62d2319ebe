"""The identity of a job, which shows whether a checkpoint belongs to the job.

Trainer, hyperparameters, seed, data and inputs are its parts; the duration, the machine and the cadences are not, and
neither are values under secret names. A checkpoint's record keeps one digest of the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..plumbing.redaction import is_secret_name
from ..plumbing.urls import safe_url
from .spec import JobSpec

LOGGED_ARGUMENTS = ("accelerator", "accumulate_grad_batches", "devices", "num_nodes", "strategy")
"""Arguments of the Lightning trainer that an event log shows; others may hold paths and addresses."""


def spec_fields(job: JobSpec, folder: Path) -> dict[str, Any]:
    """Return the fields that make up the identity of a job, by dotted name.

    A path under `folder` counts relative to it, so that moving the folder does not change the job. The user info and
    the query of a URL do not count; its ``#sha256=`` does. A hyperparameter with a secret name does not count.
    """
    identity = {
        "trainer": job.trainer,
        "hyperparams": _public(job.hyperparams),
        "seed": job.seed,
        "data": job.data,
        "mock_batches": job.mock_batches and digest_of_fields({"": job.mock_batches}),
        "inputs": {name: _references(value, folder) for name, value in msgspec.structs.asdict(job.inputs).items()},
    }
    if job.dataset is not None:
        of_dataset = {name: getattr(job.dataset, name) for name in ("columns", "shuffle", "seed")}
        identity["dataset"] = {"parquet_paths": _references(job.dataset.parquet_paths, folder), **of_dataset}
    return dict(leaves(identity))


def digest_of_fields(fields: Mapping[str, Any]) -> str:
    """Return one digest over all fields: ``sha256:`` and 64 hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def differing_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the sorted dotted names of fields in which two jobs differ; a field that only one has differs."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def logged_settings(job: JobSpec) -> dict[str, str | int | float]:
    """Return the settings that distinguish runs, by dotted name, for an event log; none of them can be a secret."""
    settings = {
        "trainer": job.trainer,
        "max_steps": job.max_steps,
        "price_per_device_hour": job.price_per_device_hour,
        "hyperparams": {name: value for name, value in leaves(_public(job.hyperparams)) if not isinstance(value, str)},
        "dataset.batch_size": job.dataset and job.dataset.batch_size,
        "lightning": {name: value for name, value in job.lightning.items() if name in LOGGED_ARGUMENTS},
        "lightning.precision": str(job.lightning.get("precision", "32-true")),
        "checkpoints.monitor": job.checkpoints.monitor,
        "checkpoints.mode": job.checkpoints.monitor and job.checkpoints.mode,
    }
    return {name: value for name, value in leaves(settings) if isinstance(value, (str, int, float))}


def _public(hyperparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return `hyperparams` without entries whose name is secret or has a URL: new credentials do not change the job."""
    return {
        name: _public(value) if isinstance(value, Mapping) else value
        for name, value in hyperparams.items()
        if not is_secret_name(str(name)) and "://" not in name
    }


def _references(given: Any, folder: Path) -> Any:
    """Return a reference, or each of a list: a path relative to `folder`, a URL without user info and query."""
    if not isinstance(given, str):
        return given and [_references(each, folder) for each in given]
    if "://" not in given:
        return given.removeprefix(f"{folder}/")
    _, mark, fragment = given.partition("#")
    return f"{safe_url(given)}{mark if fragment else ''}{fragment}"


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values, without absent and empty values."""
    for name, inner in value.items():
        dotted = f"{prefix}.{name}" if prefix else name
        if isinstance(inner, Mapping):
            yield from leaves(inner, dotted)
        elif inner not in (None, [], ()):
            yield dotted, inner
