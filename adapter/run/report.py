"""Messages at the end of a run or a fit: the paths of its results, or the failure.

Some errors of torch and Lightning get a clearer message. An error in the user's code is logged with the user's frames
only; its complete traceback goes to a file.
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

from ..cluster.job_context import host_name, this_rank
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
from ..plumbing.text import reference

log = logging.getLogger(__name__)

FAILURES_DIRECTORY: Final = "failures"
"""Folder for complete tracebacks, in the run's artifacts directory."""
_OURS: Final = tuple(Path(__file__).resolve().parents[2] / name for name in ("adapter", "callbacks", "reporters"))
_INSTALLED: Final = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))

_READERS = frozenset({"genlight", "lightning", "jsonargparse", "contextlib", "functools"})
"""Packages that read a configuration and contain no user code."""
_MONITORS = ("lightning.pytorch.callbacks.early_stopping", "lightning.pytorch.callbacks.model_checkpoint")
_LISTENS = re.compile(r"server socket has failed to listen.*\bport: (?P<port>\d+)\b.*\bEADDRINUSE\b", re.DOTALL)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")
_NO_DEVICE = re.compile(
    r"not compiled with (CUDA|XPU) enabled|no NVIDIA driver|No CUDA GPUs are available|from the 'MPS' backend|"
    r"on a CUDA device but torch.cuda.is_available\(\)|[Cc]annot get CUDA generator|invalid device ordinal"
)
"""Matches torch's messages about a device that this process does not have."""
_OTHER_WEIGHTS = "Error(s) in loading state_dict for"
_LONGEST_LIST = 600
"""Characters of the list of differing weights; a model of another architecture differs in every name."""


def is_input_error(error: Exception, *, by: tuple[str, ...] = ("genlight.", "lightning.")) -> bool:
    """Return whether genlight or Lightning refused an input before any other code ran, so the message is enough.

    Args:
        error: The error that was raised.
        by: The packages or modules that may have raised it.
    """
    modules = [name for name in modules_of(error) if name != "__main__"]
    return bool(modules) and modules[-1].startswith(by) and {name.partition(".")[0] for name in modules} <= _READERS


def explain(error: Exception) -> GenlightError | None:
    """Return an error with the meaning of a fit's `error` and a way out; None if we have no better message.

    Torch and Lightning often raise a bare RuntimeError, so only the message can distinguish these cases: the weights
    of a checkpoint do not fit the model; the monitor of Lightning's ``EarlyStopping`` or ``ModelCheckpoint`` is wrong;
    another process uses the port at which the ranks meet; a data worker died; the user's code asks for a device that
    does not exist.
    """
    text = safe_str(error)
    if "".join(modules_of(error)[-1:]) in _MONITORS:
        return MonitorError(text)
    if text.startswith(_OTHER_WEIGHTS):
        differences = " ".join(text.partition("\n")[2].split()).rstrip(". ")
        shown = differences if len(differences) <= _LONGEST_LIST else f"{differences[:_LONGEST_LIST]}…"
        return CheckpointError(
            f"The weights of the checkpoint do not fit the model that was built: {shown}. Build the model as it was, "
            "or start at step 0 with `genlight run --fresh`, or `genlight fit --resume never`."
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
            "`torch.load(path, map_location=ctx.device)`); `lightning.accelerator` of the job chooses that device. "
            f"torch says: {text.partition(chr(10))[0]}"
        )
    if _WORKER_DIED.search(text):
        return GenlightError(
            f"{text.strip()} Often the memory was full: use fewer `workers`, or smaller batches. With `workers` 0, an "
            "error in `collate` or in a dataset appears in the training process."
        )
    return None


def place_in_users_code(error: Exception) -> str:
    """Return " in FILE:LINE", the innermost line of the user's code in the traceback of `error`; empty without one."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f" in {users[-1].filename}:{users[-1].lineno}" if users else ""


def log_failure(
    error: BaseException,
    failure: Failure,
    *,
    secrets: Sequence[str | None],
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Log a failure, with a traceback if the message is not enough.

    Args:
        error: The error that ended the run.
        failure: The failure as it is reported.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
        folder: The run's folder. The complete traceback of an error in the user's code goes to a file there, and the
            log shows only the user's frames; None logs the complete traceback.
    """
    # Our own errors are complete; a traceback would bury them. Exception: for a write from the wrong thread, the
    # traceback shows the place.
    if isinstance(error, GenlightError) and not isinstance(error, ReplayWriterError):
        text = hide_secrets(safe_str(error), secrets=secrets, environ=environ)
    else:
        text = hide_secrets(traceback_of(error), secrets=secrets, environ=environ)
        users = None if folder is None else _users_part(error)
        if users is not None and folder is not None:
            place = _write_traceback(text, folder / FAILURES_DIRECTORY)
            text = f"{hide_secrets(users, secrets=secrets, environ=environ)}\n  the complete traceback {place}"
    log.error("%s failure: %s", failure.category, text)
    code = error.code if isinstance(error, StartupContractError) else ""
    if code == "startup.invalid_job_spec":
        log.info(f"every key of a job: {reference('a-jobs-keys')}")
    elif code == "startup.invalid_trainer":
        log.info(f"every hook of a trainer class: {reference('the-hooks')}")


def _users_part(error: BaseException) -> str | None:
    """Return the traceback of an exception with only the frames of the user's code; None if there are none."""
    complete = traceback.TracebackException.from_exception(error, compact=True)
    each: traceback.TracebackException | None = complete
    has_frames = False
    while each is not None:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if _is_users(frame.filename)])
        has_frames = has_frames or bool(each.stack) or _is_users(str(getattr(each, "filename", None) or "<>"))
        each = each.__cause__ or each.__context__
    return traceback_of(complete) if has_frames else None


def _is_users(filename: str) -> bool:
    """Return whether a file is neither genlight's, nor installed, nor part of Python."""
    path = Path(filename)
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.resolve().is_relative_to(folder) for folder in (*_OURS, *_INSTALLED))


def _write_traceback(traceback_text: str, directory: Path) -> str:
    """Write a traceback into `directory`, and return the predicate of a sentence about the file."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = directory / f"{stamp}-rank-{this_rank()}-{os.getpid()}.txt"
    try:
        make_directory(directory)
        write_bytes_durably(path, f"{traceback_text}\n".encode(errors="backslashreplace"), mode=0o600)
    except OSError as problem:
        return f"could not be written to {str(path)!r} ({problem.strerror or problem}):\n{traceback_text}"
    return f"is in {shown_path(path)}"


def show_results(ended: str, places: Mapping[str, Path | None]) -> None:
    """Write to standard error how a run ended, and each of `places` that exists and is not empty."""
    existing = {name: path for name, path in places.items() if path is not None and path.exists()}
    lines = [
        f"  {name:<17} {shown_path(path)}"
        for name, path in existing.items()
        if not path.is_dir() or any(path.iterdir())
    ]
    with contextlib.suppress(OSError):  # the run has completed, even if standard error is closed
        sys.stderr.write("\n".join([ended, *lines]) + "\n")


def shown_path(path: Path) -> str:
    """Return a path as the user would type it from the working directory."""
    here = working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else str(path)


def working_directory() -> Path | None:
    """Return the working directory; None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
