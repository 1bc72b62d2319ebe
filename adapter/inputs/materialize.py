"""Brings everything that a run names to this machine before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx2

from ...reporters.http import build_client, origin_of
from ..exceptions import AuthError, InputError
from ..run_config import RunConfig
from .cozy import HttpResolveClient, fetch_from_cozy
from .http import Download, RetryPolicy, download
from .hub import fetch_from_hub
from .local import parquet_files, readable_file
from .progress import ProgressReport, Tracker, TransferAbandoned
from .refs import PATTERN_CHARACTERS, CozyRef, HttpRef, HubRef, LocalRef, Ref, looks_like_path, parse_ref
from .resume import fetch_checkpoint, local_checkpoint

__all__ = ["Kind", "MaterializedInputs", "checked_ref", "default_cache_dir", "materialize_inputs"]

PARALLEL_TRANSFERS = 4
Kind = Literal["model", "dataset", "checkpoint"]


@dataclass(frozen=True)
class MaterializedInputs:
    """Where the inputs of a run lie on this machine; None and () for what the job does not name."""

    model_dir: Path | None = None
    model_ref: str | None = None
    """The reference without credentials; a tag is resolved to its digest."""
    parquet_paths: tuple[Path, ...] = ()
    resume_checkpoint: Path | None = None
    """The record of the checkpoint."""

    def model_handles(self) -> dict[str, str]:
        """What `StepContext.model_handles` gets."""
        handles = {"base_model_dir": self.model_dir, "base_model_ref": self.model_ref}
        return {name: str(value) for name, value in handles.items() if value is not None}


def default_cache_dir() -> Path:
    """Where downloads are kept between runs: ``$XDG_CACHE_HOME/genlight/inputs``, else below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "genlight" / "inputs"


def materialize_inputs(
    config: RunConfig,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: ProgressReport | None = None,
    raise_if_stopped: Callable[[], None] | None = None,
    retry: RetryPolicy | None = None,
) -> MaterializedInputs:
    """Fetch every input that `config` names, several at a time, and say where each lies.

    Every process of a node may call this at once: one transfers, the others wait for the files.

    Args:
        config: Names the inputs, the token and the origins that may have it.
        cache_dir: Where downloads are kept; None takes `default_cache_dir`, or the artifacts directory where that
            cannot be written.
        progress: Told of every piece that arrives, from one thread at a time.
        raise_if_stopped: Called between pieces from any thread; what it raises ends all transfers and is raised here.
        retry: How patiently a broken transfer is taken up again.

    Raises:
        AuthError: A server refused the credentials.
        InputError: Inputs are missing, malformed or unreachable; local ones are all named at once.
    """
    wanted = _wanted(config)
    tracker = Tracker(progress, raise_if_stopped)
    origins = {origin_of(origin) for origin in config.token_origins}
    directory = _cache_dir(config, cache_dir) if any(not isinstance(ref, LocalRef) for _, ref in wanted) else Path()
    with build_client(config.token, origins, max_connections=PARALLEL_TRANSFERS) as client:
        source = _Source(config, client, directory, retry or RetryPolicy(), tracker)
        found = _all(source, wanted)
    return _collected(config, wanted, found)


def _wanted(config: RunConfig) -> list[tuple[Kind, Ref]]:
    """What to fetch, after all references and local files were looked at.

    Raises:
        InputError: With every reference that is wrong.
    """
    inputs = config.inputs
    named: list[tuple[Kind, str | None]] = [("model", inputs.base_model_ref)]
    named += [("dataset", ref) for ref in inputs.dataset_parquet_refs]
    named += [("checkpoint", inputs.resume_checkpoint_ref)]
    wanted: list[tuple[Kind, Ref]] = []
    faults: list[InputError] = []
    with _noting(faults):
        _local_files(config)
    for kind, text in named:
        with _noting(faults):
            if text is not None:
                wanted.append((kind, checked_ref(kind, text)))
    if faults:
        raise faults[0] if len(faults) == 1 else InputError("\n".join(str(fault) for fault in faults))
    return wanted


def checked_ref(kind: Kind, text: str) -> Ref:
    """The meaning of a reference, after a look at what it needs on this machine.

    Raises:
        InputError: It is malformed, or names files that are not there.
    """
    pattern = kind == "dataset" and looks_like_path(text) and any(c in text for c in PATTERN_CHARACTERS)
    ref = LocalRef(Path(text)) if pattern else parse_ref(text)
    if isinstance(ref, LocalRef) and kind == "dataset":
        parquet_files(str(ref.path))
    if isinstance(ref, LocalRef) and kind == "checkpoint":
        local_checkpoint(ref.path)
    return ref


@contextmanager
def _noting(faults: list[InputError]) -> Iterator[None]:
    try:
        yield
    except InputError as fault:
        faults.append(fault)


def _local_files(config: RunConfig) -> list[Path]:
    """The Parquet files that the job names by path.

    Raises:
        InputError: With every one that is missing.
    """
    files: list[Path] = []
    faults: list[InputError] = []
    for text in config.dataset.parquet_paths if config.dataset else ():
        with _noting(faults):
            files += parquet_files(text)
    if faults:
        raise InputError("\n".join(str(fault) for fault in faults))
    return files


def _cache_dir(config: RunConfig, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given)
    directory = default_cache_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return config.artifacts_dir / "inputs"
    return directory if os.access(directory, os.W_OK) else config.artifacts_dir / "inputs"


def _all(source: _Source, wanted: list[tuple[Kind, Ref]]) -> list[_Found]:
    """Fetch everything in parallel; the first error ends the other transfers."""
    with ThreadPoolExecutor(PARALLEL_TRANSFERS, thread_name_prefix="genlight-input") as pool:
        futures = [pool.submit(source.fetch, kind, ref) for kind, ref in wanted]
        try:
            wait(futures, return_when="FIRST_EXCEPTION")
        finally:
            if any(not future.done() or future.exception() is not None for future in futures):
                source.tracker.abandon()
    _raise_first(futures)
    return [future.result() for future in futures]


def _raise_first(futures: list[Future[_Found]]) -> None:
    """Raise what ended the transfers: a stop before a fault, a refusal before any other fault."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, TransferAbandoned)]
    if causes:
        raise min(causes, key=lambda error: (isinstance(error, InputError), not isinstance(error, AuthError)))


@dataclass(frozen=True)
class _Found:
    """What became of one reference."""

    path: Path
    label: str


@dataclass(frozen=True)
class _Source:
    """Fetches one reference of any kind."""

    config: RunConfig
    client: httpx2.Client
    directory: Path
    retry: RetryPolicy
    tracker: Tracker

    def fetch(self, kind: Kind, ref: Ref) -> _Found:
        self.tracker.check()
        try:
            return self._fetch(kind, ref)
        except OSError as error:
            raise InputError(
                f"{ref.label} cannot be stored below {str(self.directory)!r}: {error.strerror or error}. "
                "Free some space, or name another cache with `XDG_CACHE_HOME` (`HF_HOME` for the hub's)."
            ) from error

    def _fetch(self, kind: Kind, ref: Ref) -> _Found:
        if isinstance(ref, LocalRef):
            return self._local(kind, ref)
        if isinstance(ref, HttpRef):
            return self._http(kind, ref)
        if isinstance(ref, HubRef):
            return self._hub(kind, ref)
        return self._cozy(kind, ref)

    def _local(self, kind: Kind, ref: LocalRef) -> _Found:
        if kind == "checkpoint":
            return _Found(local_checkpoint(ref.path), ref.label)
        if kind == "model" and not ref.path.is_dir():
            return _Found(readable_file(ref.path).parent, ref.label)
        return _Found(ref.path, ref.label)

    def _http(self, kind: Kind, ref: HttpRef) -> _Found:
        # The name counts as well: a model folder must not gather one file under the names of several URLs.
        identity = f"{ref.sha256 or ref.url} {ref.file_name}"
        folder = self.directory / "http" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if kind == "checkpoint":
            path = fetch_checkpoint(ref, folder, self.client, retry=self.retry, tracker=self.tracker)
            return _Found(path, ref.label)
        request = Download(ref.url, folder / ref.file_name, ref.sha256)
        path = download(request, self.client, retry=self.retry, tracker=self.tracker)
        return _Found(folder if kind == "model" else path, ref.label)

    def _hub(self, kind: Kind, ref: HubRef) -> _Found:
        repository: Literal["model", "dataset"] = "dataset" if kind == "dataset" else "model"
        folder = fetch_from_hub(
            ref, kind=repository, patterns=_hub_patterns(kind, ref), retry=self.retry, tracker=self.tracker
        )
        path = folder / (ref.path or ".")
        if kind == "dataset":
            return _Found(path, ref.label)
        if not path.exists():
            raise InputError(f"{ref.label}: the repository has no path {ref.path!r}.")
        if kind == "checkpoint":
            return _Found(local_checkpoint(path), ref.label)
        return _Found(path if path.is_dir() else path.parent, ref.label)

    def _cozy(self, kind: Kind, ref: CozyRef) -> _Found:
        base = self.config.file_store_url
        if base is None:
            raise InputError(f"{ref.label} needs a tensor hub. Set `TENSORHUB_URL`.")
        directory = self.directory / "cozy"
        resolver = HttpResolveClient(base, self.client, directory / ".answers", self.retry)
        folder, resolved = fetch_from_cozy(ref, resolver, directory, tracker=self.tracker)
        path = local_checkpoint(folder) if kind == "checkpoint" else folder
        return _Found(path, f"cozy:{resolved.owner}/{resolved.repo}@{resolved.digest}")


def _hub_patterns(kind: Kind, ref: HubRef) -> list[str] | None:
    """Which files of a repository are wanted, where its reference alone does not tell."""
    if kind == "dataset" and ref.path is None:
        return ["*.parquet"]
    if kind == "checkpoint" and ref.path is not None:
        folder = ref.path.rstrip("/").removesuffix(".json")
        return [ref.path, f"{folder}.json", f"{folder}/*", f"{folder}~1/*"]
    return None


def _collected(config: RunConfig, wanted: list[tuple[Kind, Ref]], found: list[_Found]) -> MaterializedInputs:
    by_kind: dict[str, list[_Found]] = {"model": [], "dataset": [], "checkpoint": []}
    for (kind, _), result in zip(wanted, found, strict=True):
        by_kind[kind].append(result)
    model = by_kind["model"][0] if by_kind["model"] else None
    parquet = [file for result in by_kind["dataset"] for file in parquet_files(str(result.path))]
    checkpoint = by_kind["checkpoint"][0].path if by_kind["checkpoint"] else None
    if config.resume_checkpoint_path is not None:
        checkpoint = local_checkpoint(config.resume_checkpoint_path)
    return MaterializedInputs(
        model_dir=model.path if model else None,
        model_ref=model.label if model else None,
        parquet_paths=tuple(_local_files(config) + parquet),
        resume_checkpoint=checkpoint,
    )
