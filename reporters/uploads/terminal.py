"""The message that says how a run ended: acknowledged once, and never sent again."""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import replace

from ...adapter.plumbing.retry import Refused, TryAgain, backoff_s
from ...adapter.plumbing.urls import safe_url
from .config import UploadConfig
from .delivery import Delivery
from .journal import Entry
from .payloads import TerminalPayload, UploadedFile, idempotency_key

__all__ = ["SETTLING_BACKOFF_CAP_S", "send_terminal", "terminal_key", "with_reference"]

SETTLING_BACKOFF_CAP_S = 5.0
"""Longest pause between tries while a run waits for its end."""
SHORTEST_TRY_S = 0.05
BEYOND_LIMIT_S = 0.2
"""How much longer than the limit the thread is waited for, so that it can tell itself why it gave up."""


def with_reference(payload: TerminalPayload, uploaded: UploadedFile | None) -> TerminalPayload:
    """`payload` with what is known of its final checkpoint, where it does not say so itself."""
    if uploaded is None:
        return payload
    return replace(
        payload,
        final_checkpoint_ref=payload.final_checkpoint_ref or uploaded.ref,
        final_checkpoint_sha256=payload.final_checkpoint_sha256 or uploaded.sha256 or None,
    )


def terminal_key(run_id: str, payload: TerminalPayload) -> str:
    """A run completes once, whichever attempt says so; each attempt may fail once."""
    completed = payload.status == "completed"
    digest = (payload.final_checkpoint_sha256 or "") if completed else f"attempt {payload.attempt}"
    return idempotency_key(run_id, "terminal", payload.step, payload.status, digest)


def send_terminal(
    entry: Entry, limit_s: float, delivery: Delivery, config: UploadConfig, closing: threading.Event
) -> TryAgain | Refused | None:
    """Try until it is acknowledged (None), refused, or no time is left for another try.

    The exchange takes place in a thread that is left behind at the limit: a server that sends a byte now and then, or a
    name server that does not answer, is heard of by no timeout of a connection. A signal is heeded meanwhile.
    """
    told: queue.SimpleQueue[TryAgain | Refused | None] = queue.SimpleQueue()

    def exchange() -> None:
        try:
            told.put(_send_until(entry, limit_s, delivery, config, closing))
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it
            told.put(TryAgain(f"unexpected {type(error).__name__}"))

    threading.Thread(target=exchange, name="genlight-terminal", daemon=True).start()
    try:
        return told.get(timeout=max(limit_s, SHORTEST_TRY_S) + BEYOND_LIMIT_S)
    except queue.Empty:
        return TryAgain(f"{safe_url(config.terminal_url or '')} did not answer within {limit_s:g} s")


def _send_until(
    entry: Entry, limit_s: float, delivery: Delivery, config: UploadConfig, closing: threading.Event
) -> TryAgain | Refused | None:
    end, failures, rng = time.monotonic() + limit_s, 0, random.Random()
    cap_s = min(config.backoff_cap_s, SETTLING_BACKOFF_CAP_S)
    while True:
        left = max(SHORTEST_TRY_S, end - time.monotonic())
        try:
            delivery.send_terminal(entry, min(config.timeout_s, left))
        except Refused as error:
            return error
        except TryAgain as error:
            failures += 1
            pause = max(backoff_s(failures, config.backoff_base_s, cap_s, rng), error.retry_after_s or 0.0)
            if time.monotonic() + pause >= end:
                return error
            closing.wait(pause)
        else:
            return None
