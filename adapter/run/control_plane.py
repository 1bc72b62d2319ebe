"""A run as its orchestrator sees it: claimed, kept alive, cancelled, reported.

No setting of a job names a control plane: a caller hands a `JobLifecycleClient` to `run_job` in its `RunOptions`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from ..contract.exceptions import GenlightError, InputError
from ..contract.types import JobLifecycleClient
from ..plumbing.threads import DaemonThreads, started

__all__ = ["Lease"]

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between heartbeats."""
PATIENCE_S = 60.0
"""How long the control plane may be away."""
LOOK_EVERY_S = 0.1
"""How often a stop is looked for while an answer is waited for."""


class Lease:
    """The claim on one run, from its start to its end.

    A thread renews it and asks for a cancel. A lease that was lost, that could not be renewed for `PATIENCE_S`, also
    because a request does not return, or a wish to cancel is a `reason` to stop; an error in between is only logged.

    Args:
        client: The control plane.
        run_id: The run to claim.
        answer_s: How long an answer to the claim is waited for, whatever the client does.
        raise_if_stopped: Called while the claim is waited for; what it raises ends the wait.

    Raises:
        Exception: What ``client.claim`` raises.
        InputError: The claim was not answered within `answer_s`.
    """

    def __init__(
        self, client: JobLifecycleClient, run_id: str, *, answer_s: float, raise_if_stopped: Callable[[], None]
    ) -> None:
        self._client = client
        self._lease = _answer(functools.partial(client.claim, run_id=run_id), answer_s, raise_if_stopped)
        self._renewed_at = time.monotonic()
        self._reason: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="genlight-lease", daemon=True)
        started(self._thread)

    def close(self) -> None:
        """Renew it no more."""
        self._ended.set()
        self._thread.join(INTERVAL_S)

    def reason(self) -> str | None:
        """``canceled`` once the run has to stop, else None; costs nothing."""
        if self._reason is None and time.monotonic() - self._renewed_at >= PATIENCE_S:
            self._stop(f"the lease could not be renewed for {PATIENCE_S:.0f} s")
        return self._reason

    def completed(self, step: int, final_checkpoint: str | None, *, within_s: float) -> None:
        """Report the end as planned; what the control plane does not take `within_s` is logged."""
        self._report(
            functools.partial(self._client.mark_completed, step=step, final_checkpoint=final_checkpoint), within_s
        )

    def failed(self, step: int, error: str, *, within_s: float) -> None:
        """Report the end by an error or a stop; else as `completed`."""
        self._report(functools.partial(self._client.mark_failed, step=step, error=error), within_s)

    def _report(self, mark: Callable[..., None], within_s: float) -> None:
        self._ended.set()
        try:
            _answer(functools.partial(mark, lease=self._lease), within_s)
        except Exception as error:  # noqa: BLE001 - a client of the user's own may raise anything
            log.error("the end of the run could not be reported to the control plane: %s", _text(error))  # noqa: TRY400

    def _beat(self) -> None:
        while self._reason is None and not self._ended.wait(INTERVAL_S):
            try:
                if not self._client.heartbeat(lease=self._lease):
                    self._stop("the lease is lost")
                    return
                self._renewed_at = time.monotonic()
                if self._client.request_cancel(lease=self._lease):
                    self._stop("the orchestrator requested it")
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("no heartbeat to the control plane: %s", _text(error))

    def _stop(self, why: str) -> None:
        log.warning("run %s is to stop: %s", self._lease.run_id, why)
        self._reason = "canceled"


def _answer(ask: Callable[[], T], within_s: float, raise_if_stopped: Callable[[], None] = lambda: None) -> T:
    """The client's answer, from a thread of its own, which a wait that ends leaves behind."""
    future = DaemonThreads(1, "genlight-control-plane").submit(ask)
    end = time.monotonic() + within_s
    while not wait([future], LOOK_EVERY_S).done:
        raise_if_stopped()
        if time.monotonic() >= end:
            raise InputError(f"the control plane did not answer for {within_s:.0f} s")
    return future.result()


def _text(error: Exception) -> str:
    """Our own errors are safe to show; of others only the type is."""
    return str(error) if isinstance(error, GenlightError) else type(error).__name__
