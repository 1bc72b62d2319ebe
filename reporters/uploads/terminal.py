"""The message that says how a run ended: acknowledged once, and never sent again."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from dataclasses import replace
from typing import Any

from ...adapter.contract.exceptions import ThreadLimitError
from ...adapter.plumbing.retry import backoff_s
from ...adapter.plumbing.threads import started
from ...adapter.plumbing.urls import safe_url
from .config import UploadConfig
from .delivery import Delivery
from .journal import Entry
from .payloads import TerminalPayload, UploadedFile, idempotency_key, terminal_payload
from .spool import Spool
from .transfers import Refused, TryAgain

__all__ = ["SETTLING_BACKOFF_CAP_S", "enqueue_terminal", "note_acknowledged", "send_terminal", "with_reference"]

log = logging.getLogger(__name__)

SETTLING_BACKOFF_CAP_S = 5.0
"""Longest pause between tries while a run waits for its end."""
SHORTEST_TRY_S = 0.05
BEYOND_LIMIT_S = 0.2
"""How much longer than the limit the thread is waited for, so that it can say itself why it gave up."""


def with_reference(payload: TerminalPayload, uploaded: UploadedFile | None) -> TerminalPayload:
    """`payload` with what is known of its final checkpoint, where it does not say so itself."""
    if uploaded is None:
        return payload
    return replace(
        payload,
        final_checkpoint_ref=payload.final_checkpoint_ref or uploaded.ref,
        final_checkpoint_sha256=payload.final_checkpoint_sha256 or uploaded.sha256 or None,
    )


def enqueue_terminal(spool: Spool, run_id: str, payload: TerminalPayload) -> Entry | None:
    """Put a terminal message into the spool in place of an older one; None where it was acknowledged before.

    Where the disk does not take the message, it is sent from memory.
    """
    key = _terminal_key(run_id, payload)
    if spool.receipt(key) is not None:
        return None
    for stale in spool.entries("terminal"):
        spool.remove(stale)
    body: dict[str, Any] = {"payload": terminal_payload(run_id, payload), "key": key}
    entry = spool.add("terminal", payload.step, body)
    spool.sync()
    _log_disk_refusal(spool, "the terminal message is not on disk")
    return entry


def note_acknowledged(spool: Spool, entry: Entry) -> None:
    """Remember that `entry` arrived, so that no process sends it again."""
    spool.add_receipt(entry.body["key"], {"step": entry.step})
    spool.remove(entry)
    _log_disk_refusal(spool, "the acknowledged terminal message could not be noted")


def send_terminal(
    entry: Entry, limit_s: float, delivery: Delivery, config: UploadConfig, closing: threading.Event
) -> TryAgain | Refused | None:
    """Try until the message is acknowledged (None), refused, or no time is left for another try.

    The exchange takes place in a thread that is abandoned at the limit: no timeout of a connection catches a server
    that sends a byte now and then, or a name server that does not answer. The calling thread still handles signals.
    Where no thread can be started it takes place in the calling one, and those timeouts have to do.
    """
    outcome: queue.SimpleQueue[TryAgain | Refused | None] = queue.SimpleQueue()

    def exchange() -> None:
        try:
            outcome.put(_send_until(entry, limit_s, delivery, config, closing))
        except Exception as error:  # noqa: BLE001 - the waiting thread gets it
            outcome.put(TryAgain(f"unexpected {type(error).__name__}"))

    try:
        started(threading.Thread(target=exchange, name="genlight-terminal", daemon=True))
    except ThreadLimitError:
        exchange()
    try:
        return outcome.get(timeout=max(limit_s, SHORTEST_TRY_S) + BEYOND_LIMIT_S)
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


def _terminal_key(run_id: str, payload: TerminalPayload) -> str:
    """A run completes once, whichever attempt says so; each attempt may fail once."""
    completed = payload.status == "completed"
    digest = (payload.final_checkpoint_sha256 or "") if completed else f"attempt {payload.attempt}"
    return idempotency_key(run_id, "terminal", payload.step, payload.status, digest)


def _log_disk_refusal(spool: Spool, what: str) -> None:
    refusal = spool.catch_up()
    if refusal is not None:
        log.error("%s, the spool cannot be written: %s", what, refusal.strerror)
