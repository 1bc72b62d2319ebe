"""Errors of torch and Lightning that users meet and whose own words do not say what to do.

They come as a bare RuntimeError for the most part, so that their words have to be looked at, in this one place.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import traceback

from ..contract.exceptions import CheckpointError, MonitorError, StartupContractError
from ..plumbing.failures import causes_of
from ..plumbing.redaction import text_of

__all__ = ["explained", "way_out_of"]

_MONITORS = ("lightning.pytorch.callbacks.early_stopping", "lightning.pytorch.callbacks.model_checkpoint")
_LISTENS = re.compile(r"server socket has failed to listen.*\bport: (?P<port>\d+)\b.*\bEADDRINUSE\b", re.DOTALL)
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_WORKER_DIED = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")

_OTHER_WEIGHTS = "Error(s) in loading state_dict for"
_MOST_OF_THEM = 600
"""Characters; a model of another architecture differs in every name."""


def explained(error: Exception) -> CheckpointError | MonitorError | StartupContractError | None:
    """An error that says what a fit's `error` means and the way out; None for any other.

    Told apart are weights of a checkpoint that are not those of the model that was built, the monitor of Lightning's
    own ``EarlyStopping`` or ``ModelCheckpoint``, and a port at which the ranks were to meet and something else listens.
    """
    text = str(error)
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1] in _MONITORS:
        return MonitorError(text_of(error))
    if text.startswith(_OTHER_WEIGHTS):
        differences = " ".join(text.partition("\n")[2].split()).rstrip(". ")
        shown = differences if len(differences) <= _MOST_OF_THEM else f"{differences[:_MOST_OF_THEM]}…"
        return CheckpointError(
            f"The weights of the checkpoint are not those of the model that was built: {shown}. Build the model as it "
            "was, or start at step 0 with `genlight run --fresh`, of a fit `--resume never`."
        )
    if listens := _LISTENS.search(text):
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        port = _port_in_use(f"port {listens['port']} of {host}")
        return StartupContractError("startup.invalid_job_spec", port)
    return None


def way_out_of(error: BaseException) -> str | None:
    """A better error for `error` or its cause, with the way out; None where it has one itself, or nobody knows."""
    for part in causes_of(error):
        text = text_of(part) if isinstance(part, RuntimeError) else ""
        if (isinstance(part, OSError) and part.errno == errno.EADDRINUSE) or _ADDRESS_IN_USE.search(text):
            return _port_in_use("the port")
        if _WORKER_DIED.search(text):
            return (
                "A data worker has died. Often the memory was full: use fewer `workers`, or smaller batches. With "
                "`workers` 0 an error of `collate` or of a dataset shows itself in the training process."
            )
    return None


def _port_in_use(port: str) -> str:
    return (
        f"The ranks cannot meet: {port} is in use by another process. Set `MASTER_PORT` to a free port, the same for "
        "all ranks (under torchrun `--rdzv-endpoint` or `--master-port`), or end that process."
    )
