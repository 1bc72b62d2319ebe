"""Messages at the end of a run or a fit: the paths of its results, or the failure.

An error in the user's code is logged with the user's frames only; its complete traceback goes to a file. If a step ran
out of memory, the message names the size of each part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..cluster.job_context import this_rank
from ..contract.exceptions import GenlightError, ReplayWriterError, StartupContractError
from ..job.config import JOB_NAME
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.failures import Failure, is_users, place_in_users_code
from ..plumbing.redaction import hide_secrets, safe_str, traceback_of
from ..plumbing.text import reference, size_text

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

FAILURES_DIRECTORY: Final = "failures"
"""Folder for complete tracebacks, in the run's artifacts directory."""
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_STATES = (
    "Several devices can share it: `lightning.strategy` genlight.adapter.FSDP2Strategy. On one, train fewer weights "
    "(LoRA, `requires_grad_(False)`), or use an optimizer with smaller states."
)
_ACTIVATIONS = (
    "Use smaller batches and accumulate gradients in `train_step`, `torch.utils.checkpoint` for the largest modules, "
    "or `lightning.precision` bf16-mixed."
)


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
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if is_users(frame.filename)])
        has_frames = has_frames or bool(each.stack) or is_users(str(getattr(each, "filename", None) or "<>"))
        each = each.__cause__ or each.__context__
    return traceback_of(complete) if has_frames else None


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


def explain_memory(
    error: Exception, trainer: pl.Trainer, module: pl.LightningModule, run: Path | None
) -> GenlightError | None:
    """Return an error with the sizes of parameters, gradients, optimizer states and the rest; None for other errors.

    The rest is the peak that the device has counted, minus the other parts. The CPU counts no peak, so there it is
    unknown. Counting the memory that each module keeps for its backward would slow down every step. So the error names
    the command that trains the step once more and counts it.
    """
    # Imported here: a run that does not train loads none of these.
    import torch
    from torch.utils._pytree import tree_leaves

    from ..plumbing.devices import memory_in_use

    text = safe_str(error)
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, GenlightError)
    if not is_torchs or not (isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(text)):
        return None
    parameters = [*module.parameters(), *module.buffers()]
    parts = {
        "parameters": _nbytes(parameters),
        "gradients": _nbytes(each.grad for each in parameters if each.grad is not None),
        "optimizer states": _nbytes(tree_leaves([dict(each.state) for each in trainer.optimizers])),
    }
    device = trainer.strategy.root_device
    if (counted := memory_in_use(device)) is not None:
        parts["activations and temporary tensors"] = max(counted[1] - sum(parts.values()), 0)
    largest = max(parts, key=lambda name: parts[name])
    held = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    replay = ""
    if run is not None and (run / JOB_NAME).is_file() and (step := getattr(module, "failed_step", 0)):
        replay = f" What each module keeps: `genlight replay {shown_path(run)} --step {step} --memory`."
    states = largest in ("parameters", "gradients", "optimizer states") and device.type != "cpu"
    return GenlightError(
        f"{type(error).__name__}: {text.partition(chr(10))[0].rstrip('.')}{place_in_users_code(error)}. "
        f"Held on {device}: {held}. {_STATES if states else _ACTIVATIONS}{replay}"
    )


def _nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes that tensors occupy on this rank; views of one storage count once, and shards as their part."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors if isinstance(each, Tensor))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


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
