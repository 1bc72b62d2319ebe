"""A run as its orchestrator sees it: claimed, kept alive, cancelled, reported.

No setting of a job names a control plane: a caller hands a `JobLifecycleClient`, such as `HttpLifecycleClient` or
one of its own, to ``run_job(RunOptions(lifecycle=…))``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx2

from ..contract.exceptions import AuthError, GenlightError, InputError, StartupContractError
from ..contract.types import JobLifecycleClient, LifecycleLease
from ..plumbing.http import build_client, failure_text
from ..plumbing.retry import RetryPolicy, TransientError, is_transient, with_retries
from ..plumbing.threads import DaemonThreads, started
from ..plumbing.urls import origin_of

__all__ = ["HttpLifecycleClient", "LifecycleSession"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_GONE: Final = (404, 409, 410)
"""Answers that say that the lease is another's, or that the run is no longer known."""


LARGEST_ANSWER = 1 << 20
"""Bytes of an answer that are read."""
INTERVAL_S = 5.0
"""Seconds between heartbeats."""
LOOK_EVERY_S = 0.1
"""How often a stop is looked for while an answer is waited for."""


class HttpLifecycleClient:
    """Speaks to a control plane in JSON; conforms to `JobLifecycleClient`, and is safe to share between threads.

    ===================================  ==========================================  ====================
    request                              body                                        answer
    ===================================  ==========================================  ====================
    ``POST <base>/runs/<id>/claim``      ``{}``                                      ``{"lease_id": …}``
    ``POST <base>/runs/<id>/heartbeat``  ``{"lease_id"}``                            ``{"alive": true}``
    ``POST <base>/runs/<id>/cancel``     ``{"lease_id"}``                            ``{"cancel": false}``
    ``POST <base>/runs/<id>/completed``  ``{"lease_id", "step", "final_checkpoint"}``
    ``POST <base>/runs/<id>/failed``     ``{"lease_id", "step", "error"}``
    ===================================  ==========================================  ====================

    404, 409 and 410 to a claim mean that the run is not to be had, to a heartbeat that the lease is lost. ``cancel``
    asks whether the orchestrator wants a stop. What is transient is tried again, except for a heartbeat. An answer has
    at most 1 MiB, and a redirect that turns the request into a GET, which changes nothing there, is refused.

    Args:
        base_url: Where the control plane is.
        token: Bearer token; shown to the origin of `base_url` alone.
        attempts: How often a request is made that meets a transient error.
        timeout_s: Seconds without an answer, or with a part of one, after which a request counts as failed.

    Raises:
        ValueError: `base_url` is no ``http`` or ``https`` URL.
    """

    def __init__(self, base_url: str, *, token: str | None = None, attempts: int = 5, timeout_s: float = 10.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._client = build_client(token, {origin_of(base_url)}, connect_timeout_s=timeout_s, timeout_s=timeout_s)

    def claim(self, *, run_id: str) -> LifecycleLease:
        """Take the run.

        Raises:
            StartupContractError: ``startup.artifacts_in_use``: another worker holds it, or it is not known.
            AuthError: The control plane refused the credentials.
            InputError: It cannot be reached, or its answer has no lease.
        """
        answer = self._post(run_id, "claim", {}, attempts=self._attempts)
        if answer is None:
            raise StartupContractError(
                "startup.artifacts_in_use", f"run {run_id!r} is not available: another worker holds its lease"
            )
        lease_id = answer.get("lease_id")
        if not isinstance(lease_id, str) or not lease_id:
            raise InputError(f"the control plane answered the claim of run {run_id!r} without a lease_id")
        return LifecycleLease(run_id, lease_id)

    def heartbeat(self, *, lease: LifecycleLease) -> bool:
        """Renew the lease; False when it is lost. Raises as `claim` does where that is not known."""
        answer = self._post(lease.run_id, "heartbeat", {"lease_id": lease.lease_id}, attempts=1)
        return answer is not None and answer.get("alive", True) is True

    def request_cancel(self, *, lease: LifecycleLease) -> bool:
        """Whether the orchestrator wants the run to stop. Raises as `claim` does where that is not known."""
        answer = self._post(lease.run_id, "cancel", {"lease_id": lease.lease_id}, attempts=1)
        return answer is not None and answer.get("cancel") is True

    def mark_completed(self, *, lease: LifecycleLease, step: int, final_checkpoint: str | None) -> None:
        """Report the end as planned; raises as `claim` does."""
        self._report(lease, "completed", {"step": step, "final_checkpoint": final_checkpoint})

    def mark_failed(self, *, lease: LifecycleLease, step: int, error: str) -> None:
        """Report the end by an error or a stop; raises as `claim` does."""
        self._report(lease, "failed", {"step": step, "error": error})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _report(self, lease: LifecycleLease, what: str, facts: dict[str, Any]) -> None:
        body = {"lease_id": lease.lease_id, **facts}
        if self._post(lease.run_id, what, body, attempts=self._attempts) is None:
            raise InputError(f"the control plane rejects {what!r} of run {lease.run_id!r}: the lease is lost")

    def _post(self, run_id: str, what: str, body: dict[str, Any], *, attempts: int) -> dict[str, Any] | None:
        """The answer; None where the run or the lease is gone."""
        url = f"{self._base_url}/runs/{quote(run_id, safe='')}/{what}"

        def attempt() -> dict[str, Any] | None:
            try:
                with self._client.stream("POST", url, json=body) as response:
                    if is_transient(response.status_code):
                        raise TransientError(f"status {response.status_code}")
                    return _answer(response, what, end=time.monotonic() + self._timeout_s)
            except httpx2.TransportError as error:
                raise TransientError(failure_text(error)) from None
            except httpx2.RequestError as error:  # too many redirects, or bytes that cannot be decoded
                raise InputError(f"the control plane answered {what!r} unusably: {failure_text(error)}") from None

        try:
            return with_retries(attempt, RetryPolicy(attempts, first_delay_s=0.1, longest_delay_s=2.0), time.sleep)
        except TransientError as error:
            raise InputError(f"the control plane did not accept {what!r} of run {run_id!r}: {error}") from None


def _answer(response: httpx2.Response, what: str, *, end: float) -> dict[str, Any] | None:
    code = response.status_code
    if code in _GONE:
        return None
    if code in (401, 403):
        raise AuthError(f"the control plane refused the credentials for {what!r} with status {code}")
    if not response.is_success:
        raise InputError(f"the control plane answered {what!r} with status {code}")
    if response.request.method != "POST":
        raise InputError(f"the control plane redirects {what!r} to where it is only read; let it answer 307 or 308")
    content = bytearray()
    for part in response.iter_bytes():
        content += part
        if len(content) > LARGEST_ANSWER:
            raise InputError(f"the control plane answered {what!r} with more than {LARGEST_ANSWER:,} bytes")
        if time.monotonic() > end:
            raise TransientError("the answer does not end")
    try:
        answer = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise InputError(f"the control plane answered {what!r} with something other than a JSON object")
    return answer


class LifecycleSession:
    """The lease of one run, from its claim to its end; a context, which claims when it is entered.

    A thread renews the lease and asks for a cancel. A lease that was lost, that could not be renewed for `patience_s`,
    also because a request does not return, or a wish to cancel is a `reason` to stop; an error in between is only
    logged.

    Args:
        client: The control plane.
        run_id: The run to claim.
        interval_s: Seconds between heartbeats; None means 5.
        patience_s: How long the control plane may be away.
        answer_s: How long an answer to the claim, or to the report of the end, is waited for, whatever the client does.
        raise_if_stopped: Called while the claim is waited for; what it raises ends the wait.

    Raises:
        Exception: What ``client.claim`` raises, when the context is entered.
        InputError: The claim was not answered within `answer_s`.
    """

    def __init__(
        self,
        client: JobLifecycleClient,
        run_id: str,
        *,
        interval_s: float | None = None,
        patience_s: float = 60.0,
        answer_s: float = 60.0,
        raise_if_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._raise_if_stopped = raise_if_stopped
        self._lease: LifecycleLease | None = None
        self._reason: str | None = None
        self._renewed_at = 0.0
        self._asks = False
        """Whether a request of the thread is under way."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="genlight-lease", daemon=True)

    def __enter__(self) -> Self:
        self._lease = self._answer(lambda: self._client.claim(run_id=self._run_id), self._raise_if_stopped)
        self._renewed_at = time.monotonic()
        started(self._thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._interval_s)

    def reason(self) -> str | None:
        """``canceled`` once the run has to stop, else None; costs nothing."""
        if self._reason is None and self._asks and self._is_overdue():  # a client may wait for ever
            self._stop_overdue()
        return self._reason

    def completed(self, step: int, final_checkpoint: Path | None, *, within_s: float | None = None) -> None:
        """Report the end as planned; what the control plane does not take `within_s` (None: `answer_s`) is logged."""
        final = None if final_checkpoint is None else str(final_checkpoint)
        self._report(
            lambda lease: self._client.mark_completed(lease=lease, step=step, final_checkpoint=final), within_s
        )

    def failed(self, step: int, error: str, *, within_s: float | None = None) -> None:
        """Report the end by an error or a stop; else as `completed`."""
        self._report(lambda lease: self._client.mark_failed(lease=lease, step=step, error=error), within_s)

    def _report(self, tell: Callable[[LifecycleLease], None], within_s: float | None) -> None:
        assert self._lease is not None
        self._ended.set()
        lease = self._lease
        try:
            self._answer(lambda: tell(lease), lambda: None, within_s)
        except Exception as error:  # noqa: BLE001 - as above
            log.error("the end of the run could not be reported to the control plane: %s", _text(error))  # noqa: TRY400

    def _answer(self, ask: Callable[[], T], raise_if_stopped: Callable[[], None], within_s: float | None = None) -> T:
        """The client's answer, from a thread of its own, which a wait that ends leaves behind."""
        future = DaemonThreads(1, "genlight-control-plane").submit(ask)
        limit_s = self._answer_s if within_s is None else within_s
        end = time.monotonic() + limit_s
        while not wait([future], LOOK_EVERY_S).done:
            raise_if_stopped()
            if time.monotonic() >= end:
                raise InputError(f"the control plane did not answer for {limit_s:.0f} s")
        return future.result()

    def _beat(self) -> None:
        assert self._lease is not None
        while not self._ended.wait(self._interval_s):
            try:
                self._asks = True
                if not self._client.heartbeat(lease=self._lease):
                    self._stop("the lease is lost")
                    return
                self._renewed_at = time.monotonic()
                if self._client.request_cancel(lease=self._lease):
                    self._stop("the orchestrator requested it")
                    return
            except Exception as error:  # noqa: BLE001 - a client of the user's own may raise anything
                log.warning("no heartbeat to the control plane: %s", _text(error))
                if self._is_overdue():
                    self._stop_overdue()
                    return
            finally:
                self._asks = False

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._renewed_at >= self._patience_s

    def _stop_overdue(self) -> None:
        self._stop(f"the lease could not be renewed for {self._patience_s:.0f} s")

    def _stop(self, why: str) -> None:
        log.warning("run %s is to stop: %s", self._run_id, why)
        self._reason = "canceled"


def _text(error: Exception) -> str:
    """Our own errors are safe to show; of others only the type is."""
    return str(error) if isinstance(error, GenlightError) else type(error).__name__
