"""The certificate of ``genlight prove`` in the folder of a run, and whether the job is still the same."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...reporters.events.run_metadata import PACKAGES_OF_NUMBERS, installed_packages, numerics, source_digest
from ..job.config import RunConfig
from ..job.identity import differing_fields
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import read_regular

NAME = "proof.json"
_COMMENT = "Written by `genlight prove`."
_LARGEST_BYTES = 4 << 20
_PACKAGES = (*PACKAGES_OF_NUMBERS, "pyarrow")
"""Packages whose versions a certificate covers; pyarrow reads the rows."""


def write_proof(config: RunConfig, target: object, results: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write the certificate of a job into the folder of its run.

    Args:
        config: The job.
        target: Its imported trainer class.
        results: The outcome of each rehearsal.
        facts: Further facts as JSON values: steps, ranks, digests.

    Raises:
        OSError: It cannot be written.
    """
    proof = {
        "$comment": _COMMENT,
        "created_at_ms": time.time_ns() // 1_000_000,
        "host": socket.gethostname(),
        "numerics": numerics(),
        "packages": dict(installed_packages()),
        "proven": _identity(config, target),
        **facts,
        "results": list(results),
    }
    make_directory(config.artifacts_dir)
    write_bytes_durably(config.artifacts_dir / NAME, json.dumps(proof, indent=1).encode() + b"\n")


def changes_since_proof(config: RunConfig, target: object) -> list[str]:
    """Return the sorted names of settings and versions that differ from the certificate of the job.

    `source` stands for the file of the trainer. The list is empty if nothing differs, or if there is no certificate.
    """
    try:
        proof = json.loads(read_regular(config.artifacts_dir / NAME, limit=_LARGEST_BYTES))
        proven = proof["proven"] if proof["$comment"] == _COMMENT else None
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return []
    return differing_fields(_identity(config, target), proven) if isinstance(proven, dict) else []


def _identity(config: RunConfig, target: object) -> dict[str, Any]:
    """Return everything that makes a certificate void when it changes, as JSON values by name."""
    packages = installed_packages()
    facts = {
        **config.spec_fields,
        **{f"lightning.{name}": value for name, value in config.lightning.items()},
        **{f"version of {name}": packages[name] for name in _PACKAGES if name in packages},
        "source": source_digest(getattr(target, "__module__", "")),
    }
    identity: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return identity
