"""The connection between a run and its orchestrator: claim, heartbeat, cancel, report.

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

T = TypeVar("T")

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Seconds between heartbeats."""
PATIENCE_S = 60.0
"""Seconds for which the control plane may be unreachable."""
POLL_S = 0.1
"""Seconds between checks for a stop while a request waits for its answer."""


class Lease:
    """The claim on one run, from its start to its end.

    A thread renews it and asks whether to cancel. The run has a `reason` to stop if the lease is lost, if nothing has
    renewed it for `PATIENCE_S` (even because a request never returns), or if the control plane cancels the run. A
    single error is only logged.

    Args:
        client: The control plane.
        run_id: The run to claim.
        answer_s: Maximum wait for an answer to the claim, in seconds, even if the client never returns.
        raise_if_stopped: Called while waiting for the claim; an exception from it ends the wait.

    Raises:
        Exception: ``client.claim`` raised it.
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
        """Stop renewing the lease."""
        self._ended.set()
        self._thread.join(INTERVAL_S)

    def reason(self) -> str | None:
        """Return ``canceled`` once the run has to stop, otherwise None. Sends nothing."""
        if self._reason is None and time.monotonic() - self._renewed_at >= PATIENCE_S:
            self._stop(f"the lease could not be renewed for {PATIENCE_S:.0f} s")
        return self._reason

    def completed(self, step: int, final_checkpoint: str | None, *, within_s: float) -> None:
        """Report that the run completed. If the control plane does not accept this in `within_s` seconds, log that."""
        self._report(
            functools.partial(self._client.mark_completed, step=step, final_checkpoint=final_checkpoint), within_s
        )

    def failed(self, step: int, error: str, *, within_s: float) -> None:
        """Report that an error or a stop ended the run; otherwise like `completed`."""
        self._report(functools.partial(self._client.mark_failed, step=step, error=error), within_s)

    def _report(self, mark: Callable[..., None], within_s: float) -> None:
        self._ended.set()
        try:
            _answer(functools.partial(mark, lease=self._lease), within_s)
        except Exception as error:  # noqa: BLE001 - a user's client may raise anything
            log.error("the end of the run could not be reported to the control plane: %s", _text(error))  # noqa: TRY400

    def _beat(self) -> None:
        """Renew the lease and ask whether to cancel, until the run ends or has a reason to stop."""
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
        log.warning("run %s stops: %s", self._lease.run_id, why)
        self._reason = "canceled"


def _answer(ask: Callable[[], T], within_s: float, raise_if_stopped: Callable[[], None] = lambda: None) -> T:
    """Call the client in a separate thread and return its answer. After a timeout, the thread is abandoned."""
    future = DaemonThreads(1, "genlight-control-plane").submit(ask)
    end = time.monotonic() + within_s
    while not wait([future], POLL_S).done:
        raise_if_stopped()
        if time.monotonic() >= end:
            raise InputError(f"the control plane did not answer for {within_s:.0f} s")
    return future.result()


def _text(error: Exception) -> str:
    """Return the message of an error of genlight, because it hides secrets; of any other error only the type."""
    return str(error) if isinstance(error, GenlightError) else type(error).__name__
