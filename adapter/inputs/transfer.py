"""Fetch references from servers, several at a time.

huggingface_hub fetches from the Hugging Face hub, with its cache and credentials (``HF_TOKEN``, ``HF_ENDPOINT``,
``HF_HOME``). The hub never gets the capability token of the run.

This module is separate from `materialize`, because it loads the HTTP client, which local inputs do not need. The
transfer of a single file is in `http`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

import httpx2
import msgspec

from ...callbacks.checkpoint.format.record import LARGEST_RECORD_BYTES, CheckpointRecord, read_record
from ...reporters.uploads.destinations import remote_name
from ..contract.exceptions import AuthError, BrokenCheckpointError, InputError
from ..contract.types import ResolvedRef
from ..job.config import RunConfig
from ..plumbing.failures import causes_of
from ..plumbing.http import build_client, failure_text
from ..plumbing.retry import RetryPolicy, TransientError, transient_answer, with_retries
from ..plumbing.text import HUB_LOGIN
from ..plumbing.threads import DaemonThreads
from .http import Download, Transport, download, log_arrival
from .private_addresses import AddressGuard
from .refs import CozyRef, HttpRef, HubRef, Kind, RemoteRef, parse_ref, resolve_path

PARALLEL_TRANSFERS = 4
RETRY = RetryPolicy()
POLL_S = 0.1
"""Seconds between two checks for a stop of the run."""
ABANDONED_AFTER_S = 2.0
"""Seconds that the other transfers have to end after an error. Then they are abandoned: their threads are daemons."""
DEFAULT_TAG = "latest"
PLAIN_NAME = re.compile(r"(?!\.{1,2}$)[\w.+=@~#,() -]{1,255}")
"""Matches a part of a path that is unambiguous for every system, server and terminal."""
LARGEST_ANSWER_BYTES = 64 << 20


def fetch_all(
    references: Sequence[tuple[Kind, RemoteRef]],
    config: RunConfig,
    directory: Path,
    raise_if_stopped: Callable[[], None],
) -> dict[tuple[Kind, RemoteRef], tuple[Path, str]]:
    """Fetch references in parallel; the first error ends the other transfers.

    Args:
        references: The references, each with its purpose.
        config: Has the token, the origins that may receive it, and the tensor hub.
        directory: The download cache.
        raise_if_stopped: Called every 0.1 s. An exception that it raises ends all transfers.

    Returns:
        The path of each reference, and its name without credentials.

    Raises:
        AuthError: A server refused the credentials.
        InputError: Something is missing, malformed, unreachable, or cannot be stored.
    """
    with build_client(config.capability_token, config.token_origins, max_connections=PARALLEL_TRANSFERS) as client:
        if config.private_hosts is not None:
            AddressGuard(config.private_hosts).attach(client)
        transport = Transport(client, RETRY)
        fetch = functools.partial(_fetch, config=config, directory=directory, transport=transport)
        threads = DaemonThreads(PARALLEL_TRANSFERS, "genlight-input")
        futures = {key: threads.submit(functools.partial(fetch, *key)) for key in dict.fromkeys(references)}
        left = set(futures.values())
        try:
            while left:
                done, left = wait(left, POLL_S, return_when="FIRST_COMPLETED")
                raise_if_stopped()
                for future in done:
                    future.result()
        except BaseException:
            transport.ended.set()
            wait(left, ABANDONED_AFTER_S)
            raise
        return {key: future.result() for key, future in futures.items()}


def _fetch(kind: Kind, ref: RemoteRef, *, config: RunConfig, directory: Path, transport: Transport) -> tuple[Path, str]:
    """Fetch a reference of any kind; return its local path, and its name without credentials.

    Raises:
        AuthError: A server refused the credentials.
        InputError: The files are missing, malformed, unreachable, or cannot be stored.
    """
    transport.wait(0)
    try:
        if isinstance(ref, HttpRef):
            # With the digest alone, two URLs with the same content and different file names would share a folder. But
            # the folder of a model must have only the file of its URL.
            identity = f"{ref.digest or ref.url} {ref.file_name}"
            folder = directory / "http" / hashlib.sha256(identity.encode()).hexdigest()[:32]
            if kind == "checkpoint":
                return fetch_checkpoint(ref, folder, transport), ref.label
            path = download(Download(ref.url, folder / ref.file_name, ref.digest), transport)
            return folder if kind == "model" else path, ref.label
        if isinstance(ref, HubRef):
            path = fetch_from_hub(kind, ref, transport) / (ref.path or ".")
            if kind != "dataset" and not path.exists():  # for a dataset it may be a pattern
                raise InputError(f"{ref.label}: the repository has no path {ref.path!r}.")
            return resolve_path(kind, path), ref.label
        if config.file_store_url is None:
            raise InputError(f"{ref.label} needs a tensor hub. Set `TENSORHUB_URL`.")
        folder, label = HttpResolveClient(config.file_store_url, transport, directory / "cozy").fetch(ref)
        return resolve_path(kind, folder), label
    except OSError as error:
        raise InputError(
            f"{ref.label} cannot be stored below {str(directory)!r}: {error.strerror or error}. "
            "Free some space, or name another cache with `XDG_CACHE_HOME` (`HF_HOME` for the hub's)."
        ) from error


def fetch_checkpoint(ref: HttpRef, folder: Path, transport: Transport) -> Path:
    """Fetch a record by URL, and its files from the same folder; return the path of the local record.

    In a file store, names of files are flat (``step-00000200-model.safetensors``). Elsewhere the files are at the paths
    in the record. A query of the URL, such as a signature, is added to the URL of every file.

    Raises:
        AuthError: The server refused the credentials.
        InputError: The record or one of its files is missing or broken.
    """
    request = Download(ref.url, folder / ref.file_name, ref.digest, most_bytes=LARGEST_RECORD_BYTES)
    path = download(request, transport)
    try:
        record = read_record(path)
    except BrokenCheckpointError as error:
        raise InputError(f"{ref.label} cannot be resumed from: {error}.") from None
    for file in record.files:
        url = _url_of(ref, record, file.path, record.file_name(file))
        digest = f"sha256:{file.sha256}" if file.sha256 else f"xxh3_128:{file.xxh3_128}"
        download(Download(url, folder / file.path, digest, file.size), transport)
    return path


def _url_of(ref: HttpRef, record: CheckpointRecord, relative_path: str, name: str) -> str:
    """Return the URL of a file of the record."""
    stored_as = remote_name(record.step, name, final=record.final)
    flat = ref.file_name.startswith(remote_name(record.step, "", final=record.final))
    url = httpx2.URL(ref.url)
    return str(url.join(quote(stored_as if flat else relative_path)).copy_with(query=url.query or None))


def fetch_from_hub(kind: Kind, ref: HubRef, transport: Transport) -> Path:
    """Fetch a repository, or the part that a reference names; return the folder of its snapshot.

    Raises:
        AuthError: The hub refused the credentials, or the repository is gated.
        InputError: There is no such repository or revision, or the hub cannot be reached.
    """
    patterns = ["*.parquet"] if kind == "dataset" else None
    if ref.path is not None:
        name = ref.path.rstrip("/").removesuffix(".json") if kind == "checkpoint" else ref.path.rstrip("/")
        # The data of a checkpoint are in `NAME~1/` if the folder `NAME/` existed when it was saved.
        patterns = [ref.path, f"{name}/*", *([f"{name}.json", f"{name}~1/*"] if kind == "checkpoint" else [])]
    repository = "dataset" if kind == "dataset" else "model"
    try:
        folder = with_retries(lambda: _snapshot(ref, repository, patterns), transport.retry, transport.wait)
    except TransientError as error:
        attempts = transport.retry.attempts
        raise InputError(f"{ref.label} cannot be fetched: {error}, after {attempts} attempts.") from None
    log_arrival(ref.label, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    return folder


def _snapshot(ref: HubRef, kind: str, patterns: list[str] | None) -> Path:
    """Try once to fetch the files that are not in the cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            ref.repo_id,
            repo_type=kind,
            revision=ref.revision,
            allow_patterns=patterns,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, httpx2.HTTPError) as error:
        raise _translate(error, ref, kind) from None
    return Path(folder)


def _translate(error: Exception, ref: HubRef, kind: str) -> Exception:
    """Translate an error of huggingface_hub.

    If its cache lacks the files, its error is about the cache, and the server's answer is only among the causes.
    """
    from huggingface_hub import errors, get_token

    causes = list(causes_of(error))
    answer = next((cause for cause in causes if isinstance(cause, errors.HfHubHTTPError)), None)
    status = 0 if answer is None else answer.response.status_code
    if status in (401, 403):
        who = "nobody is logged in" if get_token() is None else "the token that was sent may not read it"
        return AuthError(
            f"The hub refused {ref.label} (status {status}): the {kind} does not exist, or it is private or gated and "
            f"{who}. Check its name, request access, or log in as a user who may read it: {HUB_LOGIN}."
        )
    if status == 404:
        return InputError(
            f"{ref.label}: the hub has no such {kind} or revision, and there is no such path on this machine."
        )
    reason = next((c for c in causes if isinstance(c, errors.OfflineModeIsEnabled | errors.HFValidationError)), None)
    refusal = InputError(f"{ref.label} cannot be fetched from the hub: {reason or error}")
    if reason is not None:
        return refusal
    if answer is not None:
        return transient_answer(status, answer.response.headers, f"the hub answered with status {status}") or refusal
    if isinstance(error, OSError) and error.errno is not None:
        return error
    failed = next((f" ({failure_text(cause)})" for cause in causes if isinstance(cause, httpx2.TransportError)), "")
    return TransientError(f"the hub cannot be reached{failed}")


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a repository."""

    path: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Manifest(msgspec.Struct, frozen=True):
    """The files of a repository."""

    files: list[ManifestFile]


class Resolution(msgspec.Struct, frozen=True):
    """The server's answer to a tag."""

    owner: str
    repo: str
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]


# Created here, in one thread; see the decoder in `http`.
_MANIFEST, _RESOLUTION = msgspec.json.Decoder(Manifest), msgspec.json.Decoder(Resolution)


@dataclass(frozen=True)
class HttpResolveClient:
    """A `ResolveClient` over HTTP: a tag becomes a digest, the digest a list of files, each with its own digest.

    Two requests below the base URL describe a repository:

    ``GET /api/v1/resolve/<owner>/<repo>?tag=<tag>``
        answers ``{"owner", "repo", "digest"}``; the digest is ``sha256:`` and 64 hexadecimal digits.
    ``GET /api/v1/manifest/<owner>/<repo>/<digest>``
        answers the manifest, ``{"files": [{"path", "sha256", "size_bytes"}]}``. Its bytes have that digest, so a
        reference with a digest always names the same files.

    A file is at ``/api/v1/file/v1/<owner>/<repo>/<digest>/<path>``; the server may redirect from there.

    Args:
        base_url: ``TENSORHUB_URL``.
        transport: Sends the token only to permitted origins.
        directory: The cache.
    """

    base_url: str
    transport: Transport
    directory: Path

    def resolve(self, *, ref: str) -> ResolvedRef:
        """Return the digest for ``cozy:owner/repo[:tag][@digest]``; no request is sent if the reference has one.

        Raises:
            AuthError: The server refused the credentials.
            InputError: There is no such repository or tag, or the answer is malformed.
        """
        parsed = parse_ref(ref if ref.startswith("cozy:") else f"cozy:{ref}")
        assert isinstance(parsed, CozyRef)
        if parsed.digest is not None:
            return ResolvedRef(parsed.owner, parsed.repo, parsed.digest)
        tag = parsed.tag or DEFAULT_TAG
        path = f"resolve/{quote(parsed.owner)}/{quote(parsed.repo)}?tag={quote(tag, safe='')}"
        answer = _decode(self._get(path, f"resolve-{parsed.owner}-{parsed.repo}"), _RESOLUTION, parsed.label)
        if (answer.owner, answer.repo) != (parsed.owner, parsed.repo):
            other = f"{answer.owner}/{answer.repo}"
            raise InputError(f"{parsed.label}: the server answered for a different repository, {other!r:.200}.")
        return ResolvedRef(answer.owner, answer.repo, answer.digest)

    def fetch(self, ref: CozyRef) -> tuple[Path, str]:
        """Fetch all files of a repository; return their folder, and the name of the repository with its digest.

        Raises:
            AuthError: The server refused the credentials.
            InputError: See `resolve`; or the manifest has another digest or unusual names, or a file does not match
                it.
        """
        resolved = self.resolve(ref=ref.label)
        address = f"{quote(resolved.owner)}/{quote(resolved.repo)}/{quote(resolved.digest)}"
        label = f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}"
        files = _decode(self._get(f"manifest/{address}", "manifest", resolved.digest), _MANIFEST, label).files
        _refuse_unusual_names(files, label)
        folder = self.directory / resolved.owner / resolved.repo / resolved.digest.replace(":", "-")
        for file in files:
            url, digest = f"{self._base}/file/v1/{address}/{quote(file.path)}", f"sha256:{file.sha256.lower()}"
            download(Download(url, folder / file.path, digest, file.size_bytes), self.transport)
        return folder, label

    def _get(self, path: str, name: str, digest: str | None = None) -> bytes:
        target = self.directory / ".answers" / hashlib.sha256((digest or path).encode()).hexdigest() / f"{name}.json"
        request = Download(f"{self._base}/{path}", target, digest, most_bytes=LARGEST_ANSWER_BYTES)
        return download(request, self.transport).read_bytes()

    @property
    def _base(self) -> str:
        return f"{self.base_url.rstrip('/')}/api/v1"


def _decode(content: bytes, decoder: msgspec.json.Decoder[Any], label: str) -> Any:
    try:
        return decoder.decode(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label}: the server's answer is malformed: {error}.") from None


def _refuse_unusual_names(files: Sequence[ManifestFile], label: str) -> None:
    """Refuse unusual names, duplicate names, and a file whose name is the folder of another file."""
    for file in files:
        if not all(map(PLAIN_NAME.fullmatch, file.path.split("/"))):
            raise InputError(f"{label}: its manifest lists a file with unusual characters: {file.path!r:.200}.")
    paths = [PurePosixPath(file.path) for file in files]
    folders = {parent for path in paths for parent in path.parents}
    if len(set(paths)) < len(paths) or not folders.isdisjoint(paths):
        raise InputError(f"{label}: its manifest lists the same path twice.")
