"""Delivers what a run produced, in the background.

Adding an entry costs the training thread the writing of one small file. A thread for each kind delivers its entries in
order, so that a metrics endpoint that is down does not hold up a checkpoint, nor a large checkpoint the metrics.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ...adapter.contract.exceptions import StartupContractError, ThreadLimitError, UploadError
from ...adapter.plumbing.http import build_client
from ...adapter.plumbing.retry import LONGEST_RETRY_AFTER_S, RetryPolicy, with_retries
from ...adapter.plumbing.threads import started
from ...adapter.plumbing.urls import safe_url
from .config import UploadConfig
from .delivery import Delivery, receipt_key
from .queue import (
    LINKS,
    Artifact,
    Description,
    Entry,
    Kind,
    Message,
    Queue,
    QueueInUseError,
    UploadedFile,
    files_in,
    files_outside,
    pack,
    queue_of_run,
    read_description,
    stored_path,
)
from .targets import open_target
from .wire import (
    Interrupted,
    Refused,
    TerminalPayload,
    TryAgain,
    Wire,
    encode,
    idempotency_key,
    metrics_payload,
    terminal_payload,
)

__all__ = ["SettleResult", "Undelivered", "Uploader"]

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
CLOSE_WAIT_S = 2.0
METRICS_GRACE_S = 5.0
SHORTEST_TERMINAL_WAIT_S = 0.25
"""Where other uploads have used up the time."""
LOOK_EVERY_S = 1.0
LONGEST_SILENCE_S = 30.0
"""Lines about what is left come after a second, then half as often each time, until they are this far apart."""
SETTLING_BACKOFF_CAP_S = 5.0
"""Longest pause between tries while a run waits for its end."""

REQUIRED_KINDS: tuple[Kind, ...] = ("checkpoint", "sample", "terminal")
"""Kinds without whose delivery a run is not complete; metrics are best effort."""


@dataclass(frozen=True)
class Undelivered:
    """One thing that did not arrive."""

    kind: Kind
    step: int
    name: str
    reason: str
    """Safe text."""
    auth: bool
    """Whether the server refused our credentials."""

    def __str__(self) -> str:
        return f"{self.kind} of step {self.step} ({self.name}): {self.reason}"


def undelivered(entry: Entry, reason: str) -> Undelivered:
    """The outcome of an entry that still waits; `reason` is why it was not sent, where it was not refused."""
    name = Path(getattr(entry.body, "local_path", entry.kind)).name
    why = entry.failure or reason or "not sent before the deadline"
    return Undelivered(entry.kind, entry.step, name, why, entry.auth)


@dataclass(frozen=True)
class SettleResult:
    """The required uploads that are left after waiting for them."""

    undelivered: Sequence[Undelivered] = ()
    """Required uploads that did not arrive, oldest first."""
    disk_refusal: str = ""
    """Why what is left could not all be kept for the next start; empty where it was."""

    @property
    def ok(self) -> bool:
        """Whether every required upload was acknowledged."""
        return not self.undelivered

    def error(self) -> UploadError | None:
        """The exception that a run ends with, or None. Its text is safe."""
        if self.ok:
            return None
        first = next((item for item in self.undelivered if item.auth), self.undelivered[0])
        count = len(self.undelivered)
        others = f" and {count - 1} more" if count > 1 else ""
        kept = "; kept for the next start"
        if self.disk_refusal:
            kept = f", nor kept for the next start, since the queue cannot be written: {self.disk_refusal}"
        return UploadError(f"{first}{others} not delivered{kept}", auth=first.auth)


class _Lane:
    """The thread that delivers the entries of one kind in order, and what went wrong with the last of them."""

    def __init__(self, uploader: Uploader, kind: Kind) -> None:
        self.kind = kind
        self.last_reason = ""
        self.next_try_s = 0.0
        """When a pause ends, on the clock of ``time.monotonic``."""
        self.thread: threading.Thread | None = None
        self._uploader = uploader
        self._failed = TryAgain("")
        """Of the last try that failed."""
        self._level = logging.WARNING

    def start(self) -> None:
        """Begin to deliver; calling it again has no effect. Raises a `ThreadLimitError` where no thread can be had."""
        if self.thread is None:
            self.thread = started(threading.Thread(target=self._run, name=f"genlight-uploads-{self.kind}", daemon=True))

    def _run(self) -> None:
        with contextlib.suppress(Interrupted, UploadError):  # which an uploader that closes, or its queue, raises
            while True:
                self.deliver(self._next())

    def _next(self) -> Entry:
        uploader = self._uploader
        with uploader.condition:
            while not uploader.closing.is_set():
                if (entry := uploader.queue.head(self.kind)) is not None:
                    return entry
                uploader.condition.wait()
        raise Interrupted

    def deliver(self, entry: Entry, tries: int = sys.maxsize) -> None:
        """Try until `entry` is delivered or refused, or fails for the last of `tries`."""
        uploader, config = self._uploader, self._uploader.config
        policy = RetryPolicy(tries, config.backoff_base_s, config.backoff_cap_s, LONGEST_RETRY_AFTER_S)
        parts = len(entry.parts)

        def progressed() -> bool:
            nonlocal parts
            before, parts = parts, len(entry.parts)
            return parts > before

        try:
            with_retries(lambda: self._try(entry), policy, self._pause, progressed=progressed)
        except Refused as error:
            uploader.refuse(entry, error)
        else:
            uploader.queue.remove(entry)
        self.last_reason = ""
        with uploader.condition:
            uploader.condition.notify_all()

    def _try(self, entry: Entry) -> None:
        uploader = self._uploader
        try:
            uploader.delivery.deliver(entry)
        except (Refused, Interrupted, UploadError):
            raise
        except TryAgain as error:
            self._failed = error
        except OSError as error:  # a network file system may have it again soon
            self._failed = TryAgain(f"its files cannot be read: {error.strerror or error}")
        except Exception as error:
            if uploader.closing.is_set():
                raise Interrupted from error
            log.exception("delivering a %s failed unexpectedly", entry.kind)
            raise Refused(f"unexpected {type(error).__name__}") from error
        else:
            return
        if uploader.closing.is_set():
            raise Interrupted
        self._level = logging.DEBUG if self.last_reason else logging.WARNING
        self.last_reason = self._failed.reason
        raise self._failed

    def _pause(self, seconds: float) -> None:
        """Wait before the next try: less where a run waits for its end, but as long as the server asked."""
        uploader, begun, asked_s = self._uploader, time.monotonic(), self._failed.retry_after_s or 0.0
        hurried_s = max(min(seconds, SETTLING_BACKOFF_CAP_S), asked_s)
        was_settling = uploader.settling
        seconds = hurried_s if was_settling else seconds
        text = "upload of %s failed (%s); next try in %.1f s"
        log.log(self._level, text, self.kind, self.last_reason, seconds)
        with uploader.condition:
            while not uploader.closing.is_set():
                if uploader.settling and not was_settling:
                    seconds = hurried_s if asked_s else 0.0
                self.next_try_s = begun + seconds
                left = self.next_try_s - time.monotonic()
                if left <= 0:
                    return
                uploader.condition.wait(left)
        raise Interrupted


def _unwritable(config: UploadConfig, error: OSError) -> StartupContractError:
    return StartupContractError(
        "startup.invalid_artifact_paths",
        f"The upload queue {str(config.queue_dir)!r} cannot be written: {error.strerror or error}. Choose another "
        "folder: `default_root_dir` of the trainer, or `TRAINER_ARTIFACTS_DIR` for a job.",
    )


class Uploader:
    """Delivers what is enqueued, in the background, also what an earlier process of the run left behind.

    Attributes:
        config: Destinations and limits.
        starts: How often an uploader was made for the run's queue, this time included.
        failure: The first required upload that was refused for good in this attempt; None while there is none.

    Args:
        config: Destinations and limits. The token stays in memory: pass it at each start.
        keep_terminal: Whether a terminal message that an earlier attempt could not deliver is still wanted. A run that
            starts anew will end in a way of its own, and drops it.

    Raises:
        UploadError: A file of the queue is damaged, or a target's package is missing.
        StartupContractError: ``startup.artifacts_in_use``: another run has the queue open.
            ``startup.invalid_artifact_paths``: it cannot be written. Or the environment's proxies or certificates
            cannot be used.
        ValueError: A target's URL is malformed.
    """

    def __init__(self, config: UploadConfig, *, keep_terminal: bool = False) -> None:
        self.config = config
        self.failure: UploadError | None = None
        self.condition = threading.Condition()
        """Guards what the threads of the kinds choose from; notified when that changes."""
        self.closing = threading.Event()
        self.settling = False
        """Whether somebody waits for what is left, so that pauses between tries are short."""
        self._lost_metrics = 0
        targets = {target.name: target for target in map(open_target, config.targets)}
        self._client = build_client(config.token, config.origins(), timeout_s=config.timeout_s)
        try:
            self.queue = Queue(queue_of_run(Path(os.path.abspath(config.queue_dir)), config.run_id))
        except QueueInUseError as error:
            self._client.close()
            raise StartupContractError("startup.artifacts_in_use", str(error)) from error
        except OSError as error:
            self._client.close()
            raise _unwritable(config, error) from error
        except BaseException:
            self._client.close()
            raise
        self._root = self.queue.directory.parent
        wire = Wire(self._client, interrupted=self.closing.is_set)
        self.delivery = Delivery(config, self.queue, wire, targets, self.closing.is_set)
        self._lanes = {kind: _Lane(self, kind) for kind in get_args(Kind) if config.wants(kind)}
        try:
            self.starts = self._claim(sorted(targets))
            self._look_through(keep_terminal=keep_terminal)
        except OSError as error:
            self.close()
            raise _unwritable(config, error) from error
        except BaseException:
            self.close()
            raise

    def _claim(self, targets: list[str]) -> int:
        """Write down whose queue it is; returns how often an uploader was made for it."""
        config = self.config
        try:
            before = read_description(self.queue.directory)
        except UploadError:
            before = Description(config.run_id)
        starts = max(before.starts, 0) + 1 if before.run_id == config.run_id else 1
        stores_files = config.stores_files()
        self.queue.describe(Description(config.run_id, config.owner, targets, starts, stores_files))
        return starts

    def _look_through(self, *, keep_terminal: bool) -> None:
        """Drop what cannot be delivered any more, and refuse files that are none of the run's.

        A queue that came with a folder from elsewhere could name any file of this machine.
        """
        queue, root = self.queue, self._root
        for entry in queue.entries():
            if entry.kind in ("checkpoint", "sample"):
                missing = [file.path for file in entry.body.files if not file.location(root).exists()]
                outside = files_outside(entry.body, root, self.config.roots)
                if missing:
                    log.warning("the %s of step %d is no longer there to upload: %s", entry.kind, entry.step, missing)
                    queue.remove(entry)
                elif outside:
                    reason = f"{outside[0]} lies outside of the run's folders; name its folder as another root"
                    queue.fail(entry, reason, auth=False)
            elif entry.kind == "terminal" and not keep_terminal:
                queue.remove(entry)  # an earlier attempt's terminal message is out of date
        for kind in REQUIRED_KINDS:
            if queue.entries(kind) and not self.config.wants(kind):
                log.warning("uploads of kind %s wait in %s, but no URL is set for them", kind, queue.directory)

    # enqueueing, from the training thread

    def enqueue_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue metrics of a step, best effort: a full disk raises nothing, and the oldest go when too many wait."""
        if not self.config.wants("metrics"):
            return
        values = {name: float(value) for name, value in metrics.items()}
        payload = metrics_payload(self.config.run_id, step, values)
        digest = hashlib.sha256(encode(payload)).hexdigest()
        message = Message(payload, idempotency_key(self.config.run_id, "metrics", step, "", digest))
        with self.condition:
            for _ in range(self.queue.drop_oldest("metrics", keep=self.config.max_pending_metrics - 1)):
                self._count_lost_metrics("too many wait for an endpoint that is away")
            self.queue.add("metrics", step, message)
            self.condition.notify_all()

    def enqueue_checkpoint(
        self,
        record_path: StrPath,
        files: Sequence[StrPath] = (),
        step: int = 0,
        final: bool = False,
        primary_path: StrPath | None = None,
    ) -> None:
        """Queue a checkpoint that is durable; the record goes last.

        Its files may be deleted from now on, but for those that `waiting_files` names.

        Args:
            record_path: The commit record, or the checkpoint itself where it is one file.
            files: The files that belong to it; a directory stands for all files in it.
            step: Completed steps.
            final: Whether this is the end of the run.
            primary_path: The file or folder that is reported instead of the record.

        Raises:
            UploadError: A file is missing, or the queue cannot be written; it is tried from memory then.
        """
        if not self.config.wants("checkpoint"):
            return
        main, subject = Path(os.path.abspath(record_path)), Path(os.path.abspath(primary_path or record_path))
        seq = self.queue.new_seq()
        wanted = [path for given in (*files, subject, main) for path in files_in(given)]
        links = None
        try:
            links = self.queue.link_files(seq, main, wanted)
        except OSError as error:
            reason = error.strerror or error
            log.warning(
                "%s can't be kept from being deleted, but by `Checkpoint`, until it is uploaded: %s", main, reason
            )
        artifact = pack(self._root, main, wanted, primary=subject, final=final, links=links)
        self._enqueue_artifact("checkpoint", step, artifact, seq)

    def waiting_files(self) -> set[Path]:
        """The files of checkpoints that wait and are sent from where they lie.

        They are on another file system than the queue, or on one without hard links.
        """
        links = self.queue.directory / LINKS
        waiting = (file.location(self._root) for e in self.queue.entries("checkpoint") for file in e.body.files)
        return {path for path in waiting if links not in path.parents}

    def enqueue_sample(self, path: StrPath, files: Sequence[StrPath] = (), step: int = 0) -> None:
        """Queue a sample that is durable, with the files it names; each file gets a message, that of `path` comes last.

        Raises:
            UploadError: A file is missing, or the queue cannot be written; it is tried from memory then.
        """
        if self.config.wants("sample"):
            artifact = pack(self._root, path, files, kind="sample")
            self._enqueue_artifact("sample", step, artifact, self.queue.new_seq())

    def _enqueue_artifact(self, kind: Kind, step: int, artifact: Artifact, seq: int) -> None:
        if any(entry.step == step and artifact.is_same(entry.body) for entry in self.queue.entries(kind)):
            self.queue.release(seq)
            return
        self.queue.add(kind, step, artifact, seq=seq)
        with self.condition:
            self.condition.notify_all()
        refusal = self.queue.catch_up()
        if refusal is not None:
            raise UploadError(
                f"The {kind} of step {step}, {self._root / artifact.main}, cannot be kept for upload, since the queue "
                f"{self.queue.directory} cannot be written: {refusal.strerror}. Make room there and resume the run, "
                "which sends the newest checkpoint; what else did not arrive stays where it is."
            )

    # what waits and what has arrived

    def delivered(self, path: StrPath, kind: Kind = "checkpoint") -> UploadedFile | None:
        """The store's answer about a reported path that was delivered, also by an earlier process; else None."""
        receipt = self.queue.receipt(receipt_key(kind, stored_path(path, self._root)))
        return None if receipt is None else UploadedFile(receipt.ref, receipt.sha256 or "", receipt.size_bytes)

    def has_queued(self, path: StrPath) -> bool:
        """Whether the checkpoint with this record waits or was delivered, by whichever process of the run."""
        stored = stored_path(path, self._root)
        waits = any(entry.body.main == stored for entry in self.queue.entries("checkpoint"))
        return waits or self.delivered(path) is not None

    # the end of a run

    def settle(self, deadline_s: float | None = None, progress: Callable[[str], None] = lambda _: None) -> SettleResult:
        """Wait until every required upload is acknowledged or refused, at most `deadline_s` seconds.

        Args:
            deadline_s: None means the configured deadline.
            progress: Called with a line for the operator while something is left, ever less often.

        Metrics are waited for a few seconds longer, within the deadline.
        """
        end = time.monotonic() + (self.config.deadline_s if deadline_s is None else deadline_s)
        try:
            self.start()
        except ThreadLimitError as error:
            log.error("what waits stays in the queue: %s", error)  # noqa: TRY400 - its message says all
        else:
            self._wait_while(lambda: self._deliverable("checkpoint", "sample"), end, progress)
            grace = min(end, time.monotonic() + METRICS_GRACE_S)
            self._wait_while(lambda: self._deliverable("metrics"), grace)
        refusal = self.queue.catch_up()
        waiting = [entry for entry in self.queue.entries() if entry.kind in ("checkpoint", "sample")]
        left = [entry for entry in waiting if self.config.wants(entry.kind)]
        refused = "" if refusal is None or not left else refusal.strerror or str(refusal)
        return SettleResult(
            tuple(undelivered(entry, self._lanes[entry.kind].last_reason) for entry in left),
            refused,
        )

    def deliver_terminal(self, payload: TerminalPayload, deadline_s: float | None = None) -> SettleResult:
        """Send the terminal message and wait for its acknowledgement, at most `deadline_s` seconds.

        A message that was acknowledged is never sent again, in no process. One that could not be delivered waits in the
        queue for ``genlight uploads retry``; the next start of the run drops it, because that will end in a way of its
        own. Where the disk does not take the message, it is sent from memory.

        Returns:
            A result whose `ok` says whether the terminal message was acknowledged, or none was asked for.
        """
        if not self.config.wants("terminal"):
            return SettleResult()
        uploaded = self.delivered(payload.final_checkpoint) if payload.final_checkpoint else None
        if uploaded is not None:
            payload = replace(
                payload,
                final_checkpoint_ref=payload.final_checkpoint_ref or uploaded.ref,
                final_checkpoint_sha256=payload.final_checkpoint_sha256 or uploaded.sha256 or None,
            )
        key = _terminal_key(self.config.run_id, payload)
        if self.queue.receipt(key) is not None:
            return SettleResult()
        for stale in self.queue.entries("terminal"):
            self.queue.remove(stale)
        self.queue.add("terminal", payload.step, Message(terminal_payload(self.config.run_id, payload), key))
        return self.deliver_waiting_terminal(deadline_s)

    def deliver_waiting_terminal(self, deadline_s: float | None = None) -> SettleResult:
        """Send the terminal message that waits in the queue, if there is one, as `deliver_terminal` does.

        In a thread that is left behind at the deadline: no timeout of a connection catches a server that sends a byte
        now and then, or a name server that does not answer. Where no thread can be started it is tried once in this
        one, and those timeouts have to do.
        """
        entry, lane = self.queue.head("terminal"), self._lanes.get("terminal")
        if entry is None or lane is None:
            return SettleResult()
        limit_s = self.config.deadline_s if deadline_s is None else deadline_s
        try:
            lane.start()
        except ThreadLimitError:
            with contextlib.suppress(TryAgain):
                lane.deliver(entry, tries=1)
        else:
            end = time.monotonic() + max(limit_s, SHORTEST_TERMINAL_WAIT_S)
            self._wait_while(lambda: self._deliverable("terminal") and lane.next_try_s < end, end)
        if entry not in self.queue.entries("terminal"):
            return SettleResult()
        silent = f"{safe_url(self.config.terminal_url or '')} did not answer within {limit_s:g} s"
        return SettleResult((undelivered(entry, lane.last_reason or silent),))

    # life

    def start(self) -> None:
        """Begin to deliver, what an earlier process left behind first. Calling it again has no effect.

        Raises:
            ThreadLimitError: The system has no room for its threads; the terminal message can be delivered without.
        """
        for kind, lane in self._lanes.items():
            if kind != "terminal":  # which is sent when it is asked for
                lane.start()

    def close(self) -> None:
        """Stop delivering and release the queue; what waits stays there for the next start."""
        self.closing.set()
        with self.condition:
            self.condition.notify_all()
        end = time.monotonic() + CLOSE_WAIT_S
        for lane in self._lanes.values():
            if lane.thread is not None and lane.thread is not threading.current_thread():
                lane.thread.join(max(0.0, end - time.monotonic()))
        self.queue.close()
        self._client.close()

    def __enter__(self) -> Uploader:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # helpers

    def refuse(self, entry: Entry, error: Refused) -> None:
        """Give `entry` up for this attempt. Any thread may call it."""
        if entry.kind == "metrics" and not error.auth:
            self.queue.remove(entry)
            self._count_lost_metrics(error.reason)
            return
        self.queue.fail(entry, error.reason, auth=error.auth)
        log.error("upload of %s, step %d, was refused: %s", entry.kind, entry.step, error.reason)
        if entry.kind in ("checkpoint", "sample") and self.failure is None:
            self.failure = UploadError(str(undelivered(entry, "")), auth=error.auth)

    def _count_lost_metrics(self, why: str) -> None:
        self._lost_metrics += 1
        if self._lost_metrics == 1:
            log.warning("metrics are not uploaded: %s; further ones are only counted", why)

    def _deliverable(self, *kinds: Kind) -> bool:
        return any(self.config.wants(kind) and self.queue.head(kind) is not None for kind in kinds)

    def _wait_while(
        self, is_left: Callable[[], bool], end: float, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """Wait until nothing is left, or the time is `end` on the monotonic clock."""
        silence_s = LOOK_EVERY_S
        next_line = time.monotonic() + silence_s
        with self.condition:
            self.settling = True
            self.condition.notify_all()
        try:
            while is_left() and (now := time.monotonic()) < end:
                if now >= next_line:
                    silence_s = min(2 * silence_s, LONGEST_SILENCE_S)
                    next_line = now + silence_s
                    progress(self._progress_line(end))
                with self.condition:
                    if is_left():
                        self.condition.wait(min(end - now, LOOK_EVERY_S))
        finally:
            self.settling = False

    def _progress_line(self, end: float) -> str:
        waiting = [entry for entry in self.queue.entries() if entry.kind in REQUIRED_KINDS and entry.failure is None]
        reasons = [lane.last_reason for lane in self._lanes.values() if lane.last_reason]
        last = f", last error: {reasons[-1]}" if reasons else ""
        return f"uploads: {len(waiting)} left, {max(0.0, end - time.monotonic()):.0f} s until the deadline{last}"


def _terminal_key(run_id: str, payload: TerminalPayload) -> str:
    """A run completes once, whichever attempt says so; each attempt may fail once."""
    completed = payload.status == "completed"
    digest = (payload.final_checkpoint_sha256 or "") if completed else f"attempt {payload.attempt}"
    return idempotency_key(run_id, "terminal", payload.step, payload.status, digest)
