"""The background thread that empties the spool.

The training thread adds entries, which costs it one short write each. One thread delivers them: in order within a
kind, each kind with a back-off of its own, so that a metrics endpoint that is away does not hold up a checkpoint. It
makes one request at a time and then looks again, so that metrics flow between the files of a large checkpoint.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...adapter.contract.exceptions import StartupContractError, UploadError
from ...adapter.plumbing.http import build_client
from ...adapter.plumbing.retry import Interrupted, Refused, TryAgain, backoff_s
from .artifact import Artifact, files_in, pack, stored_path, unpack
from .config import UploadConfig
from .delivery import Delivery, receipt_key
from .hard_links import Held, hold
from .journal import Entry
from .leftovers import claim, look_through
from .outcome import REQUIRED_KINDS, SettleResult, undelivered
from .payloads import Kind, TerminalPayload, UploadedFile, terminal_payload
from .spool import Spool, SpoolInUseError
from .targets import open_target
from .terminal import SETTLING_BACKOFF_CAP_S, send_terminal, terminal_key, with_reference
from .transfers import Wire

__all__ = ["Uploader"]

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
CLOSE_WAIT_S = 2.0
METRICS_GRACE_S = 5.0
PROGRESS_EVERY_S = 1.0
TIDY_AGAIN_S = 60.0


@dataclass
class _Lane:
    """One kind's place in the turn, and how long it rests after failures."""

    kind: Kind
    is_open: bool = True
    failures: int = 0
    not_before: float = 0.0
    server_asked_to_wait: bool = False
    last_served: float = 0.0
    last_reason: str = ""

    def rest(self, seconds: float, *, asked: bool, reason: str) -> None:
        self.not_before = time.monotonic() + seconds
        self.server_asked_to_wait = asked
        self.last_reason = reason

    def wake(self) -> None:
        if not self.server_asked_to_wait:
            self.not_before = 0.0


class Uploader:
    """Delivers what is enqueued, in the background, also what an earlier process of the run left behind.

    `starts` counts how often an uploader was made for the run's spool, this time included.

    Args:
        config: Destinations and limits. The token stays in memory: give it anew at each start.
        keep_terminal: Whether a terminal message that an earlier attempt could not deliver is still wanted. A run that
            starts anew will end in a way of its own, and drops it.

    Raises:
        UploadError: The spool's journal is damaged, or a target's package is missing.
        StartupContractError: ``startup.artifacts_in_use``: another run has the spool open, or its uploads wait in it.
            Or the environment's proxies or certificates cannot be used.
        ValueError: A target's URL is malformed.
    """

    def __init__(self, config: UploadConfig, *, keep_terminal: bool = False) -> None:
        self.config = config
        self._targets = {target.name: target for target in map(open_target, config.targets)}
        self._client = build_client(config.token, config.origins(), timeout_s=config.timeout_s)
        try:
            self._spool = Spool(config.spool_dir)
        except SpoolInUseError as error:
            self._client.close()
            raise StartupContractError("startup.artifacts_in_use", str(error)) from error
        except BaseException:
            self._client.close()
            raise
        self._root = self._spool.directory.parent
        self._condition = threading.Condition()
        self._closing = threading.Event()
        wire = Wire(self._client, resume_from_bytes=config.resume_from_bytes, interrupted=self._closing.is_set)
        self._delivery = Delivery(config, self._spool, wire, self._targets, self._closing.is_set)
        kinds: tuple[Kind, ...] = ("metrics", "sample", "checkpoint")
        self._lanes = [_Lane(kind, is_open=config.wants(kind)) for kind in kinds]
        self._rng = random.Random()
        self._thread: threading.Thread | None = None
        self._failure: UploadError | None = None
        self._settling = False
        self._lost_metrics = 0
        self._tidy_at = 0.0
        try:
            self.starts = claim(self._spool, config, sorted(self._targets))
            look_through(self._spool, config, keep_terminal=keep_terminal)
        except BaseException:
            self.close()
            raise

    # enqueueing, from the training thread

    def enqueue_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step; those of the same step that were not sent yet are merged with it.

        Best effort: never raises for a full disk, and drops the oldest when too many wait.
        """
        if not self.config.wants("metrics"):
            return
        values = {name: float(value) for name, value in metrics.items()}
        with self._condition:
            self._add_or_merge_metrics(values, step)
            self._condition.notify_all()

    def enqueue_checkpoint(
        self,
        record_path: StrPath,
        files: Sequence[StrPath] = (),
        step: int = 0,
        final: bool = False,
        primary_path: StrPath | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Queue a checkpoint that is durable; the record goes last.

        Args:
            record_path: The commit record, or the checkpoint itself where it is one file.
            files: The files that belong to it; a directory stands for all files in it.
            step: Completed steps.
            final: Whether this is the end of the run.
            primary_path: The file or folder that is reported instead of the record.
            hold: Whether somebody may delete the files who does not ask `pending_paths`: hard links keep them.

        Raises:
            UploadError: A file is missing, or the spool cannot be written; it is tried from memory then.
        """
        if not self.config.wants("checkpoint"):
            return
        main, subject = Path(os.path.abspath(record_path)), Path(os.path.abspath(primary_path or record_path))
        wanted = [path for given in (*files, subject, main) for path in files_in(given)]
        held = self._hold(main, wanted) if hold else None
        place = held.link_of if held is not None else Path
        artifact = pack(
            self._root,
            place(main),
            [place(path) for path in wanted],
            primary=place(subject),
            reported=str(subject),
            main_reported=str(main),
            final=final,
            held=held is not None,
        )
        self._enqueue_artifact("checkpoint", step, artifact)

    def enqueue_sample(self, path: StrPath, files: Sequence[StrPath] = (), step: int = 0) -> None:
        """Queue a sample that is durable, with the files it names; each file gets a message, that of `path` comes last.

        Raises:
            UploadError: A file is missing, or the spool cannot be written; it is tried from memory then.
        """
        if self.config.wants("sample"):
            self._enqueue_artifact("sample", step, pack(self._root, path, files, kind="sample"))

    def pending_paths(self) -> frozenset[Path]:
        """Files and reported paths that wait for delivery and must not be deleted yet."""
        paths: set[Path] = set()
        for entry in self._spool.entries():
            if entry.kind in ("checkpoint", "sample"):
                artifact = unpack(entry.body)
                paths.add(self._root / artifact.local_path)
                paths.update(file.location(self._root) for file in artifact.files)
        return frozenset(paths)

    def delivered(self, path: StrPath, kind: Kind = "checkpoint") -> UploadedFile | None:
        """What the store said of a reported path that was delivered, also by an earlier process; else None."""
        receipt = self._spool.receipt(receipt_key(kind, stored_path(path, self._root)))
        if receipt is None:
            return None
        return UploadedFile(receipt["ref"], receipt["sha256"] or "", receipt["size_bytes"])

    @property
    def failure(self) -> UploadError | None:
        """The first required upload that was refused for good in this attempt; None while there is none."""
        return self._failure

    # the end of a run

    def settle(self, deadline_s: float | None = None, progress: Callable[[str], None] | None = None) -> SettleResult:
        """Wait until every required upload is acknowledged or refused, at most `deadline_s` seconds.

        Args:
            deadline_s: None means the configured deadline.
            progress: Called with a line for the operator about once a second while something is left.

        Metrics are waited for a few seconds longer, within the deadline.
        """
        limit = self.config.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit
        with self._condition:
            self._settling = True
            for lane in self._lanes:
                lane.wake()
            self._condition.notify_all()
        try:
            self._wait_until(lambda: not self._deliverable("checkpoint", "sample"), end, progress)
            grace = min(end, time.monotonic() + METRICS_GRACE_S)
            self._wait_until(lambda: not self._deliverable("metrics"), grace, None)
        finally:
            self._settling = False
        return self._result()

    def deliver_terminal(self, payload: TerminalPayload, deadline_s: float | None = None) -> SettleResult:
        """Send the terminal message and wait for its acknowledgement, at most `deadline_s` seconds.

        A message that was acknowledged is never sent again, in no process. One that could not be delivered waits in the
        spool for ``genlight uploads retry``; the next start of the run drops it, because that will end in a way of its
        own.

        Returns:
            A result whose `ok` says whether the terminal message was acknowledged, or none was asked for.
        """
        if not self.config.wants("terminal"):
            return SettleResult()
        uploaded = self.delivered(payload.final_checkpoint) if payload.final_checkpoint else None
        payload = with_reference(payload, uploaded)
        body, key = terminal_payload(self.config.run_id, payload), terminal_key(self.config.run_id, payload)
        if self._spool.receipt(key) is not None:
            return SettleResult()
        limit = self.config.deadline_s if deadline_s is None else deadline_s
        return self._send_terminal(self._replace_terminal(payload.step, {"payload": body, "key": key}), limit)

    def deliver_waiting_terminal(self, deadline_s: float | None = None) -> SettleResult:
        """Send the terminal message that an earlier attempt left in the spool, if there is one."""
        entry = self._spool.head("terminal")
        limit = self.config.deadline_s if deadline_s is None else deadline_s
        return SettleResult() if entry is None else self._send_terminal(entry, limit)

    def _replace_terminal(self, step: int, body: dict[str, Any]) -> Entry:
        """Spool a terminal message; where the disk does not take it, it is sent from memory."""
        for stale in self._spool.entries("terminal"):
            self._spool.remove(stale)
        entry = self._spool.add("terminal", step, body)
        self._spool.sync()
        self._complain_of_disk("the terminal message is not on disk")
        return entry

    def _send_terminal(self, entry: Entry, limit_s: float) -> SettleResult:
        """Sent by the calling thread, which has to wait anyway, so that a transfer that stalls does not hold it up."""
        failure = send_terminal(entry, limit_s, self._delivery, self.config, self._closing)
        if failure is not None:
            if isinstance(failure, Refused):
                self._refuse(entry, failure)
            return SettleResult((undelivered(entry, failure.reason),))
        self._note_terminal(entry)
        return SettleResult()

    def _note_terminal(self, entry: Entry) -> None:
        self._spool.add_receipt(entry.body["key"], {"step": entry.step})
        self._spool.remove(entry)
        self._complain_of_disk("the acknowledged terminal message could not be noted")

    def _complain_of_disk(self, what: str) -> None:
        refusal = self._spool.catch_up()
        if refusal is not None:
            log.error("%s, the spool cannot be written: %s", what, refusal.strerror)

    # life

    def start(self) -> None:
        """Begin to deliver, what an earlier process left behind first. Calling it again has no effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="genlight-uploads", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop delivering and release the spool; what waits stays there for the next start."""
        self._closing.set()
        with self._condition:
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_WAIT_S)
        self._spool.close()
        self._client.close()

    def __enter__(self) -> Uploader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._tidy()
            with self._condition:
                lane, entry, wait_s = self._choose()
                if lane is None or entry is None:
                    self._condition.wait(wait_s)
                    continue
            try:
                self._serve(lane, entry)
            except (Interrupted, UploadError):
                return  # closing
            except OSError as error:  # A network file system may have it again soon.
                self._rest(lane, TryAgain(f"its files cannot be read: {error.strerror or error}"))

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
            self._rest(lane, error)
            return
        except Refused as error:
            self._refuse(entry, error)
        except (Interrupted, UploadError, OSError):
            raise
        except Exception as error:
            if self._closing.is_set():
                raise Interrupted from error
            log.exception("delivering a %s failed unexpectedly", entry.kind)
            self._refuse(entry, Refused(f"unexpected {type(error).__name__}"))
        lane.failures, lane.not_before, lane.server_asked_to_wait = 0, 0.0, False
        with self._condition:
            self._condition.notify_all()

    def _rest(self, lane: _Lane, error: TryAgain) -> None:
        lane.failures += 1
        cap = self.config.backoff_cap_s
        if self._settling:
            cap = min(cap, SETTLING_BACKOFF_CAP_S)
        seconds = backoff_s(lane.failures, self.config.backoff_base_s, cap, self._rng)
        seconds = max(seconds, error.retry_after_s or 0.0)
        lane.rest(seconds, asked=error.retry_after_s is not None, reason=error.reason)
        level = logging.WARNING if lane.failures == 1 else logging.DEBUG
        log.log(level, "upload of %s failed (%s); next try in %.1f s", lane.kind, error.reason, seconds)

    def _refuse(self, entry: Entry, error: Refused) -> None:
        self._delivery.forget(entry)
        if entry.kind == "metrics" and not error.auth:
            self._spool.remove(entry)
            self._lose_metrics(error.reason)
            return
        self._spool.fail(entry, error.reason, auth=error.auth)
        log.error("upload of %s, step %d, was refused: %s", entry.kind, entry.step, error.reason)
        if entry.kind in ("checkpoint", "sample") and self._failure is None:
            self._failure = UploadError(str(undelivered(entry, "")), auth=error.auth)

    # helpers

    def _add_or_merge_metrics(self, values: dict[str, float], step: int) -> None:
        newest = self._spool.newest("metrics")
        if newest is not None and newest.step == step and not newest.attempted:
            self._spool.replace_body(newest, {"metrics": {**newest.body["metrics"], **values}})
            return
        while (oldest := self._spool.oldest("metrics")) and self._is_full():
            self._spool.remove(oldest)
            self._lose_metrics("too many wait for an endpoint that is away")
        self._spool.add("metrics", step, {"metrics": values})

    def _is_full(self) -> bool:
        return self._spool.count("metrics") >= self.config.max_pending_metrics

    def _lose_metrics(self, why: str) -> None:
        self._lost_metrics += 1
        if self._lost_metrics == 1:
            log.warning("metrics are not uploaded: %s; further ones are only counted", why)

    def _hold(self, main: Path, files: Sequence[Path]) -> Held | None:
        """Links to `files`; None where the file system does not have them."""
        try:
            return hold(self._spool.directory, main, files)
        except OSError as error:
            log.warning("%s can't be kept from being deleted before it is uploaded: %s", main, error.strerror)
            return None

    def _enqueue_artifact(self, kind: Kind, step: int, artifact: Artifact) -> None:
        body = artifact.body()
        with self._condition:
            if any(entry.step == step and entry.body == body for entry in self._spool.entries(kind)):
                return
            self._spool.add(kind, step, body)
            self._condition.notify_all()
        refusal = self._spool.catch_up()
        if refusal is not None:
            raise UploadError(
                f"The {kind} of step {step}, {self._root / artifact.main}, cannot be kept for upload, since the spool "
                f"{self._spool.directory} cannot be written: {refusal.strerror}. Make room there and resume the run, "
                "which sends the newest checkpoint; what else did not arrive stays where it is."
            )

    def _deliverable(self, *kinds: Kind) -> bool:
        return any(self.config.wants(kind) and self._spool.head(kind) is not None for kind in kinds)

    def _wait_until(self, settled: Callable[[], bool], end: float, progress: Callable[[str], None] | None) -> None:
        self.start()
        next_line = time.monotonic() + PROGRESS_EVERY_S
        while True:
            with self._condition:
                now = time.monotonic()
                if settled() or now >= end:
                    return
                self._condition.wait(min(end - now, PROGRESS_EVERY_S))
            if progress is not None and time.monotonic() >= next_line and not settled():
                next_line = time.monotonic() + PROGRESS_EVERY_S
                progress(self._progress_line(end))

    def _progress_line(self, end: float) -> str:
        count = sum(1 for entry in self._spool.entries() if entry.kind in REQUIRED_KINDS and entry.failure is None)
        reasons = [lane.last_reason for lane in self._lanes if lane.failures and lane.last_reason]
        last = f", last error: {reasons[-1]}" if reasons else ""
        return f"uploads: {count} left, {max(0.0, end - time.monotonic()):.0f} s until the deadline{last}"

    def _result(self, kinds: Sequence[Kind] = ("checkpoint", "sample")) -> SettleResult:
        refusal = self._spool.catch_up()
        with self._condition:
            reasons = {lane.kind: lane.last_reason for lane in self._lanes if lane.failures}
            wanted = [kind for kind in kinds if self.config.wants(kind)]
            waiting = [entry for entry in self._spool.entries() if entry.kind in wanted]
            left = tuple(undelivered(entry, reasons.get(entry.kind, "")) for entry in waiting)
            refused = "" if refusal is None else refusal.strerror or str(refusal)
            return SettleResult(left, self._spool.count("metrics"), self._lost_metrics, refused)
