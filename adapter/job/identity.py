"""Which job a checkpoint belongs to.

A job is its trainer, its hyperparameters, its data and its inputs; not how long it runs, where, or how often it
reports. A record keeps one short digest for each field, so that a later start can name what changed without texts
having been stored, which may be credentials. Digests are salted, so that no table of likely values tells what was
hashed; what stands under a secret name is not part of the identity.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..plumbing.redaction import is_secret_name
from ..plumbing.urls import safe_url
from .spec import JobSpec

__all__ = [
    "differing_fields",
    "digest_of_fields",
    "leaves",
    "numbers_of",
    "sealed_fields",
    "spec_fields",
    "without_credentials",
]

FIELD_DIGEST_LENGTH = 16
SALT = "salt"
"""Where a record keeps the salt; the names of fields begin otherwise."""


def spec_fields(job: JobSpec, folder: Path) -> dict[str, str]:
    """Digest of each field that makes up the identity of a job, by dotted name.

    A path under `folder` counts relative to it, so that a folder that was moved is still the same job. Of a URL
    neither user info nor query counts; a ``#sha256=`` does. A hyperparameter of a secret name does not count.
    """
    dataset, inputs = job.dataset, job.inputs
    identity: dict[str, Any] = {"trainer": job.trainer, "hyperparams": _public(job.hyperparams), "seed": job.seed}
    if dataset is not None:
        identity["dataset"] = {
            "parquet_paths": [_reference(path, folder) for path in dataset.parquet_paths],
            "columns": dataset.columns,
            "shuffle": dataset.shuffle,
            "seed": dataset.seed,
        }
    identity |= {"data": job.data, "mock_batches": job.mock_batches}
    identity["inputs"] = {
        "base_model_ref": _reference(inputs.base_model_ref, folder),
        "dataset_parquet_refs": [_reference(ref, folder) for ref in inputs.dataset_parquet_refs],
        "resume_checkpoint_ref": _reference(inputs.resume_checkpoint_ref, folder),
    }
    return {name: _digest(value)[:FIELD_DIGEST_LENGTH] for name, value in leaves(identity)}


def digest_of_fields(fields: Mapping[str, str]) -> str:
    """One digest over all fields: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{_digest(dict(fields))}"


def numbers_of(job: JobSpec) -> dict[str, float | bool | str]:
    """Hyperparameters that are numbers or booleans, under no secret name, batch size and precision, by dotted name."""
    size = {} if job.dataset is None else {"dataset.batch_size": job.dataset.batch_size}
    numbers = {
        name: value
        for name, value in leaves({"hyperparams": _public(job.hyperparams)})
        if isinstance(value, (int, float))
    }
    return {**numbers, **size, "lightning.precision": str(job.lightning.get("precision", "32-true"))}


def sealed_fields(fields: Mapping[str, str], salt: str | None = None) -> dict[str, str]:
    """`fields` as a record keeps them, with the salt of their digests; None makes a new one."""
    salt = secrets.token_hex(16) if salt is None else salt
    sealed = {name: _digest([salt, name, digest])[:FIELD_DIGEST_LENGTH] for name, digest in fields.items()}
    return {SALT: salt, **sealed}


def differing_fields(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Dotted names of the fields in which two jobs differ, sorted; a field that only one has differs.

    Args:
        ours: What `spec_fields` returned.
        theirs: The same, or what `sealed_fields` made of it.
    """
    if SALT in theirs:
        ours = sealed_fields(ours, theirs[SALT])
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def without_credentials(reference: str) -> str:
    """A reference without user info and query, with its fragment."""
    if "://" not in reference:
        return reference
    _, mark, fragment = reference.partition("#")
    return f"{safe_url(reference)}{mark if fragment else ''}{fragment}"


def _public(hyperparams: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands under secret names; a credential that was renewed makes no other job."""
    return {
        name: _public(value) if isinstance(value, Mapping) else value
        for name, value in hyperparams.items()
        if not is_secret_name(str(name))
    }


def _reference(reference: str | None, folder: Path) -> str | None:
    return None if reference is None else without_credentials(reference.removeprefix(f"{folder}/"))


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; neither an absent value nor an empty one is a leaf."""
    for name, inner in value.items():
        dotted = f"{prefix}.{name}" if prefix else name
        if isinstance(inner, Mapping):
            yield from leaves(inner, dotted)
        elif inner not in (None, [], ()):
            yield dotted, inner


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
