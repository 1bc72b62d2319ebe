"""The background thread that delivers what waits in the spool.

Entries of one kind are delivered in order. Each kind backs off on its own, so that a metrics endpoint that is down does
not hold up a checkpoint. The thread makes one request at a time and then looks again, so that metrics flow between the
files of a large checkpoint.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...adapter.contract.exceptions import ThreadLimitError, UploadError
from ...adapter.plumbing.retry import backoff_s
from ...adapter.plumbing.threads import started
from .config import UploadConfig
from .delivery import Delivery
from .journal import Entry
from .outcome import REQUIRED_KINDS, undelivered
from .payloads import Kind
from .spool import Spool
from .terminal import SETTLING_BACKOFF_CAP_S
from .transfers import Interrupted, Refused, TryAgain

__all__ = ["DeliveryThread"]

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 1.0
TIDY_AGAIN_S = 60.0


@dataclass
class _Lane:
    """One kind's turn, and how long it pauses after failures."""

    kind: Kind
    is_open: bool = True
    failures: int = 0
    not_before: float = 0.0
    server_asked_to_wait: bool = False
    last_served: float = 0.0
    last_reason: str = ""

    def pause(self, seconds: float, error: TryAgain) -> None:
        self.not_before = time.monotonic() + seconds
        self.server_asked_to_wait = error.retry_after_s is not None
        self.last_reason = error.reason

    def wake(self) -> None:
        if not self.server_asked_to_wait:
            self.not_before = 0.0

    def succeed(self) -> None:
        self.failures, self.not_before, self.server_asked_to_wait = 0, 0.0, False


class DeliveryThread:
    """Delivers metrics, samples and checkpoints; what is refused for good stays in the spool and is counted here.

    Attributes:
        condition: Guards the spool's entries against the thread's choice; notify it after adding one.
        failure: The first required upload that was refused for good, or None.
        lost_metrics: How many metric entries were refused, or dropped because too many waited.
    """

    def __init__(self, config: UploadConfig, spool: Spool, delivery: Delivery, closing: threading.Event) -> None:
        self.condition = threading.Condition()
        self.failure: UploadError | None = None
        self.lost_metrics = 0
        self._config = config
        self._spool = spool
        self._delivery = delivery
        self._closing = closing
        kinds: tuple[Kind, ...] = ("metrics", "sample", "checkpoint")
        self._lanes = [_Lane(kind, is_open=config.wants(kind)) for kind in kinds]
        self._rng = random.Random()
        self._thread: threading.Thread | None = None
        self._settling = False
        self._tidy_at = 0.0

    def start(self) -> None:
        """Begin to deliver. Calling it again has no effect; raises a `ThreadLimitError` where no thread can be had."""
        if self._thread is None:
            self._thread = started(threading.Thread(target=self._run, name="genlight-uploads", daemon=True))

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has noticed that `closing` is set; does nothing where it was not started."""
        with self.condition:
            self.condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def begin_settling(self) -> None:
        """Try everything at once, and pause for less time between tries, until `end_settling`."""
        with self.condition:
            self._settling = True
            for lane in self._lanes:
                lane.wake()
            self.condition.notify_all()

    def end_settling(self) -> None:
        """Go back to the configured pauses."""
        self._settling = False

    def wait_until(self, settled: Callable[[], bool], end: float, progress: Callable[[str], None] | None) -> None:
        """Wait until `settled` or the time `end` on the monotonic clock; `progress` is told about once a second."""
        try:
            self.start()
        except ThreadLimitError as error:
            log.error("what waits stays in the spool: %s", error)  # noqa: TRY400 - its message says all
            return
        next_line = time.monotonic() + PROGRESS_EVERY_S
        while True:
            with self.condition:
                now = time.monotonic()
                if settled() or now >= end:
                    return
                self.condition.wait(min(end - now, PROGRESS_EVERY_S))
            if progress is not None and time.monotonic() >= next_line and not settled():
                next_line = time.monotonic() + PROGRESS_EVERY_S
                progress(self._progress_line(end))

    def reasons(self) -> dict[Kind, str]:
        """Why the last try of each kind failed, for the kinds whose last try did."""
        return {lane.kind: lane.last_reason for lane in self._lanes if lane.failures}

    def refuse(self, entry: Entry, error: Refused) -> None:
        """Give `entry` up for this attempt. Any thread may call it."""
        self._delivery.forget(entry)
        if entry.kind == "metrics" and not error.auth:
            self._spool.remove(entry)
            self.count_lost_metrics(error.reason)
            return
        self._spool.fail(entry, error.reason, auth=error.auth)
        log.error("upload of %s, step %d, was refused: %s", entry.kind, entry.step, error.reason)
        if entry.kind in ("checkpoint", "sample") and self.failure is None:
            self.failure = UploadError(str(undelivered(entry, "")), auth=error.auth)

    def count_lost_metrics(self, why: str) -> None:
        """Count an entry of metrics that will not arrive; the first one is logged."""
        self.lost_metrics += 1
        if self.lost_metrics == 1:
            log.warning("metrics are not uploaded: %s; further ones are only counted", why)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._tidy()
            with self.condition:
                lane, entry, wait_s = self._choose()
                if lane is None or entry is None:
                    self.condition.wait(wait_s)
                    continue
            try:
                self._serve(lane, entry)
            except (Interrupted, UploadError):
                return  # closing
            except OSError as error:  # A network file system may have it again soon.
                self._pause(lane, TryAgain(f"its files cannot be read: {error.strerror or error}"))

    def _tidy(self) -> None:
        """Also while nothing can be delivered: dropped metrics would let the journal grow for as long as an outage."""
        if time.monotonic() < self._tidy_at:
            return
        try:
            self._spool.rewrite_when_worthwhile()
        except OSError as error:
            self._tidy_at = time.monotonic() + TIDY_AGAIN_S
            log.warning("the upload journal cannot be rewritten: %s", error.strerror)

    def _choose(self) -> tuple[_Lane | None, Entry | None, float | None]:
        """The kind whose turn it is, with its oldest entry; else how long to wait (None: until something is added)."""
        now = time.monotonic()
        waiting = [(lane, entry) for lane in self._lanes if lane.is_open and (entry := self._spool.head(lane.kind))]
        ready = [(lane, entry) for lane, entry in waiting if lane.not_before <= now]
        if ready:
            lane, entry = min(ready, key=lambda pair: pair[0].last_served)
            if lane.kind == "metrics":
                entry.attempted = True  # from here on nothing may be merged into it
            return lane, entry, None
        if waiting:
            return None, None, min(lane.not_before for lane, _ in waiting) - now
        return None, None, None

    def _serve(self, lane: _Lane, entry: Entry) -> None:
        lane.last_served = time.monotonic()
        try:
            if self._delivery.advance(entry):
                self._spool.remove(entry)
        except TryAgain as error:
            if self._closing.is_set():
                raise Interrupted from error
            self._pause(lane, error)
            return
        except Refused as error:
            self.refuse(entry, error)
        except (Interrupted, UploadError, OSError):
            raise
        except Exception as error:
            if self._closing.is_set():
                raise Interrupted from error
            log.exception("delivering a %s failed unexpectedly", entry.kind)
            self.refuse(entry, Refused(f"unexpected {type(error).__name__}"))
        lane.succeed()
        with self.condition:
            self.condition.notify_all()

    def _pause(self, lane: _Lane, error: TryAgain) -> None:
        lane.failures += 1
        cap_s = self._config.backoff_cap_s
        if self._settling:
            cap_s = min(cap_s, SETTLING_BACKOFF_CAP_S)
        pause_s = backoff_s(lane.failures, self._config.backoff_base_s, cap_s, self._rng)
        pause_s = max(pause_s, error.retry_after_s or 0.0)
        lane.pause(pause_s, error)
        level = logging.WARNING if lane.failures == 1 else logging.DEBUG
        log.log(level, "upload of %s failed (%s); next try in %.1f s", lane.kind, error.reason, pause_s)

    def _progress_line(self, end: float) -> str:
        count = sum(1 for entry in self._spool.entries() if entry.kind in REQUIRED_KINDS and entry.failure is None)
        reasons = [reason for reason in self.reasons().values() if reason]
        last = f", last error: {reasons[-1]}" if reasons else ""
        return f"uploads: {count} left, {max(0.0, end - time.monotonic()):.0f} s until the deadline{last}"
