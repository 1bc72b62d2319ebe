"""Bring all inputs of a run to this machine before training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..contract.exceptions import InputError
from ..job.config import RunConfig
from ..plumbing.durable import make_directory
from ..plumbing.urls import has_scheme, is_http_url
from .private_addresses import AddressGuard
from .refs import Kind, Ref, RemoteRef, check_ref, local_checkpoint, parquet_files


@dataclass(frozen=True)
class MaterializedInputs:
    """Local paths of the inputs of a run; None or () for inputs that the job does not name."""

    model_dir: Path | None = None
    model_ref: str | None = None
    """The reference without credentials; a tag is resolved to its digest."""
    parquet_paths: tuple[Path | str, ...] = ()
    resume_checkpoint: Path | None = None
    """The record of the checkpoint."""

    def model_handles(self) -> dict[str, str]:
        """Return the value of `StepContext.model_handles`."""
        handles = {"base_model_dir": self.model_dir, "base_model_ref": self.model_ref}
        return {name: str(value) for name, value in handles.items() if value is not None}


def materialize_inputs(config: RunConfig, *, raise_if_stopped: Callable[[], None] = lambda: None) -> MaterializedInputs:
    """Fetch every input that `config` names, several at a time, and return the local paths.

    All processes of a node may call this at once: one transfers, the others wait for the files.

    Args:
        config: Has the inputs, the token and the origins that may receive it.
        raise_if_stopped: Called every 0.1 s while files are fetched. An exception that it raises ends all transfers.

    Raises:
        AuthError: A server refused the credentials.
        InputError: Inputs are missing, malformed or unreachable. The message names every missing local input and every
            malformed reference.
    """
    files, references = _check_inputs(config)
    remote = [(kind, ref) for kind, ref in references if not isinstance(ref, Path)]
    fetched: dict[tuple[Kind, RemoteRef], tuple[Path, str]] = {}
    if remote:
        from .transfer import fetch_all  # loads the HTTP client, which local inputs do not need

        fetched = fetch_all(remote, config, _cache_dir(config), raise_if_stopped)
    inputs: dict[Kind, list[tuple[Path, str]]] = {"model": [], "dataset": [], "checkpoint": []}
    for kind, ref in references:
        inputs[kind].append((ref, str(ref)) if isinstance(ref, Path) else fetched[kind, ref])
    model_dir, model_ref = inputs["model"][0] if inputs["model"] else (None, None)
    checkpoint = inputs["checkpoint"][0][0] if inputs["checkpoint"] else None
    if config.resume_checkpoint_path is not None:
        checkpoint = local_checkpoint(config.resume_checkpoint_path)
    return MaterializedInputs(
        model_dir=model_dir,
        model_ref=model_ref,
        parquet_paths=(*files, *(file for path, _ in inputs["dataset"] for file in parquet_files(str(path)))),
        resume_checkpoint=checkpoint,
    )


def _check_inputs(config: RunConfig) -> tuple[list[Path | str], list[tuple[Kind, Ref]]]:
    """Return the data files that the job names directly, and its references. A URL of a data file is left to the feed.

    Raises:
        InputError: A reference is invalid or a file is missing. The message names all of them.
    """
    files: list[Path | str] = []
    references: list[tuple[Kind, Ref]] = []
    faults: list[InputError] = []
    data = [(None, path) for path in (config.dataset.parquet_paths if config.dataset else ())]
    for kind, text in (*data, *named_inputs(config)):
        try:
            if kind is not None:
                references.append((kind, check_ref(kind, text)))
            elif has_scheme(text):
                if config.private_hosts is not None and is_http_url(text):
                    AddressGuard(config.private_hosts).check_url(text)
                files.append(text)
            else:
                files += parquet_files(text)
        except InputError as fault:
            faults.append(fault)
    if faults:
        raise faults[0] if len(faults) == 1 else InputError("\n".join(str(fault) for fault in faults))
    return files, references


def named_inputs(config: RunConfig) -> list[tuple[Kind, str]]:
    """Return the references of a job's ``inputs``, each with its purpose."""
    inputs = config.inputs
    named: list[tuple[Kind, str | None]] = [("model", inputs.base_model_ref)]
    named += [("dataset", ref) for ref in inputs.dataset_parquet_refs]
    named += [("checkpoint", inputs.resume_checkpoint_ref)]
    return [(kind, text) for kind, text in named if text is not None]


def _cache_dir(config: RunConfig) -> Path:
    """Return the folder for downloads of all runs: ``$XDG_CACHE_HOME/genlight/inputs``, by default in ``~/.cache``.

    Return a folder in the artifacts directory if that one cannot be written.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "genlight", "inputs")
    with contextlib.suppress(OSError):
        make_directory(directory)
        if os.access(directory, os.W_OK):
            return directory
    return config.artifacts_dir / "inputs"
