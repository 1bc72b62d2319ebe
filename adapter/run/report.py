"""Words at the end of a run or a fit: where its results are, or what failed.

A failure is told in better words than torch's and Lightning's, and with the frames of the user's code; the whole
traceback of an error there goes to a file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..contract.exceptions import (
    CheckpointError,
    ContractError,
    GenlightError,
    MonitorError,
    ReplayWriterError,
    StartupContractError,
)
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.failures import Failure, modules_of
from ..plumbing.redaction import hide_secrets, safe_str, traceback_of
from ..plumbing.reference_page import reference
from .this_rank import host_name, this_rank

__all__ = [
    "explained",
    "is_input_error",
    "log_failure",
    "show_results",
    "shown_path",
    "working_directory",
]

log = logging.getLogger(__name__)

FAILURES_DIRECTORY: Final = "failures"
"""Where a run keeps whole tracebacks, in its artifacts directory."""
_OURS: Final = tuple(Path(__file__).resolve().parents[2] / name for name in ("adapter", "callbacks", "reporters"))
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))

_READERS = frozenset({"genlight", "lightning", "jsonargparse", "contextlib", "functools"})
"""Packages that look at a configuration and know no code of a user's."""
_MONITORS = ("lightning.pytorch.callbacks.early_stopping", "lightning.pytorch.callbacks.model_checkpoint")
_LISTENS = re.compile(r"server socket has failed to listen.*\bport: (?P<port>\d+)\b.*\bEADDRINUSE\b", re.DOTALL)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")
_NO_DEVICE = re.compile(
    r"not compiled with (CUDA|XPU) enabled|no NVIDIA driver|No CUDA GPUs are available|from the 'MPS' backend|"
    r"on a CUDA device but torch.cuda.is_available\(\)|[Cc]annot get CUDA generator|invalid device ordinal"
)
"""In what torch says when code asks for a device that this process does not have."""
_OTHER_WEIGHTS = "Error(s) in loading state_dict for"
_MOST_OF_THEM = 600
"""Characters; a model of another architecture differs in every name."""


def is_input_error(error: Exception, *, by: tuple[str, ...] = ("genlight.", "lightning.")) -> bool:
    """Whether genlight or Lightning refused something before any other code was called; its message then says all.

    Args:
        error: What was raised.
        by: Which of the two packages, or parts of them, may have raised it.
    """
    named = [name for name in modules_of(error) if name != "__main__"]
    return bool(named) and named[-1].startswith(by) and {name.partition(".")[0] for name in named} <= _READERS


def explained(error: Exception) -> GenlightError | None:
    """An error that says what a fit's `error` means and the way out; None for any other.

    Torch and Lightning raise a bare RuntimeError for the most part, so their words have to be looked at. Told apart are
    weights of a checkpoint that are not those of the model that was built, the monitor of Lightning's own
    ``EarlyStopping`` or ``ModelCheckpoint``, a port at which the ranks were to meet and something else listens, a data
    worker that died, and a device that the user's code names and that is not there.
    """
    text = safe_str(error)
    if "".join(modules_of(error)[-1:]) in _MONITORS:
        return MonitorError(text)
    if text.startswith(_OTHER_WEIGHTS):
        differences = " ".join(text.partition("\n")[2].split()).rstrip(". ")
        shown = differences if len(differences) <= _MOST_OF_THEM else f"{differences[:_MOST_OF_THEM]}…"
        return CheckpointError(
            f"The weights of the checkpoint are not those of the model that was built: {shown}. Build the model as it "
            "was, or start at step 0 with `genlight run --fresh`, of a fit `--resume never`."
        )
    if listens := _LISTENS.search(text):
        return StartupContractError(
            "startup.invalid_job_spec",
            f"The ranks cannot meet: port {listens['port']} of {host_name()} is in use by another process. Set "
            "`MASTER_PORT` to a free port, the same for all ranks (under torchrun `--rdzv-endpoint` or "
            "`--master-port`), or end that process.",
        )
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if users and _NO_DEVICE.search(text):
        return ContractError(
            f"{users[-1].filename}:{users[-1].lineno} asks for a device that this process does not have: "
            f'`{users[-1].line}`. Use `ctx.device` instead of a literal such as "cuda" (`.to(ctx.device)`, '
            "`torch.load(path, map_location=ctx.device)`); which device that is follows from `lightning.accelerator` "
            f"of the job. torch says: {text.partition(chr(10))[0]}"
        )
    if _WORKER_DIED.search(text):
        return GenlightError(
            f"{text.strip()} Often the memory was full: use fewer `workers`, or smaller batches. With `workers` 0 an "
            "error of `collate` or of a dataset shows itself in the training process."
        )
    return None


def log_failure(
    error: BaseException,
    failure: Failure,
    *,
    secrets: Sequence[str | None],
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Say what failed, with a traceback where the message alone does not tell.

    Args:
        error: What ended the run.
        failure: How it is reported.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
        folder: The run's folder, where the whole traceback of an error of the user's code goes, of which the log then
            shows the user's frames; None logs it whole.
    """
    # Ours say all, and a traceback would bury it; but of a write from a wrong thread, where that was.
    if isinstance(error, GenlightError) and not isinstance(error, ReplayWriterError):
        text = hide_secrets(safe_str(error), secrets=secrets, environ=environ)
    else:
        text = hide_secrets(traceback_of(error), secrets=secrets, environ=environ)
        users = None if folder is None else _users_part(error)
        if users is not None and folder is not None:
            place = _written(text, folder / FAILURES_DIRECTORY)
            text = f"{hide_secrets(users, secrets=secrets, environ=environ)}\n  the whole traceback {place}"
    log.error("%s failure: %s", failure.category, text)
    code = error.code if isinstance(error, StartupContractError) else ""
    if code == "startup.invalid_job_spec":
        log.info(f"every key of a job: {reference('a-jobs-keys')}")
    elif code == "startup.invalid_trainer":
        log.info(f"every hook of a trainer class: {reference('the-hooks')}")


def _users_part(error: BaseException) -> str | None:
    """The traceback of an exception with the frames of the user's code alone; None where there are none."""
    whole = traceback.TracebackException.from_exception(error, compact=True)
    each: traceback.TracebackException | None = whole
    has_frames = False
    while each is not None:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if _is_users(frame.filename)])
        has_frames = has_frames or bool(each.stack) or _is_users(str(getattr(each, "filename", None) or "<>"))
        each = each.__cause__ or each.__context__
    return traceback_of(whole) if has_frames else None


def _is_users(filename: str) -> bool:
    """Whether a file is neither genlight's, nor installed, nor part of Python."""
    path = Path(filename)
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.resolve().is_relative_to(folder) for folder in (*_OURS, *_INSTALLED))


def _written(traceback_text: str, directory: Path) -> str:
    """Write a traceback into `directory`; where it is now."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = directory / f"{stamp}-rank-{this_rank()}-{os.getpid()}.txt"
    try:
        make_directory(directory)
        write_bytes_durably(path, f"{traceback_text}\n".encode(errors="backslashreplace"), mode=0o600)
    except OSError as problem:
        return f"could not be written to {str(path)!r} ({problem.strerror or problem}):\n{traceback_text}"
    return f"is in {shown_path(path)}"


def show_results(ended: str, places: Mapping[str, Path | None]) -> None:
    """Say on standard error how a run ended, and where its results are: of `places` what is there, and not empty."""
    there = {name: path for name, path in places.items() if path is not None and path.exists()}
    lines = [
        f"  {name:<17} {shown_path(path)}" for name, path in there.items() if not path.is_dir() or any(path.iterdir())
    ]
    with contextlib.suppress(OSError):  # it has completed, also where nobody reads that
        sys.stderr.write("\n".join([ended, *lines]) + "\n")


def shown_path(path: Path) -> str:
    """A path as the user would type it from the working directory."""
    here = working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else str(path)


def working_directory() -> Path | None:
    """The working directory; None where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
