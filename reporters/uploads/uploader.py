"""Deliver the results of a run in the background.

To add an entry, the training thread only writes one small file. For each kind of entry, every lane (a group of
destinations) has a thread that delivers the entries in order. So a metrics endpoint that is down does not delay
checkpoints, a large checkpoint does not delay metrics, and a target that does not work does not delay the other
targets.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, SupportsFloat

from ...adapter.contract.exceptions import ThreadLimitError, UploadError
from ...adapter.plumbing.retry import LONGEST_RETRY_AFTER_S, RetryPolicy, TransientError, with_retries
from ...adapter.plumbing.threads import started
from ...adapter.plumbing.urls import safe_url
from ..events.json_lines import encode_json
from .config import ENDPOINT, UploadConfig
from .destinations import Delivery, Interrupted, Refused, Send, idempotency_key
from .queue import Entry, Kind, Queue, UploadedFile, pack, stored_path

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
Lane = tuple[str, ...]
"""Destinations that one thread serves; see `UploadConfig.lanes`."""
RETRIES = RetryPolicy(sys.maxsize, first_delay_s=0.5, longest_delay_s=10.0, longest_retry_after_s=LONGEST_RETRY_AFTER_S)
"""Pauses between tries are short compared with the deadline at the end of a run, unless the server requests a longer
pause."""
MOST_WAITING_METRICS = 2000
"""Maximum number of waiting metrics entries; the oldest are dropped first."""
CLOSE_WAIT_S = 2.0
METRICS_GRACE_S = 5.0
SHORTEST_TERMINAL_WAIT_S = 0.25
"""Minimum wait in seconds for the terminal message, even if other uploads have used up the time."""
PROGRESS_EVERY_S = 5.0
"""Seconds between progress lines."""


class Uploader:
    """Delivers queued entries in the background, including those that an earlier process of the run left.

    Attributes:
        config: Destinations and limits.
        queue: The queue.
        failure: Error of the first required upload that was finally refused in this attempt, or None.

    Args:
        config: Destinations and limits. The token stays in memory: pass it at each start.
        keep_terminal: Whether to keep a terminal message that an earlier attempt could not deliver. False is for a new
            attempt of the run: it will send its own terminal message.

    Raises:
        UploadError: A file of the queue is damaged, or a target's package is missing.
        StartupContractError: See `Queue`; or a proxy or certificate of the environment cannot be used.
        ValueError: fsspec does not know a target's scheme.
    """

    def __init__(self, config: UploadConfig, *, keep_terminal: bool = False) -> None:
        self.config = config
        self.failure: UploadError | None = None
        self._closing = threading.Event()
        self._threads: dict[tuple[Kind, Lane], threading.Thread] = {}
        self._results = threading.Lock()
        """Held while a thread records the result of an entry, because several lanes may work on the same entry."""
        self._lost_metrics = 0
        with contextlib.ExitStack() as on_error:
            self.queue = Queue(config.queue_dir, self._can_deliver)
            on_error.callback(self.queue.close)
            self._delivery = Delivery(config, self.queue, self._closing)
            on_error.callback(self._delivery.close)
            for entry in self.queue.entries():
                self._check_inherited(entry, keep_terminal=keep_terminal)
            on_error.pop_all()
        for run_id, to in {(entry.run_id, entry.to) for entry in self.queue.foreign}:
            log.warning(
                "uploads of run %r to %s wait in %s. This run does not deliver them; use `genlight uploads retry %s`",
                *(run_id, " and ".join(to), self.queue.directory, shlex.quote(str(self.queue.directory))),
            )

    def _can_deliver(self, entry: Entry) -> bool:
        """Return whether an entry belongs to this run and all its destinations are configured."""
        if entry.run_id != self.config.run_id:
            return False
        return entry.kind == "terminal" or set(entry.to) <= set(self.config.destinations(entry.kind))

    def _check_inherited(self, entry: Entry, *, keep_terminal: bool) -> None:
        """Drop an outdated entry of an earlier process, and refuse one with files outside the run's folders.

        The folder may come from an unknown source, so its queue could name any file of this machine.
        """
        gone = [file.path for file in entry.files if not self.queue.location(entry, file).exists()]
        if gone:
            log.warning(
                "the %s of step %d cannot be uploaded, because these files no longer exist: %s",
                entry.kind,
                entry.step,
                gone,
            )
        if gone or (entry.kind == "terminal" and not keep_terminal):
            self.queue.remove(entry)
        elif outside := self.queue.files_outside(entry, self.config.roots):
            entry.reason = f"{outside[0]} is outside the run's folders; add its folder to the roots"
            self.queue.refuse(entry)

    # enqueueing, from the training thread

    def enqueue_metrics(self, metrics: Mapping[str, SupportsFloat], step: int) -> None:
        """Queue the metrics of a step, best effort: a full disk is no error, and old metrics give way to new ones."""
        if not self.config.wants("metrics"):
            return
        values = {name: float(value) for name, value in metrics.items()}
        payload = {"run_id": self.config.run_id, "kind": "metrics", "step": step, "metrics": values}
        digest = hashlib.sha256(encode_json(payload)).hexdigest()
        for entry in self.queue.entries("metrics")[: -(MOST_WAITING_METRICS - 1)]:
            self.queue.remove(entry)
            self._count_lost_metrics("too many wait for an endpoint that does not answer")
        key = idempotency_key(self.config.run_id, "metrics", step, "", digest)
        self.queue.add(self._entry("metrics", step, payload=payload, key=key))

    def enqueue(
        self,
        kind: Literal["checkpoint", "sample"],
        main: StrPath,
        files: Sequence[StrPath] = (),
        *,
        step: int,
        final: bool = False,
        primary_path: StrPath | None = None,
    ) -> None:
        """Queue a durable checkpoint or sample, in place of a waiting one with the same name.

        Afterwards, the files of a checkpoint may be deleted, except for `Queue.unlinked_files`.

        Args:
            kind: A checkpoint sends one message, a sample one for each file.
            main: The commit record, the JSON of a sample, or the only file; it is sent last.
            files: The other files; a directory means all files in it.
            step: Completed steps.
            final: Whether this is the end of the run.
            primary_path: The file or folder that the message names; None means `main`.

        Raises:
            UploadError: A file is missing, or the queue cannot be written; in the second case this process delivers the
                artifact from memory.
        """
        if not self.config.wants(kind):
            return
        queue, path = self.queue, Path(os.path.abspath(main))
        reported = path if primary_path is None else primary_path
        packed = pack(queue.root, path, (*files, reported))
        local_path, owner = stored_path(reported, queue.root), self.config.owner
        entry = self._entry(kind, step, files=packed, local_path=local_path, final=final, owner=owner)
        for other in queue.entries(kind):
            if other.files[-1].path == entry.files[-1].path:
                if other.identity == entry.identity:
                    return
                queue.remove(other)
        for other in self._delivered(kind):
            if other.identity == entry.identity:  # a resumed run queues its first checkpoint again: send nothing twice
                entry.parts = dict(other.parts)
        queue.add(entry)
        refusal = queue.catch_up()
        if refusal is not None:
            raise UploadError(
                f"The {kind} of step {step}, {path}, cannot be queued for upload, because the queue "
                f"{queue.directory} cannot be written: {refusal.strerror}. Make room there and resume the run: it "
                "sends the newest checkpoint. Other files that were not delivered stay where they are."
            )

    def _entry(self, kind: Kind, step: int, **fields: object) -> Entry:
        return Entry(run_id=self.config.run_id, kind=kind, step=step, to=self.config.destinations(kind), **fields)  # type: ignore[arg-type]

    # waiting and delivered entries

    def _delivered(self, kind: Kind) -> list[Entry]:
        """Return the delivered entries of this run, from all processes."""
        return [entry for entry in self.queue.delivered(kind) if entry.run_id == self.config.run_id]

    def delivered(self, path: StrPath) -> UploadedFile | None:
        """Return the facts about the delivered checkpoint whose message named `path`; None if there is none."""
        stored = stored_path(path, self.queue.root)
        entry = next((each for each in self._delivered("checkpoint") if each.local_path == stored), None)
        try:
            return None if entry is None else self._delivery.facts(entry, entry.subject)
        except (Refused, OSError):  # its file no longer exists
            return None

    def has_queued(self, path: StrPath) -> bool:
        """Return whether the checkpoint with this record waits or was delivered by any process of the run."""
        stored = stored_path(path, self.queue.root)
        known = [*self.queue.entries("checkpoint"), *self._delivered("checkpoint")]
        return any(entry.files[-1].path == stored for entry in known)

    # the end of a run

    def settle(
        self, deadline_s: float | None = None, progress: Callable[[str], None] = lambda _: None
    ) -> UploadError | None:
        """Wait until every required upload is acknowledged or refused, then a few seconds for metrics.

        Args:
            deadline_s: Longest wait in seconds; None means the configured deadline.
            progress: Called every few seconds with a line for the operator, until all is done.

        Returns:
            The error that ends the run, without secrets; None if everything was acknowledged.
        """
        end = time.monotonic() + (self.config.deadline_s if deadline_s is None else deadline_s)
        try:
            self.start()
        except ThreadLimitError as error:
            log.error("waiting uploads stay in the queue: %s", error)  # noqa: TRY400 - the message is complete
        else:
            self._wait_for("checkpoint", "sample", end=end, progress=progress)
            self._wait_for("metrics", end=min(end, time.monotonic() + METRICS_GRACE_S))
        refusal = self.queue.catch_up()
        return _undelivered(self.queue.entries("checkpoint", "sample"), refusal)

    def deliver_terminal(
        self,
        status: Literal["completed", "failed"],
        step: int,
        final_checkpoint: str | None = None,
        error: str = "",
        *,
        deadline_s: float | None = None,
    ) -> UploadError | None:
        """Send the message about the end of a run, and wait at most `deadline_s` for its acknowledgement.

        Once acknowledged, the completion of a run is never sent again, by any process. A message that could not be
        delivered waits in the queue for ``genlight uploads retry``; the next attempt of the run drops it, because it
        will send another one. If the disk refuses the message, it is sent from memory.

        Args:
            status: How the run ended.
            step: Completed steps, or the step that failed.
            final_checkpoint: Its path. The message has the reference and digest of its upload.
            error: Category and text, as in the terminal event.
            deadline_s: Seconds; None means the configured deadline.

        Returns:
            The error if a message was to be sent and was not acknowledged, otherwise None.
        """
        if not self.config.wants("terminal"):
            return None
        uploaded = self.delivered(final_checkpoint) if final_checkpoint else None
        ref, sha256 = (uploaded.ref, uploaded.sha256) if uploaded else (None, None)
        payload = {
            "run_id": self.config.run_id,
            "kind": "terminal",
            "status": status,
            "step": step,
            "final_checkpoint": ref or final_checkpoint,
            "final_checkpoint_ref": ref or "",
            "final_checkpoint_sha256": sha256,
            "error": error,
        }
        digest = sha256 or "" if status == "completed" else uuid.uuid4().hex  # the failure of each attempt is sent
        key = idempotency_key(self.config.run_id, "terminal", step, status, digest)
        if any(entry.key == key for entry in self._delivered("terminal")):
            return None
        for stale in self.queue.entries("terminal"):
            self.queue.remove(stale)
        self.queue.add(self._entry("terminal", step, payload=payload, key=key))
        return self.deliver_waiting_terminal(deadline_s)

    def deliver_waiting_terminal(self, deadline_s: float | None = None) -> UploadError | None:
        """Send the terminal message that waits in the queue, if there is one, like `deliver_terminal`.

        A separate thread sends it, and is abandoned at the deadline: the timeouts of a connection do not end the wait
        for a server that sends a byte now and then, or for a name server that does not answer. If no thread can be
        started, the calling thread tries once, with only these timeouts.
        """
        entry = self.queue.head("terminal")
        if entry is None or not self.config.wants("terminal"):
            return None
        limit_s = self.config.deadline_s if deadline_s is None else deadline_s
        try:
            self._start("terminal")
        except ThreadLimitError:
            with contextlib.suppress(TransientError):
                self._deliver(entry, (ENDPOINT,), RetryPolicy(attempts=1))
        else:
            self._wait_for("terminal", end=time.monotonic() + max(limit_s, SHORTEST_TERMINAL_WAIT_S))
        entry.reason = entry.reason or f"{safe_url(self.config.terminal_url or '')} did not answer within {limit_s:g} s"
        return _undelivered(self.queue.entries("terminal"), None)

    def _wait_for(self, *kinds: Kind, end: float, progress: Callable[[str], None] = lambda _: None) -> None:
        """Wait until no entry of `kinds` is left to try, or until `end` on the monotonic clock."""
        changed, head = self.queue.changed, self.queue.head
        while head(*kinds) is not None and (left_s := end - time.monotonic()) > 0:
            with changed:
                is_done = changed.wait_for(lambda: head(*kinds) is None, min(left_s, PROGRESS_EVERY_S))
            if not is_done:
                progress(self._progress_line(end))

    def _progress_line(self, end: float) -> str:
        waiting = [entry for entry in self.queue.entries("checkpoint", "sample", "terminal") if not entry.refused]
        last = next((f", last error: {entry.reason}" for entry in waiting if entry.reason), "")
        return f"uploads: {len(waiting)} left, {max(0.0, end - time.monotonic()):.0f} s until the deadline{last}"

    # life

    def start(self) -> None:
        """Begin to deliver entries, oldest first. Another call has no effect.

        Raises:
            ThreadLimitError: The system allows no more threads. The terminal message can be delivered without one.
        """
        for kind in ("metrics", "sample", "checkpoint"):  # the terminal message is sent on request
            if self.config.wants(kind):
                self._start(kind)

    def close(self) -> None:
        """Stop delivering and release the queue; waiting entries stay there for the next start."""
        self._closing.set()
        with self.queue.changed:
            self.queue.changed.notify_all()
        end = time.monotonic() + CLOSE_WAIT_S
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        self.queue.close()
        self._delivery.close()

    def __enter__(self) -> Uploader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # delivery, in a thread for each kind and lane

    def _start(self, kind: Kind) -> None:
        for number, lane in enumerate(self.config.lanes(kind)):
            if (kind, lane) not in self._threads:
                name = f"genlight-uploads-{kind}{f'-{number}' if number else ''}"
                thread = threading.Thread(target=self._run, args=(kind, lane), name=name, daemon=True)
                self._threads[kind, lane] = started(thread)

    def _run(self, kind: Kind, lane: Lane) -> None:
        """Deliver the entries of `kind` to `lane` in order, until the uploader closes."""
        queue = self.queue
        with contextlib.suppress(Interrupted, UploadError):  # the uploader or its queue is closing
            while not self._closing.is_set():
                with queue.changed:
                    queue.changed.wait_for(lambda: self._closing.is_set() or self._next(kind, lane) is not None)
                if (entry := self._next(kind, lane)) is not None and not self._closing.is_set():
                    self._deliver(entry, lane, RETRIES)

    def _next(self, kind: Kind, lane: Lane) -> Entry | None:
        """Return the oldest entry with parts left for `lane`, or with none left at all, so that it can be finished."""
        waiting = (entry for entry in self.queue.entries(kind) if not entry.refused)
        left = self._parts_left
        return next((each for each in waiting if left(each, lane) or not left(each, each.to)), None)

    def _parts_left(self, entry: Entry, lane: Lane) -> dict[str, Send]:
        """Return the parts of `entry` that can still be delivered to `lane`, in order."""
        open_to = [name for name in lane if name not in entry.refusals]
        parts = self._delivery.parts(entry, open_to) if open_to else {}
        return {part: send for part, send in parts.items() if part not in entry.parts}

    def _deliver(self, entry: Entry, lane: Lane, policy: RetryPolicy) -> None:
        """Deliver the remaining parts of an entry. Each delivered part is recorded, so that it is not sent again.

        Raises:
            TransientError: All tries of `policy` failed.
            Interrupted: The uploader is closing.
        """
        try:
            for part, send in self._parts_left(entry, lane).items():
                result = with_retries(functools.partial(self._try, entry, send), policy, self._pause)
                with self._results:
                    entry.parts[part] = result
                    if entry.files:
                        self.queue.save(entry)
        except Refused as error:
            self._refuse(entry, lane, error)
        with self._results:
            if not self.queue.holds(entry) or entry.refused or self._parts_left(entry, entry.to):
                return
            if entry.refusals:
                entry.reason = next(iter(entry.refusals.values()))
                self.queue.refuse(entry)
            else:
                self.queue.finish(entry)

    def _try(self, entry: Entry, send: Send) -> UploadedFile | None:
        """Return the result of `send`. Classify its errors: worth another try, final, or caused by closing."""
        if not self.queue.holds(entry):  # its files may now belong to the entry that replaced it
            raise Refused("it is outdated")
        try:
            return send()
        except (Refused, Interrupted):
            raise
        except TransientError as error:
            failed = error
        except OSError as error:  # a network file system may recover
            failed = TransientError(f"its files cannot be read: {error.strerror or error}")
        except Exception as error:
            if self._closing.is_set():
                raise Interrupted from error
            log.exception("delivering a %s failed unexpectedly", entry.kind)
            raise Refused(f"unexpected {type(error).__name__}") from error
        if self._closing.is_set():
            raise Interrupted
        level = logging.DEBUG if entry.reason else logging.WARNING
        entry.reason = str(failed)
        log.log(level, "upload of %s failed: %s", entry.kind, entry.reason)
        raise failed

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise Interrupted

    def _refuse(self, entry: Entry, lane: Lane, error: Refused) -> None:
        """Stop trying to deliver `entry` to `lane` in this attempt.

        Metrics are dropped, unless the server refused the credentials.
        """
        if not self.queue.holds(entry):
            return
        if entry.kind == "metrics" and not error.auth:
            self.queue.remove(entry)
            self._count_lost_metrics(str(error))
            return
        with self._results:
            entry.reason, entry.auth = str(error), entry.auth or error.auth
            entry.refusals |= dict.fromkeys(lane, entry.reason)
        log.error("upload of %s, step %d, was refused: %s", entry.kind, entry.step, error)
        if entry.files and self.failure is None:
            self.failure = UploadError(str(entry), auth=error.auth)

    def _count_lost_metrics(self, why: str) -> None:
        self._lost_metrics += 1
        if self._lost_metrics == 1:
            log.warning("metrics are not uploaded: %s; this is logged only once", why)


def _undelivered(left: Sequence[Entry], refusal: OSError | None) -> UploadError | None:
    """Return the error about required uploads that are `left`, and about a disk that refused to store them."""
    if not left:
        return None
    first = next((entry for entry in left if entry.auth), left[0])
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    kept = ", but kept for the next start"
    if refusal:
        why = refusal.strerror or refusal
        kept = f", nor stored for the next start, because the queue cannot be written: {why}"
    return UploadError(f"{first}{others} not delivered{kept}", auth=first.auth)
