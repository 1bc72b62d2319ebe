"""The protocol of uploads: payloads, addresses and keys, and their transfer by a JSON POST or a streamed file.

Every error of a transfer becomes `TransientError` or `Refused`.
"""

from __future__ import annotations

import base64
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx2
import msgspec

from ...adapter.plumbing.http import failure_text
from ...adapter.plumbing.retry import TransientError, is_transient, parsed_date, retry_after_s
from ...adapter.plumbing.safe_open import open_regular
from ...adapter.plumbing.urls import safe_url
from .queue import Entry, Kind, UploadedFile

__all__ = [
    "ANSWER_LIMIT_BYTES",
    "Contradicted",
    "Interrupted",
    "Refused",
    "TerminalPayload",
    "Wire",
    "artifact_payload",
    "encode",
    "facts_of",
    "file_url",
    "idempotency_key",
    "outcome_of_status",
    "remote_name",
    "sha256_of",
    "terminal_payload",
]


@dataclass(frozen=True)
class TerminalPayload:
    """The one message that says how a run ended.

    `final_checkpoint` is a local path; reference and digest of it are filled in from its upload.
    """

    status: Literal["completed", "failed"]
    step: int
    final_checkpoint: str | None = None
    error: str | None = None
    """Category and safe text, as in the terminal event; None for ``completed``."""


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


def artifact_payload(entry: Entry, path: str, facts: UploadedFile, *, is_stored: bool) -> dict[str, Any]:
    """Body of the POST about the file or folder of a checkpoint or sample at `path`.

    Without a file store `file_ref` is empty, `uploaded_size_bytes` is null, and `sha256` is our own digest.
    """
    payload: dict[str, Any] = {
        "run_id": entry.run_id,
        "kind": entry.kind,
        "step": entry.step,
        "local_path": path,
        "size_bytes": facts.size_bytes,
        "file_ref": facts.ref or "",
        "sha256": facts.sha256,
        "uploaded_size_bytes": facts.size_bytes if is_stored else None,
    }
    if entry.kind == "checkpoint":
        payload["final"] = entry.final
    return payload


def terminal_payload(run_id: str, terminal: TerminalPayload, uploaded: UploadedFile | None) -> dict[str, Any]:
    """Body of the terminal POST.

    `final_checkpoint` is the store's reference where there is one, else the local path; a text that is absent is empty.
    """
    ref = uploaded.ref if uploaded else None
    return {
        "run_id": run_id,
        "kind": "terminal",
        "status": terminal.status,
        "step": terminal.step,
        "final_checkpoint": ref or terminal.final_checkpoint,
        "final_checkpoint_ref": ref or "",
        "final_checkpoint_sha256": uploaded.sha256 if uploaded else None,
        "error": terminal.error or "",
    }


def remote_name(step: int, relative_name: str, *, final: bool) -> str:
    """Name of a file in the store, such as ``step-00000200-trainer_lora.safetensors``."""
    prefix = "final" if final else f"step-{step:08d}"
    return f"{prefix}-{relative_name.replace('/', '_')}"


def file_url(base: str, owner: str, run_id: str, kind: Kind, name: str) -> str:
    """Address of a file in the store; a query of `base`, such as a signature, is kept."""
    path, question_mark, query = base.partition("?")
    parts = (owner, "runs", run_id, f"{kind}s", name)
    joined = "/".join(quote(part, safe="") for part in parts)
    return f"{path.rstrip('/')}/api/v1/file/v1/{joined}{question_mark}{query}"


CHUNK_BYTES = 256 * 1024
ANSWER_LIMIT_BYTES = 1 << 20
_NEVER_READABLE = (errno.ENOENT, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENXIO)
"""Of a file that is gone, may not be read, or is a pipe, a device or a directory."""
_ADVICE_IF_SENT = "it refuses the token of `TRAINER_CAPABILITY_TOKEN`, or of the job's `capability_token`"
_ADVICE_IF_NOT_SENT = "no token was sent; set `TRAINER_CAPABILITY_TOKEN`"


class Contradicted(TransientError):
    """The store received something else than was sent, by its own words; a repetition is worth little."""


class Refused(Exception):
    """The transfer cannot succeed by repetition.

    Args:
        reason: Safe text for the operator.
        auth: Whether the server refused our credentials.
    """

    def __init__(self, reason: str, *, auth: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.auth = auth


class Interrupted(Exception):
    """The uploader is closing; the transfer goes on at the next start."""


def outcome_of_status(
    status: int, headers: Mapping[str, str], where: str, *, advice: str = ""
) -> TransientError | Refused | None:
    """None for success, else what to raise.

    Args:
        status: The status of the answer.
        headers: Its headers.
        where: The safe URL that goes into the reason.
        advice: What to do about refused credentials.
    """
    if 200 <= status <= 299:
        return None
    reason = f"HTTP {status} from {where}"
    if is_transient(status):
        # By the server's own clock where it sends the time: ours may be hours off.
        now = parsed_date(headers.get("Date", "")) or datetime.now(UTC)
        return TransientError(reason, retry_after_s(headers.get("Retry-After"), now))
    if status in (401, 403):
        return Refused(f"{reason}; {advice}" if advice else reason, auth=True)
    return Refused(reason)


class FileBody(httpx2.SyncByteStream):
    """The bytes of a file, read piece by piece, and from the start again when asked again."""

    def __init__(self, path: Path, size: int, interrupted: Callable[[], bool]) -> None:
        self._path, self._size, self._interrupted = path, size, interrupted

    def __iter__(self) -> Iterator[bytes]:
        left = self._size
        with open_file(self._path) as file:
            while left > 0:
                if self._interrupted():
                    raise Interrupted
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise TransientError(f"{self._path.name} became shorter while it was sent")
                left -= len(chunk)
                yield chunk


def open_file(path: Path) -> Any:
    """The file opened for reading.

    Raises:
        Refused: It is gone, or may not be read.
    """
    try:
        return os.fdopen(open_regular(path), "rb", buffering=0)
    except OSError as error:
        if error.errno not in _NEVER_READABLE:
            raise
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error


class Wire:
    """Transfers over one shared client; several threads may use it."""

    def __init__(self, client: httpx2.Client, *, interrupted: Callable[[], bool]) -> None:
        self._client = client
        self._interrupted = interrupted

    def post(self, url: str, body: bytes, key: str) -> None:
        """POST `body` (JSON) and return once the server acknowledged it.

        Args:
            url: The endpoint.
            body: The message.
            key: Idempotency key.

        Raises:
            TransientError: A network error, or a status that may pass.
            Refused: Any other answer than success.
        """
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        self._exchange(self._client.build_request("POST", url, content=body, headers=headers))

    def put_file(self, url: str, path: Path, size_bytes: int, sha256: str, key: str) -> UploadedFile:
        """Stream a file to the store and check what the store says of it.

        Args:
            url: Address of the file in the store.
            path: The local file.
            size_bytes: Its size.
            sha256: Its digest.
            key: Idempotency key.

        Raises:
            Contradicted: The store's digest or size is another one than ours.
            TransientError: A network error, or a status that may pass.
            Refused: The file is gone, or any other answer than success.
        """
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size_bytes),
            "Idempotency-Key": key,
            "Repr-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:",
        }
        request = self._client.build_request("PUT", url, headers=headers)
        request.stream = FileBody(path, size_bytes, self._interrupted)
        return _checked_answer(self._exchange(request), size_bytes, sha256, safe_url(url))

    def _exchange(self, request: httpx2.Request) -> bytes:
        where = safe_url(str(request.url))
        try:
            response = self._client.send(request, stream=True)
            try:
                content = _limited(response, where)
            finally:
                response.close()
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            raise TransientError(f"{failure_text(error)} at {where}") from error
        except (httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise Refused(f"{failure_text(error)} at {where}") from error
        if response.request.method != request.method or response.is_redirect:
            raise Refused(f"{where} redirects elsewhere (HTTP 301, 302 or 303), which loses an upload")
        advice = _ADVICE_IF_SENT if "authorization" in response.request.headers else _ADVICE_IF_NOT_SENT
        outcome = outcome_of_status(response.status_code, response.headers, where, advice=advice)
        if outcome is not None:
            raise outcome
        return content


def _limited(response: httpx2.Response, where: str) -> bytes:
    """The body of an answer; memory stays bounded whatever the server sends."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > ANSWER_LIMIT_BYTES:
            raise Refused(f"{where} answered with more than {ANSWER_LIMIT_BYTES} bytes")
    return bytes(content)


def _checked_answer(content: bytes, size_bytes: int, sha256: str, where: str) -> UploadedFile:
    """The store's answer about the file; fields that it leaves out are taken from ours.

    An empty answer says nothing, and a page of some proxy is not an acknowledgement. A store that names no digest
    proves nothing, and the contract does not ask it to.
    """
    try:
        answer = msgspec.json.decode(content) if content.strip() else {}
    except msgspec.DecodeError as error:
        raise TransientError(f"{where} answered with something else than JSON") from error
    if not isinstance(answer, dict):
        raise TransientError(f"{where} answered with something other than a JSON object")
    theirs = str(answer.get("sha256") or sha256).lower().removeprefix("sha256:")
    if theirs != sha256:
        raise Contradicted(f"{where} reports sha256 {theirs[:64]!r}, but the file's is {sha256!r}")
    size = answer.get("size_bytes")
    if size is not None and size != size_bytes:
        raise Contradicted(f"{where} reports {size!r} bytes, but the file has {size_bytes}")
    ref = answer.get("ref")
    return UploadedFile(ref if isinstance(ref, str) else None, sha256, size_bytes)


def facts_of(path: Path) -> UploadedFile:
    """Size and digest of a file, which is read in pieces only where it has changed since.

    Raises:
        Refused: It is gone, or may not be read.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error
    return UploadedFile(None, sha256_of(path, found.st_size, found.st_mtime_ns), found.st_size)


@functools.lru_cache(maxsize=1024)
def sha256_of(path: Path, _size: int, _mtime_ns: int) -> str:
    """The digest of a file, for as long as its size and time stay the same."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
