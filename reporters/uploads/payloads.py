"""The requests of uploads: payloads, addresses and idempotency keys. Pure functions of their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import msgspec

__all__ = [
    "FileFacts",
    "Kind",
    "TerminalPayload",
    "UploadedFile",
    "artifact_payload",
    "encode",
    "file_url",
    "idempotency_key",
    "metrics_payload",
    "remote_name",
    "terminal_payload",
]

Kind = Literal["metrics", "sample", "checkpoint", "terminal"]

_FOLDERS: dict[str, str] = {"checkpoint": "checkpoints", "sample": "samples"}


@dataclass(frozen=True)
class FileFacts:
    """Size and digest of a local file, or of the files of a directory: `sha256` (hex) is None for a directory."""

    size_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class UploadedFile:
    """The file store's answer about a file that it received."""

    ref: str | None
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class TerminalPayload:
    """The one message that says how a run ended.

    `final_checkpoint` is a local path. `final_checkpoint_ref` and `final_checkpoint_sha256` are filled in from its
    uploads where they are left out. `attempt` is not sent; it distinguishes the failures of two attempts.
    """

    status: Literal["completed", "failed"]
    step: int
    final_checkpoint: str | None = None
    final_checkpoint_ref: str | None = None
    final_checkpoint_sha256: str | None = None
    error: str | None = None
    """Category and safe text, as in the terminal event; None for ``completed``."""
    attempt: int = 1


def encode(payload: Mapping[str, Any]) -> bytes:
    """Compact JSON with sorted keys; a number that is not finite becomes null, what is not UTF-8, a question mark."""
    try:
        return msgspec.json.encode(payload, order="sorted")
    except UnicodeEncodeError:  # of a path that is not text
        return msgspec.json.encode(_storable(payload), order="sorted")


def _storable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_storable(key): _storable(inner) for key, inner in value.items()}
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def idempotency_key(run_id: str, kind: str, step: int, name: str, digest: str) -> str:
    """A key that depends on what is sent alone, so that it stays the same over retries and restarts."""
    identity = msgspec.json.encode([run_id, kind, step, name, digest])
    return hashlib.sha256(identity).hexdigest()[:40]


def metrics_payload(run_id: str, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Body of a metrics POST."""
    return {"run_id": run_id, "kind": "metrics", "step": step, "metrics": dict(metrics)}


def artifact_payload(
    run_id: str, kind: Kind, step: int, local_path: str, facts: FileFacts, uploaded: UploadedFile | None, *, final: bool
) -> dict[str, Any]:
    """Body of a checkpoint or sample POST.

    Without a file store `file_ref` is empty, `uploaded_size_bytes` is null, and `sha256` is our own digest.
    """
    payload: dict[str, Any] = {
        "run_id": run_id,
        "kind": kind,
        "step": step,
        "local_path": local_path,
        "size_bytes": facts.size_bytes,
        "file_ref": (uploaded.ref if uploaded else None) or "",
        "sha256": uploaded.sha256 if uploaded else facts.sha256,
        "uploaded_size_bytes": uploaded.size_bytes if uploaded else None,
    }
    if kind == "checkpoint":
        payload["final"] = final
    return payload


def terminal_payload(run_id: str, terminal: TerminalPayload) -> dict[str, Any]:
    """Body of the terminal POST.

    `final_checkpoint` is the store's reference where there is one, else the local path; a text that is absent is empty.
    """
    return {
        "run_id": run_id,
        "kind": "terminal",
        "status": terminal.status,
        "step": terminal.step,
        "final_checkpoint": terminal.final_checkpoint_ref or terminal.final_checkpoint,
        "final_checkpoint_ref": terminal.final_checkpoint_ref or "",
        "final_checkpoint_sha256": terminal.final_checkpoint_sha256,
        "error": terminal.error or "",
    }


def remote_name(step: int, relative_name: str, *, final: bool) -> str:
    """Name of a file in the store, such as ``step-00000200-trainer_lora.safetensors``."""
    prefix = "final" if final else f"step-{step:08d}"
    return f"{prefix}-{relative_name.replace('/', '_')}"


def file_url(base: str, owner: str, run_id: str, kind: Kind, name: str) -> str:
    """Address of a file in the store; a query of `base`, such as a signature, is kept."""
    path, question_mark, query = base.partition("?")
    parts = (owner, "runs", run_id, _FOLDERS[kind], name)
    joined = "/".join(quote(part, safe="") for part in parts)
    return f"{path.rstrip('/')}/api/v1/file/v1/{joined}{question_mark}{query}"
