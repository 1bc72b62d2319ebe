"""The destinations of uploads: endpoints and a file store by HTTP, repositories of Hugging Face, all that fsspec opens.

Every error of a transfer becomes a `TransientError` or `Refused`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.durable import temporary_name
from ...adapter.plumbing.failures import causes_of, safe_text
from ...adapter.plumbing.http import build_client, failure_text
from ...adapter.plumbing.retry import TransientError, is_transient, parsed_date, retry_after_s
from ...adapter.plumbing.safe_open import UnsafeFileError, open_regular
from ...adapter.plumbing.text import folder_name
from ...adapter.plumbing.urls import safe_url
from ..events.json_lines import encode_json
from .config import ENDPOINT, FILE_STORE, UploadConfig
from .queue import Entry, Kind, Queue, UploadedFile

__all__ = [
    "Delivery",
    "Interrupted",
    "Refused",
    "idempotency_key",
    "remote_name",
    "target_fault",
]

Target = Callable[[Iterable[tuple[str, Path]], str], None]
"""Puts files somewhere, given the path there and the file here of each, the one that makes the others count last, and a
title. Doing it again must leave the target as after the first time. Credentials are the target's own (``HF_TOKEN``,
``AWS_…``); a run's token never reaches it."""
Send = Callable[[], UploadedFile | None]
"""Makes one transfer and returns the file store's answer, if there is one."""
CHUNK_BYTES = 256 * 1024
ANSWER_LIMIT_BYTES = 1 << 20
MOST_TRIES = 8
"""Tries in a row before an error that does not look like one of the network counts as final."""
_OF_CREDENTIALS = re.compile("credential|auth|denied|forbidden|permission|signature|token", re.IGNORECASE)
_OF_NETWORK = re.compile(
    "connect|incomplete|network|payload|protocol|server|service|throttl|timeout|toomany|transport|unavailable", re.I
)
"""Names of the exceptions of clients (botocore, google, azure, aiohttp) that are no `OSError`."""
CONTRADICTIONS_ALLOWED = 4
"""How often a store may report another digest than ours for one entry, before it counts as final."""
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
    """The uploader is closing; the transfer continues at the next start."""


class Delivery:
    """Sends entries to their destinations. Threads may send different entries at the same time.

    Args:
        config: Destinations and credentials.
        queue: Where the files of an entry lie.
        closing: Set when transfers are to end.

    Raises:
        UploadError: The package of a target is not installed.
        StartupContractError: The environment's proxies or certificates cannot be used.
        ValueError: fsspec does not know a target's scheme.
    """

    def __init__(self, config: UploadConfig, queue: Queue, closing: threading.Event) -> None:
        self._config, self._queue, self._closing = config, queue, closing
        self._targets = {safe_url(url): open_target(url) for url in config.targets}
        self._client = build_client(config.token, config.origins(), timeout_s=config.timeout_s)
        self._contradictions = Counter[int]()
        self._failures = Counter[str]()
        """By destination: tries in a row that failed with an error that may be final."""

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def parts(self, entry: Entry, lane: Collection[str] | None = None) -> dict[str, Send]:
        """The transfers of an entry by name, in order; only those to the destinations in `lane`, if it is given.

        They raise `TransientError` for what may pass, `Refused` for what can't succeed, and `Interrupted`.
        """
        if not entry.files:
            return {"post": functools.partial(self._post, entry.kind, entry.payload, entry.key)}
        parts: dict[str, Send] = {}
        for name in entry.to if lane is None else [name for name in entry.to if name in lane]:
            if name == FILE_STORE:
                parts |= {f"put:{i}": functools.partial(self._put, entry, i) for i in range(len(entry.files))}
            elif name == ENDPOINT and entry.kind == "sample":  # a picture can be shown by itself
                parts |= {f"post:{i}": functools.partial(self._post_about, entry, i) for i in range(len(entry.files))}
            elif name == ENDPOINT:
                parts["post"] = functools.partial(self._post_about, entry, entry.subject)
            else:
                parts[f"to:{name}"] = functools.partial(self._copy, entry, name)
        return parts

    def facts(self, entry: Entry, index: int | None) -> UploadedFile:
        """Facts about a file of an artifact, from the store if it has them; for None, about the reported folder.

        Raises:
            Refused: The file is gone, or may not be read.
            OSError: It cannot be read now.
        """
        if index is None:
            inside = [file for file in entry.files if Path(file.path).is_relative_to(entry.local_path)]
            return UploadedFile(None, None, sum(file.size_bytes for file in inside))
        return entry.parts.get(f"put:{index}") or _facts_of(self._queue.location(entry, entry.files[index]))

    def _put(self, entry: Entry, index: int) -> UploadedFile:
        """Stream a file to the store and check what the store says of it."""
        config, path = self._config, self._queue.location(entry, entry.files[index])
        facts = _facts_of(path)
        sha256 = facts.sha256 or ""
        name = remote_name(entry.step, entry.name_in_store(entry.files[index]), final=entry.final)
        url = file_url(config.file_store_url or "", config.owner, entry.run_id, entry.kind, name)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(facts.size_bytes),
            "Idempotency-Key": idempotency_key(entry.run_id, "file", entry.step, name, sha256),
            "Repr-Digest": f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:",
        }
        request = self._client.build_request("PUT", url, headers=headers)
        request.stream = FileBody(path, facts.size_bytes, self._closing)
        try:
            return _checked_answer(self._exchange(request), facts, safe_url(url))
        except Contradicted as error:
            _sha256_of.cache_clear()  # the file itself may have been replaced
            self._contradictions[entry.seq] += 1
            if self._contradictions[entry.seq] > CONTRADICTIONS_ALLOWED:
                raise Refused(error.reason) from error
            raise

    def _copy(self, entry: Entry, name: str) -> None:
        """Copy all files to the target of that name, in the same layout."""
        paths = [(file.layout, self._queue.location(entry, file)) for file in entry.files]

        def files() -> Iterator[tuple[str, Path]]:
            for layout, path in paths:
                if self._closing.is_set():
                    raise Interrupted
                yield f"{folder_name(entry.run_id)}/{entry.kind}s/{layout}", path

        title = "final" if entry.final else f"step-{entry.step:08d}"
        try:
            self._targets[name](files(), f"{entry.run_id}: {entry.kind} {title}")
        except (TransientError, Refused, Interrupted):
            raise
        except Exception as error:
            if gone := [path.name for _, path in paths if not path.exists()]:
                raise Refused(f"{gone[0]} is gone") from error
            raise self._outcome_of(error, name) from error
        del self._failures[name]

    def _outcome_of(self, error: Exception, name: str) -> TransientError | Refused:
        """Whether to try a target again after `error`. One that may come from its settings is tried a few times."""
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        is_auth = isinstance(error, PermissionError) or _OF_CREDENTIALS.search(kinds) is not None
        why = f"{name} cannot be used: {getattr(error, 'strerror', None) or safe_text(error)}"
        if isinstance(error, PermissionError | ValueError):
            return Refused(why, auth=is_auth)
        of_system = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if not is_auth and (of_system or _OF_NETWORK.search(kinds)):
            return TransientError(why)
        return self._final_after_some(name, why, auth=is_auth)

    def _final_after_some(self, name: str, why: str, *, auth: bool = False) -> TransientError | Refused:
        self._failures[name] += 1
        if self._failures[name] < MOST_TRIES:
            return TransientError(why)
        return Refused(f"{why} (after {MOST_TRIES} tries; correct its address or its credentials)", auth=auth)

    def _post_about(self, entry: Entry, index: int | None) -> None:
        """Send the message about a file of an artifact, or about the folder that it reports.

        Without a file store `file_ref` is empty, `uploaded_size_bytes` is null, and `sha256` is our own digest.
        """
        path = entry.local_path if index is None else entry.files[index].path
        facts = self.facts(entry, index)
        payload: dict[str, Any] = {
            "run_id": entry.run_id,
            "kind": entry.kind,
            "step": entry.step,
            "local_path": str(self._queue.root / path),
            "size_bytes": facts.size_bytes,
            "file_ref": facts.ref or "",
            "sha256": facts.sha256,
            "uploaded_size_bytes": facts.size_bytes if f"put:{index}" in entry.parts else None,
        }
        if entry.kind == "checkpoint":
            payload["final"] = entry.final
        digest = facts.sha256 or self.facts(entry, len(entry.files) - 1).sha256 or ""
        key = idempotency_key(entry.run_id, entry.kind, entry.step, f"final/{path}" if entry.final else path, digest)
        self._post(entry.kind, payload, key)

    def _post(self, kind: Kind, payload: Mapping[str, Any], key: str) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        url = self._config.url_of(kind) or ""
        self._exchange(self._client.build_request("POST", url, content=encode_json(payload), headers=headers))

    def _exchange(self, request: httpx2.Request) -> bytes:
        """The body of the answer, once the server acknowledged `request`."""
        where = safe_url(str(request.url))
        try:
            response = self._client.send(request, stream=True)
            try:
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > ANSWER_LIMIT_BYTES:  # memory stays bounded whatever the server sends
                        raise Refused(f"{where} answered with more than {ANSWER_LIMIT_BYTES} bytes")
            finally:
                response.close()
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            text = f"{failure_text(error)} at {where}"
            if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes_of(error)):
                raise self._final_after_some(where, f"{text}: its certificate cannot be verified") from error
            raise TransientError(text) from error
        except (httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise Refused(f"{failure_text(error)} at {where}") from error
        if response.request.method != request.method or response.is_redirect:
            raise Refused(f"{where} redirects elsewhere (HTTP 301, 302 or 303), which loses an upload")
        advice = _ADVICE_IF_SENT if "authorization" in response.request.headers else _ADVICE_IF_NOT_SENT
        outcome = outcome_of_status(response.status_code, response.headers, where, advice=advice)
        if outcome is not None:
            raise outcome
        return bytes(content)


class FileBody(httpx2.SyncByteStream):
    """The bytes of a file, read piece by piece, and from the start again when asked again."""

    def __init__(self, path: Path, size: int, closing: threading.Event) -> None:
        self._path, self._size, self._closing = path, size, closing

    def __iter__(self) -> Iterator[bytes]:
        left = self._size
        with _open(self._path) as file:
            while left > 0:
                if self._closing.is_set():
                    raise Interrupted
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise TransientError(f"{self._path.name} became shorter while it was sent")
                left -= len(chunk)
                yield chunk


def _open(path: Path) -> Any:
    """The file opened for reading.

    Raises:
        Refused: It is gone, or may not be read.
    """
    try:
        return os.fdopen(open_regular(path), "rb", buffering=0)
    except (FileNotFoundError, PermissionError, IsADirectoryError, UnsafeFileError) as error:
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error


def _facts_of(path: Path) -> UploadedFile:
    """Size and digest of a file; it is read again only if it has changed."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error
    return UploadedFile(None, _sha256_of(path, found.st_size, found.st_mtime_ns), found.st_size)


@functools.lru_cache(maxsize=1024)
def _sha256_of(path: Path, _size: int, _mtime_ns: int) -> str:
    """The digest of a file, for as long as its size and time stay the same."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked_answer(content: bytes, facts: UploadedFile, where: str) -> UploadedFile:
    """The store's answer about a file, completed from our `facts`.

    An empty answer says nothing, and a page of some proxy is not an acknowledgement. A store that names no digest
    proves nothing, and the contract does not ask it to.
    """
    try:
        answer = msgspec.json.decode(content.strip() or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TransientError(f"{where} answered with something else than a JSON object") from error
    sha256 = str(answer.get("sha256") or facts.sha256).lower().removeprefix("sha256:")
    if sha256 != facts.sha256:
        raise Contradicted(f"{where} reports sha256 {sha256[:64]!r}, but the file's is {facts.sha256!r}")
    size, ref = answer.get("size_bytes"), answer.get("ref")
    if size is not None and size != facts.size_bytes:
        raise Contradicted(f"{where} reports {size!r} bytes, but the file has {facts.size_bytes}")
    return UploadedFile(ref if isinstance(ref, str) else None, sha256, facts.size_bytes)


def outcome_of_status(
    status: int, headers: Mapping[str, str], where: str, *, advice: str = ""
) -> TransientError | Refused | None:
    """None for success, otherwise the exception to raise.

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
        # By the server's own clock if it sends the time: ours may be hours off.
        now = parsed_date(headers.get("Date", "")) or datetime.now(UTC)
        asked_s = retry_after_s(headers.get("Retry-After"), now)
        return TransientError(f"{reason}, which asks to wait {asked_s:.0f} s" if asked_s else reason, asked_s)
    if status in (401, 403):
        return Refused(f"{reason}; {advice}" if advice else reason, auth=True)
    return Refused(reason)


def idempotency_key(run_id: str, kind: str, step: int, name: str, digest: str) -> str:
    """A key that depends only on the content, so that it stays the same over retries and restarts."""
    identity = encode_json([run_id, kind, step, name, digest])
    return hashlib.sha256(identity).hexdigest()[:40]


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


def open_target(url: str) -> Target:
    """The target that `url` names: ``hf://owner/name[@revision]``, or any URL that fsspec knows. Connects to nothing.

    Raises:
        ValueError: fsspec does not know the scheme.
        UploadError: The package for the scheme is not installed.
    """
    if url.startswith("hf://"):
        return functools.partial(_commit, url)
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except ImportError as error:
        raise UploadError(f"The upload target {safe_url(url)} needs another package: {error}") from error
    except ValueError as error:
        raise ValueError(f"Invalid upload target {safe_url(url)!r}. {str(error).removesuffix('.')}.") from error
    return functools.partial(_copy_below, url)


def target_fault(url: str) -> str | None:
    """The fault of `url` as a target, as far as this machine knows."""
    try:
        open_target(url)
    except (UploadError, ValueError) as error:
        return str(error)
    return None


def _commit(url: str, files: Iterable[tuple[str, Path]], title: str) -> None:
    """Commit files to a repository of the Hugging Face hub, all at once, so that a reader never sees half of them.

    It is made, private, when it does not exist; what it holds already is not sent again.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, branch = url.removeprefix("hf://").partition("@")
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files]
    try:
        HfApi().create_repo(repository.strip("/"), private=True, exist_ok=True)
        HfApi().create_commit(repository.strip("/"), operations, commit_message=title, revision=branch or "main")
    except HfHubHTTPError as error:
        advice = "set `HF_TOKEN` to a token that may write there"
        outcome = outcome_of_status(error.response.status_code, error.response.headers, safe_url(url), advice=advice)
        raise outcome or TransientError(safe_url(url)) from error


def _copy_below(url: str, files: Iterable[tuple[str, Path]], title: str) -> None:  # noqa: ARG001 - of a commit
    """Copy files below a folder that fsspec opens, one by one, each whole or not at all.

    Object stores show an object once it is whole; file systems need the rename.
    """
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)  # which is kept, and may connect
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    for name, path in files:
        destination = f"{str(root).rstrip('/')}/{name}"
        folder, _, last = destination.rpartition("/")
        filesystem.makedirs(folder, exist_ok=True)
        arriving = f"{folder}/{temporary_name(last)}" if protocols & {"file", "local"} else destination
        filesystem.put_file(os.fspath(path), arriving)
        if arriving != destination:
            filesystem.mv(arriving, destination)
        if filesystem.size(destination) != path.stat().st_size:
            raise OSError("the target holds another number of bytes")
