"""Destinations of uploads: HTTP endpoints, an HTTP file store, Hugging Face repositories and fsspec URLs.

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
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.durable import temporary_name
from ...adapter.plumbing.failures import causes_of, safe_text
from ...adapter.plumbing.http import build_client, failure_text
from ...adapter.plumbing.retry import TransientError, transient_answer
from ...adapter.plumbing.safe_open import UnsafeFileError, open_regular
from ...adapter.plumbing.text import folder_name
from ...adapter.plumbing.urls import safe_url
from ..events.json_lines import encode_json
from .config import ENDPOINT, FILE_STORE, UploadConfig
from .queue import Entry, Kind, Queue, UploadedFile

Target = Callable[[Iterable[tuple[str, Path]], str], None]
"""Uploads files. Arguments: pairs of a path at the target and a local file (the commit record last), and a title. A
repeated call must not change the result. A target uses separate credentials (``HF_TOKEN``, ``AWS_…``) and never gets
the token of the run."""
Send = Callable[[], UploadedFile | None]
"""Makes one transfer and returns the file store's answer, if there is one."""
CHUNK_BYTES = 256 * 1024
ANSWER_LIMIT_BYTES = 1 << 20
MOST_TRIES = 8
"""Number of failed tries in a row after which an error that may be a wrong setting counts as final."""
_CREDENTIAL_ERRORS = re.compile("credential|auth|denied|forbidden|permission|signature|token", re.IGNORECASE)
_NETWORK_ERRORS = re.compile(
    "connect|incomplete|network|payload|protocol|server|service|throttl|timeout|toomany|transport|unavailable", re.I
)
"""Both patterns match names of exception classes that clients raise (botocore, google, azure, aiohttp)."""
CONTRADICTIONS_ALLOWED = 4
"""Number of times that the store may report a different digest for one entry before that counts as final."""
_ADVICE_IF_SENT = "it refuses the token of `TRAINER_CAPABILITY_TOKEN`, or of the job's `capability_token`"
_ADVICE_IF_NOT_SENT = "no token was sent; set `TRAINER_CAPABILITY_TOKEN`"


class Contradicted(TransientError):
    """The store reports other bytes than were sent. Such a transfer is repeated `CONTRADICTIONS_ALLOWED` times."""


class Refused(Exception):
    """The transfer will not succeed if it is repeated.

    Args:
        reason: Text without secrets for the operator.
        auth: Whether the server refused our credentials.
    """

    def __init__(self, reason: str, *, auth: bool = False) -> None:
        super().__init__(reason)
        self.auth = auth


class Interrupted(Exception):
    """The uploader is closing; the transfer is made at the next start."""


class Delivery:
    """Sends entries to their destinations. Threads may send different entries at the same time.

    Args:
        config: Destinations and credentials.
        queue: Locates the files of an entry.
        closing: Event that ends all transfers.

    Raises:
        UploadError: The package of a target is not installed.
        StartupContractError: A proxy or certificate of the environment cannot be used.
        ValueError: fsspec does not know a target's scheme.
    """

    def __init__(self, config: UploadConfig, queue: Queue, closing: threading.Event) -> None:
        self._config, self._queue, self._closing = config, queue, closing
        self._targets = {safe_url(url): open_target(url) for url in config.targets}
        self._client = build_client(config.token, config.origins(), timeout_s=config.timeout_s)
        self._contradictions = Counter[int]()
        self._failures = Counter[str]()
        """Number of tries in a row that failed with an error that may be final, by destination."""

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def parts(self, entry: Entry, lane: Collection[str] | None = None) -> dict[str, Send]:
        """Return the transfers of an entry by name, in order; with `lane`, only those to its destinations.

        A transfer raises `TransientError` if another try may succeed, `Refused` if it cannot, and `Interrupted` when
        the uploader closes.
        """
        if not entry.files:
            return {"post": functools.partial(self._post, entry.kind, entry.payload, entry.key)}
        parts: dict[str, Send] = {}
        for name in entry.to if lane is None else [name for name in entry.to if name in lane]:
            if name == FILE_STORE:
                parts |= {f"put:{i}": functools.partial(self._put, entry, i) for i in range(len(entry.files))}
            elif name == ENDPOINT and entry.kind == "sample":  # the receiver can show each file
                parts |= {f"post:{i}": functools.partial(self._post_about, entry, i) for i in range(len(entry.files))}
            elif name == ENDPOINT:
                parts["post"] = functools.partial(self._post_about, entry, entry.subject)
            else:
                parts[f"to:{name}"] = functools.partial(self._copy, entry, name)
        return parts

    def facts(self, entry: Entry, index: int | None) -> UploadedFile:
        """Return the facts about a file of an artifact, from the store if it has answered.

        Args:
            entry: The artifact.
            index: Index of the file; None means the folder that the message names.

        Raises:
            Refused: The file no longer exists, or this user may not read it.
            OSError: The file cannot be read now.
        """
        if index is None:
            inside = [file for file in entry.files if Path(file.path).is_relative_to(entry.local_path)]
            return UploadedFile(None, None, sum(file.size_bytes for file in inside))
        return entry.parts.get(f"put:{index}") or _facts_of(self._queue.location(entry, entry.files[index]))

    def _put(self, entry: Entry, index: int) -> UploadedFile:
        """Stream a file to the store and check the answer."""
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
            return _check_answer(self._exchange(request), facts, safe_url(url))
        except Contradicted as error:
            _sha256_of.cache_clear()  # perhaps the file was replaced, with the same size and time
            self._contradictions[entry.seq] += 1
            if self._contradictions[entry.seq] > CONTRADICTIONS_ALLOWED:
                raise Refused(str(error)) from error
            raise

    def _copy(self, entry: Entry, name: str) -> None:
        """Copy all files to the target `name`, in the same layout."""
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
                raise Refused(f"{gone[0]} no longer exists") from error
            raise self._outcome_of(error, name) from error
        del self._failures[name]

    def _outcome_of(self, error: Exception, name: str) -> TransientError | Refused:
        """Return the error for a failed copy to a target: `TransientError` if another try may succeed, or `Refused`.

        An error that may come from wrong settings gets `MOST_TRIES` tries.
        """
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        is_auth = isinstance(error, PermissionError) or _CREDENTIAL_ERRORS.search(kinds) is not None
        why = f"{name} cannot be used: {getattr(error, 'strerror', None) or safe_text(error)}"
        if isinstance(error, PermissionError | ValueError):
            return Refused(why, auth=is_auth)
        is_system_error = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if not is_auth and (is_system_error or _NETWORK_ERRORS.search(kinds)):
            return TransientError(why)
        return self._final_after_tries(name, why, auth=is_auth)

    def _final_after_tries(self, name: str, why: str, *, auth: bool = False) -> TransientError | Refused:
        self._failures[name] += 1
        if self._failures[name] < MOST_TRIES:
            return TransientError(why)
        return Refused(f"{why} (after {MOST_TRIES} tries; correct its address or its credentials)", auth=auth)

    def _post_about(self, entry: Entry, index: int | None) -> None:
        """Send the message about a file of an artifact, or about the reported folder if `index` is None.

        Without a file store, `file_ref` is empty, `uploaded_size_bytes` is null, and `sha256` is our digest.
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
        """Send `request` and return the body of the answer if the server acknowledged it."""
        where = safe_url(str(request.url))
        try:
            response = self._client.send(request, stream=True)
            try:
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > ANSWER_LIMIT_BYTES:  # so that an answer cannot fill the memory
                        raise Refused(f"{where} answered with more than {ANSWER_LIMIT_BYTES} bytes")
            finally:
                response.close()
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            text = f"{failure_text(error)} at {where}"
            if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes_of(error)):
                raise self._final_after_tries(where, f"{text}: its certificate cannot be verified") from error
            raise TransientError(text) from error
        except (httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise Refused(f"{failure_text(error)} at {where}") from error
        if response.request.method != request.method or response.is_redirect:
            raise Refused(f"{where} redirects (HTTP 301, 302 or 303), and such a redirect loses the upload")
        advice = _ADVICE_IF_SENT if "authorization" in response.request.headers else _ADVICE_IF_NOT_SENT
        outcome = outcome_of_status(response.status_code, response.headers, where, advice=advice)
        if outcome is not None:
            raise outcome
        return bytes(content)


class FileBody(httpx2.SyncByteStream):
    """The bytes of a file, read in pieces; each iteration starts from the beginning."""

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
    """Open a file for reading.

    Raises:
        Refused: The file no longer exists, or this user may not read it.
    """
    try:
        return os.fdopen(open_regular(path), "rb", buffering=0)
    except (FileNotFoundError, PermissionError, IsADirectoryError, UnsafeFileError) as error:
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error


def _facts_of(path: Path) -> UploadedFile:
    """Return the size and digest of a file; it is read again only if it has changed."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read: {error.strerror}") from error
    return UploadedFile(None, _sha256_of(path, status.st_size, status.st_mtime_ns), status.st_size)


@functools.lru_cache(maxsize=1024)
def _sha256_of(path: Path, _size: int, _mtime_ns: int) -> str:
    """Return the digest of a file, cached while its size and time stay the same."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_answer(content: bytes, facts: UploadedFile, where: str) -> UploadedFile:
    """Return the store's answer about a file, completed from our `facts`.

    An empty answer is an acknowledgement. Any other answer that is not a JSON object, such as the page of a proxy, is
    not. The contract does not require a digest in the answer.
    """
    try:
        answer = msgspec.json.decode(content.strip() or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TransientError(f"{where} did not answer with a JSON object") from error
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
    """Return None for success, otherwise the exception to raise.

    Args:
        status: The HTTP status.
        headers: The headers of the answer.
        where: The URL without secrets, for the message.
        advice: Text for the user if the credentials were refused.
    """
    if 200 <= status <= 299:
        return None
    reason, auth = f"HTTP {status} from {where}", status in (401, 403)
    final = Refused(f"{reason}; {advice}" if auth and advice else reason, auth=auth)
    return transient_answer(status, headers, reason) or final


def idempotency_key(run_id: str, kind: str, step: int, name: str, digest: str) -> str:
    """Return a key for deduplication. It depends only on the content, so retries and restarts use the same key."""
    identity = encode_json([run_id, kind, step, name, digest])
    return hashlib.sha256(identity).hexdigest()[:40]


def remote_name(step: int, relative_name: str, *, final: bool) -> str:
    """Return the name of a file in the store, such as ``step-00000200-trainer_lora.safetensors``."""
    prefix = "final" if final else f"step-{step:08d}"
    return f"{prefix}-{relative_name.replace('/', '_')}"


def file_url(base: str, owner: str, run_id: str, kind: Kind, name: str) -> str:
    """Return the address of a file in the store; a query of `base`, such as a signature, is kept."""
    path, question_mark, query = base.partition("?")
    parts = (owner, "runs", run_id, f"{kind}s", name)
    joined = "/".join(quote(part, safe="") for part in parts)
    return f"{path.rstrip('/')}/api/v1/file/v1/{joined}{question_mark}{query}"


def open_target(url: str) -> Target:
    """Return the target for `url`: ``hf://owner/name[@revision]``, or any URL that fsspec knows. Opens no connection.

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
        raise UploadError(f"The upload target {safe_url(url)} needs a package: {error}") from error
    except ValueError as error:
        raise ValueError(f"Invalid upload target {safe_url(url)!r}. {str(error).removesuffix('.')}.") from error
    return functools.partial(_copy_below, url)


def target_fault(url: str) -> str | None:
    """Return the fault of `url` as a target, if it can be detected without a connection."""
    try:
        open_target(url)
    except (UploadError, ValueError) as error:
        return str(error)
    return None


def _commit(url: str, files: Iterable[tuple[str, Path]], title: str) -> None:
    """Commit files to a repository of the Hugging Face hub in one commit, so that a reader sees all of them or none.

    The repository is created as private if it does not exist. Files that it already has are not sent again.
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


def _copy_below(url: str, files: Iterable[tuple[str, Path]], title: str) -> None:  # noqa: ARG001 - a `Target`
    """Copy files one by one below a folder that fsspec opens, each completely or not at all.

    Object stores show an object only when it is complete; file systems need the rename.
    """
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)  # fsspec caches the file system; this may connect
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
            raise OSError("the target reports another number of bytes")
