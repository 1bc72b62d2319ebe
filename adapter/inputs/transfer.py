"""Fetches references from servers, several at a time.

A module of its own because it loads the HTTP client, which a job with local inputs does without.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

import httpx2

from ...callbacks.checkpoint.format.record import LARGEST_RECORD_BYTES, CheckpointRecord, read_record
from ...reporters.uploads.destinations import remote_name
from ..contract.exceptions import AuthError, BrokenCheckpointError, InputError
from ..job.config import RunConfig
from ..plumbing.http import build_client
from ..plumbing.retry import RetryPolicy
from ..plumbing.threads import DaemonThreads
from .http import Download, download
from .huggingface import fetch_from_hub
from .local import Found, local_checkpoint
from .private_addresses import AddressGuard
from .progress import Tracker, TransferAbandoned
from .refs import CozyRef, HttpRef, HubRef, Kind, Ref
from .tensorhub import HttpResolveClient, fetch_from_cozy

__all__ = ["Fetcher", "fetch_all", "fetch_checkpoint"]

PARALLEL_TRANSFERS = 4
LOOK_EVERY_S = 0.1
"""How often it is asked whether the run was stopped while all transfers wait for their servers."""
LEFT_AFTER_S = 2.0
"""How long transfers that were ended are waited for, so that they note what has arrived. One whose server says nothing
stays behind: its thread keeps no process alive."""


def fetch_all(
    wanted: Sequence[tuple[Kind, Ref]],
    *,
    config: RunConfig,
    directory: Path,
    retry: RetryPolicy | None = None,
    tracker: Tracker,
) -> dict[tuple[Kind, Ref], Found]:
    """Fetch references in parallel; the first error ends the other transfers.

    Args:
        wanted: What to fetch, and what for.
        config: Has the token, the origins that may see it, and the tensor hub.
        directory: The download cache.
        retry: How patiently a broken transfer is taken up again.
        tracker: Told of the progress; ends the transfers when the run was stopped.

    Raises:
        AuthError: A server refused the credentials.
        InputError: Something is missing, malformed, unreachable, or cannot be stored.
    """
    with contextlib.ExitStack() as stack:
        client = build_client(config.capability_token, config.token_origins, max_connections=PARALLEL_TRANSFERS)
        stack.enter_context(client)
        if config.private_hosts is not None:
            AddressGuard(config.private_hosts).attach(client)
        fetcher = Fetcher(config, client, directory, retry or RetryPolicy(), tracker)
        threads = DaemonThreads(PARALLEL_TRANSFERS, "genlight-input")
        futures = {key: threads.submit(fetcher.fetch, *key) for key in dict.fromkeys(wanted)}
        try:
            left = set(futures.values())
            while left and not any(future.done() and future.exception() for future in futures.values()):
                _, left = wait(left, LOOK_EVERY_S, return_when="FIRST_EXCEPTION")
                if left:
                    tracker.check()
        finally:
            if any(not future.done() or future.exception() is not None for future in futures.values()):
                tracker.abandon()
                wait(futures.values(), LEFT_AFTER_S)
    _raise_first([future for future in futures.values() if future.done()])
    return {key: future.result() for key, future in futures.items()}


def _raise_first(futures: list[Future[Found]]) -> None:
    """Raise what ended the transfers: a stop before a fault, a refusal before any other fault."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, TransferAbandoned)]
    if causes:
        raise min(causes, key=lambda error: (isinstance(error, InputError), not isinstance(error, AuthError)))


@dataclass(frozen=True)
class Fetcher:
    """Fetches one reference of any kind."""

    config: RunConfig
    client: httpx2.Client
    directory: Path
    retry: RetryPolicy
    tracker: Tracker

    def fetch(self, kind: Kind, ref: Ref) -> Found:
        """Bring what `ref` names to this machine.

        Raises:
            AuthError: A server refused the credentials.
            InputError: It is missing, malformed, unreachable, or cannot be stored.
        """
        self.tracker.check()
        try:
            return self._fetch(kind, ref)
        except OSError as error:
            raise InputError(
                f"{ref.label} cannot be stored below {str(self.directory)!r}: {error.strerror or error}. "
                "Free some space, or name another cache with `XDG_CACHE_HOME` (`HF_HOME` for the hub's)."
            ) from error

    def _fetch(self, kind: Kind, ref: Ref) -> Found:
        if isinstance(ref, HttpRef):
            return self._http(kind, ref)
        if isinstance(ref, HubRef):
            return self._hub(kind, ref)
        assert isinstance(ref, CozyRef)
        return self._cozy(kind, ref)

    def _http(self, kind: Kind, ref: HttpRef) -> Found:
        # The name counts as well: a model folder must not gather one file under the names of several URLs.
        identity = f"{ref.sha256 or ref.url} {ref.file_name}"
        folder = self.directory / "http" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if kind == "checkpoint":
            return Found(fetch_checkpoint(ref, folder, self._download), ref.label)
        path = self._download(Download(ref.url, folder / ref.file_name, ref.sha256))
        return Found(folder if kind == "model" else path, ref.label)

    def _download(self, request: Download) -> Path:
        return download(request, self.client, retry=self.retry, tracker=self.tracker)

    def _hub(self, kind: Kind, ref: HubRef) -> Found:
        repository: Literal["model", "dataset"] = "dataset" if kind == "dataset" else "model"
        patterns = _hub_patterns(kind, ref)
        folder = fetch_from_hub(ref, kind=repository, patterns=patterns, retry=self.retry, tracker=self.tracker)
        path = folder / (ref.path or ".")
        if kind == "dataset":
            return Found(path, ref.label)
        if not path.exists():
            raise InputError(f"{ref.label}: the repository has no path {ref.path!r}.")
        if kind == "checkpoint":
            return Found(local_checkpoint(path), ref.label)
        return Found(path if path.is_dir() else path.parent, ref.label)

    def _cozy(self, kind: Kind, ref: CozyRef) -> Found:
        base = self.config.file_store_url
        if base is None:
            raise InputError(f"{ref.label} needs a tensor hub. Set `TENSORHUB_URL`.")
        directory = self.directory / "cozy"
        resolver = HttpResolveClient(base, self.client, directory / ".answers", self.retry)
        folder, resolved = fetch_from_cozy(ref, resolver, directory, tracker=self.tracker)
        path = local_checkpoint(folder) if kind == "checkpoint" else folder
        return Found(path, f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}")


def _hub_patterns(kind: Kind, ref: HubRef) -> list[str] | None:
    """Which files of a repository are wanted, where its reference alone does not tell."""
    if kind == "dataset" and ref.path is None:
        return ["*.parquet"]
    if kind == "checkpoint" and ref.path is not None:
        folder = ref.path.rstrip("/").removesuffix(".json")
        return [ref.path, f"{folder}.json", f"{folder}/*", f"{folder}~1/*"]
    return None


def fetch_checkpoint(ref: HttpRef, folder: Path, fetch: Callable[[Download], Path]) -> Path:
    """Fetch a record by URL and the files that it names, from the same place; the path of the local record.

    In a file store the names of files are flat, ``step-00000200-model.safetensors``; everywhere
    else the files lie where the record says. A query of the URL, a signature say, goes with every file.

    Raises:
        AuthError: The server refused the credentials.
        InputError: The record or a file of it is missing or broken.
    """
    path = fetch(Download(ref.url, folder / ref.file_name, ref.sha256, most_bytes=LARGEST_RECORD_BYTES))
    try:
        record = read_record(path)
    except BrokenCheckpointError as error:
        raise InputError(f"{ref.label} cannot be resumed from: {error}.") from None
    for file in record.files:
        url = _url_of(ref, record, file.path, record.file_name(file))
        fetch(Download(url, folder / file.path, file.sha256, file.xxh3_128, file.size))
    return path


def _url_of(ref: HttpRef, record: CheckpointRecord, relative_path: str, name: str) -> str:
    """URL of a file of the record."""
    stored_as = remote_name(record.step, name, final=record.final)
    flat = ref.file_name.startswith(remote_name(record.step, "", final=record.final))
    parts = urlsplit(ref.url)
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    located = urlsplit(urljoin(bare, quote(stored_as if flat else relative_path)))
    return urlunsplit((located.scheme, located.netloc, located.path, parts.query, ""))
