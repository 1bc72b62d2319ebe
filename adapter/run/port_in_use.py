"""A port at which the ranks were to meet, and at which something else listens."""

from __future__ import annotations

import os
import re
import socket

from ..contract.exceptions import StartupContractError

__all__ = ["about_port_in_use"]

_TAKEN = re.compile(r"server socket has failed to listen.*\bport: (?P<port>\d+)\b.*\bEADDRINUSE\b", re.DOTALL)


def about_port_in_use(error: Exception) -> StartupContractError | None:
    """An error that names the port, the host and the way out; None where `error` is about something else.

    torch tells it in words alone, by a RuntimeError.
    """
    found = _TAKEN.search(str(error))
    if found is None:
        return None
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return StartupContractError(
        "startup.invalid_job_spec",
        f"The ranks cannot meet: port {found['port']} of {host} is in use by another process. Set `MASTER_PORT` to a "
        "free port, the same for all ranks (under torchrun `--rdzv-endpoint` or `--master-port`), or end that process.",
    )
