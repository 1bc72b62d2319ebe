"""Turn the exception that ended an attempt into its report: the error to show, category, text, exit code.

All reports of an attempt come from here: the event log, the terminal payload, the command line, the notes of ranks.

1. `error_to_report` chooses the error: the stop that caused a failure, or an error with a clearer message than torch or
   Lightning give.
2. `describe_failure` classifies that error.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..contract.exceptions import (
    AuthError,
    CheckpointError,
    ContractError,
    EventLogError,
    FailureCategory,
    GenlightError,
    HookOrderError,
    InputError,
    MonitorError,
    NonfiniteError,
    StartupContractError,
    StopReason,
    TrainingCanceled,
    UploadError,
    UsageError,
)
from .redaction import hide_environment, safe_str
from .text import shortened

EXIT_COMPLETED: Final = 0
EXIT_FAILED: Final = 1
EXIT_STARTUP: Final = 2
"""A startup error, or wrong usage of the command line."""
EXIT_NONFINITE: Final = 3
"""A loss, gradient or weight became nan or infinite, and the job stops in that case: it would happen again."""
EXIT_STOPPED: Final = 75
"""Canceled, timed out or preempted: a restart continues from the checkpoint (``EX_TEMPFAIL`` of sysexits.h)."""

_LONGEST_TEXT = 2000

_READERS = frozenset({"genlight", "lightning", "jsonargparse", "contextlib", "functools"})
"""Packages that read a configuration and contain no user code."""
_MONITORS = ("lightning.pytorch.callbacks.early_stopping", "lightning.pytorch.callbacks.model_checkpoint")
_LISTENS = re.compile(r"server socket has failed to listen.*\bport: (?P<port>\d+)\b.*\bEADDRINUSE\b", re.DOTALL)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")
"""Matches the message of the ``RuntimeError`` that torch raises if a loader loses a worker."""
_NO_DEVICE = re.compile(
    r"not compiled with (CUDA|XPU) enabled|no NVIDIA driver|No CUDA GPUs are available|from the 'MPS' backend|"
    r"on a CUDA device but torch.cuda.is_available\(\)|[Cc]annot get CUDA generator|invalid device ordinal"
)
"""Matches torch's messages about a device that this process does not have."""
_MISCONFIGURATION = "MisconfigurationException"
"""Lightning's error, by name: importing it takes seconds."""
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_OTHER_WEIGHTS = "Error(s) in loading state_dict for"
_LONGEST_LIST = 600
"""Maximum length of the list of differing weights, in characters; another architecture differs in every name."""


@dataclass(frozen=True)
class Failure:
    """The report of a run that did not complete."""

    category: FailureCategory | StopReason
    text: str
    """``category:safe text``, or the reason of a stop."""
    resumable: bool
    """Whether the same command, repeated, continues from a checkpoint."""
    exit_code: int


def describe_failure(
    error: BaseException,
    *,
    has_checkpoint: bool,
    lost_steps: bool = False,
    stage: FailureCategory = "train-step",
    secrets: Iterable[str | None] = (),
    environ: Mapping[str, str] | None = None,
) -> Failure:
    """Describe a failure by its exception and stage. Never raises, whatever the exception's own methods do.

    Args:
        error: The exception that ended the run. The report is about the one that `error_to_report` returns for it.
        has_checkpoint: Whether a restart finds a checkpoint.
        lost_steps: Whether trained steps may be lost; then not even a stop is resumable without a checkpoint.
        stage: The activity that failed: the category, unless the exception's type decides it.
        secrets: Texts that must not be shown.
        environ: Environment whose values must not be shown; None takes the process's own.
    """
    error = error_to_report(error)
    if (reason := stop_reason(error)) is not None:
        return Failure(reason, reason, resumable=has_checkpoint or not lost_steps, exit_code=EXIT_STOPPED)
    category = failure_category(error) or stage
    text = f"{category}:{safe_text(error, secrets=secrets, environ=environ)}"
    if category == "startup":
        return Failure(category, text, resumable=False, exit_code=EXIT_STARTUP)
    exit_code = EXIT_NONFINITE if isinstance(error, NonfiniteError) else EXIT_FAILED
    return Failure(category, text, resumable=has_checkpoint, exit_code=exit_code)


def error_to_report(
    error: BaseException,
    *,
    signalled: StopReason | None = None,
    is_saved: bool = False,
    explain_further: Callable[[Exception], GenlightError | None] = lambda _: None,
    refuse: Callable[[Exception], GenlightError | None] | None = None,
) -> BaseException:
    """Return the error to report: a better one with `error` as its cause, or `error` itself.

    The better one is the first of these that exists:

    - a stop, also one that Lightning or Python raised as another exception;
    - the stop that caused a failure, if the checkpoint of the stop was saved or the signal ended a data worker;
    - an error with a clearer message and a way out, by `explain` or `explain_further`;
    - the refusal of an input, by `refuse`.

    Args:
        error: The exception that ended the attempt.
        signalled: The stop that a signal asked for.
        is_saved: Whether there is a checkpoint of the step in progress.
        explain_further: Knows errors that `explain` does not.
        refuse: Turns an error with which genlight or Lightning refused an input into one about the configuration. None
            before the configuration is used, and after the first step has begun.
    """
    causes = list(causes_of(error))
    better: BaseException | None = None
    stop = next(filter(stop_reason, causes), None)
    if stop is not None and (stop is error or is_saved):
        if isinstance(stop, TrainingCanceled):
            return stop
        better = TrainingCanceled(str(stop_reason(stop)))
    elif stop is None and signalled and any(_WORKER_DIED.search(safe_str(each)) for each in causes):
        better = TrainingCanceled(signalled)
    elif isinstance(error, Exception):
        better = explain(error) or explain_further(error)
        if better is None and refuse is not None and _is_about_input(error):
            better = refuse(error)
    if better is None:
        return error
    better.__cause__ = error
    return better


def _is_about_input(error: Exception) -> bool:
    types = isinstance(error, (ValueError, EventLogError, *_WRONG_PATH))
    return (types or type(error).__name__ == _MISCONFIGURATION) and is_input_error(error)


def text_of_error(error: Exception) -> str:
    """Return the text of an error, without the error number if it is about a path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return safe_str(error).strip()


def safe_text(
    error: BaseException, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None
) -> str:
    """Return the text of an exception without values that must not leave the machine; see `hide_environment`.

    genlight's own exceptions give all their lines, joined; others give their type and first line.
    """
    # Hide values before the text is split, because a value may have several lines.
    hidden = hide_environment(safe_str(error), secrets=tuple(secrets), environ=environ)
    lines = [line.strip() for line in hidden.strip().splitlines()]
    if lines and isinstance(error, GenlightError):
        text = "; ".join(line.removeprefix("- ") for line in lines)
    else:
        text = ": ".join([type(error).__name__, *lines[:1]])
    return shortened(text, _LONGEST_TEXT)


def failure_category(error: BaseException) -> FailureCategory | None:
    """Return the category that the exception's type decides, or None."""
    if isinstance(error, StartupContractError | HookOrderError | UsageError):
        return "startup"
    if isinstance(error, UploadError):
        return "auth" if error.auth else "upload"
    if isinstance(error, InputError):
        return "auth" if isinstance(error, AuthError) else "input"
    return None


def stop_reason(error: BaseException) -> StopReason | None:
    """Return the reason of a stop; None for a failure."""
    if isinstance(error, TrainingCanceled):
        known: dict[str, StopReason] = {"timeout": "timeout", "preempted": "preempted"}
        return known.get(error.reason, "canceled")
    # Lightning can only have raised its own exception if it is loaded.
    lightning = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightning is not None and isinstance(error, lightning.SIGTERMException):
        return "preempted"
    if isinstance(error, SystemExit):
        error = error.__context__ or error  # Lightning turns Ctrl-C into SystemExit
    return "canceled" if isinstance(error, KeyboardInterrupt) else None


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the chain of its causes and contexts."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__


def modules_of(error: BaseException) -> list[str]:
    """Return the names of the modules in an error's traceback; the last one raised it."""
    return [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]


def is_input_error(error: Exception) -> bool:
    """Return whether genlight or Lightning refused an input and the traceback has no code of the user.

    The message is enough then, and a traceback would not help.
    """
    modules = [name for name in modules_of(error) if name != "__main__"]
    return (
        bool(modules)
        and modules[-1].startswith(("genlight.", "lightning."))
        and {name.partition(".")[0] for name in modules} <= _READERS
    )


def explain(error: Exception) -> GenlightError | None:
    """Return an error with the meaning of a fit's `error` and a way out; None if we have no better message.

    Torch and Lightning often raise a bare RuntimeError, so only the message can distinguish these cases: the weights
    of a checkpoint do not fit the model; the monitor of Lightning's ``EarlyStopping`` or ``ModelCheckpoint`` is wrong;
    another process uses the port at which the ranks meet; a data worker died; the user's code asks for a device that
    does not exist.
    """
    if isinstance(error, GenlightError):
        return None
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
            f"The ranks cannot meet: port {listens['port']} of {platform.node()} is in use by another process. Set "
            "`MASTER_PORT` to a free port, the same for all ranks (under torchrun `--rdzv-endpoint` or "
            "`--master-port`), or end that process.",
        )
    frame = frame_of_user(error)
    if frame is not None and _NO_DEVICE.search(text):
        return ContractError(
            f"{frame.filename}:{frame.lineno} asks for a device that this process does not have: "
            f'`{frame.line}`. Use `ctx.device` instead of a literal such as "cuda" (`.to(ctx.device)`, '
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
    frame = frame_of_user(error)
    return "" if frame is None else f" in {frame.filename}:{frame.lineno}"


def frame_of_user(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code in the traceback of `error`; None if there is none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((frame for frame in frames if is_users(frame.filename)), None)


def is_users(filename: str) -> bool:
    """Return whether a file is neither genlight's, nor installed, nor part of Python."""
    path = Path(filename)
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(path.resolve().is_relative_to(folder) for folder in _folders_of_others())


@functools.cache
def _folders_of_others() -> tuple[Path, ...]:
    """Return the folders of genlight, of installed packages and of Python."""
    ours = (Path(__file__).parents[2] / name for name in ("adapter", "callbacks", "reporters"))
    installed = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    return tuple(folder.resolve() for folder in (*ours, *installed))
