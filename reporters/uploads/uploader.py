"""Delivers what a run produced, in the background: the public face of the spool and of the thread that empties it.

Adding an entry costs the training thread one short write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...adapter.contract.exceptions import StartupContractError, UploadError
from ...adapter.plumbing.http import build_client
from .artifact import Artifact, files_in, pack, stored_path, unpack
from .config import UploadConfig
from .delivery import Delivery, receipt_key
from .delivery_thread import DeliveryThread
from .hard_links import HardLinks, hold
from .journal import Entry
from .outcome import SettleResult, undelivered
from .payloads import Kind, TerminalPayload, UploadedFile
from .spool import Spool, SpoolInUseError, claim, look_through
from .targets import open_target
from .terminal import enqueue_terminal, note_acknowledged, send_terminal, with_reference
from .transfers import Refused, Wire

__all__ = ["Uploader"]

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]
CLOSE_WAIT_S = 2.0
METRICS_GRACE_S = 5.0


class Uploader:
    """Delivers what is enqueued, in the background, also what an earlier process of the run left behind.

    `starts` counts how often an uploader was made for the run's spool, this time included.

    Args:
        config: Destinations and limits. The token stays in memory: pass it at each start.
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
        self._closing = threading.Event()
        wire = Wire(self._client, resume_from_bytes=config.resume_from_bytes, interrupted=self._closing.is_set)
        self._delivery = Delivery(config, self._spool, wire, self._targets, self._closing.is_set)
        self._thread = DeliveryThread(config, self._spool, self._delivery, self._closing)
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
        with self._thread.condition:
            self._add_or_merge_metrics(values, step)
            self._thread.condition.notify_all()

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
            hold: Whether the files may be deleted without asking `pending_paths`; hard links keep their content then.

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

    def has_queued(self, path: StrPath) -> bool:
        """Whether the checkpoint with this record waits or was delivered, by whichever process of the run."""
        stored = stored_path(path, self._root)
        waits = any(entry.body.get("main") == stored for entry in self._spool.entries("checkpoint"))
        return waits or self._spool.receipt(receipt_key("checkpoint", stored)) is not None

    def address_of(self, path: StrPath) -> str | None:
        """Where the record of a checkpoint that was delivered can be had: the file store's reference, else at a target.

        None while it has not arrived, and where its bytes are sent nowhere.
        """
        stored = stored_path(path, self._root)
        if any(entry.body.get("main") == stored for entry in self._spool.entries("checkpoint")):
            return None  # what was delivered is an older one of the same name
        receipt = self._spool.receipt(receipt_key("checkpoint", stored))
        address = None if receipt is None else receipt.get("address")
        return address if isinstance(address, str) else None

    @property
    def failure(self) -> UploadError | None:
        """The first required upload that was refused for good in this attempt; None while there is none."""
        return self._thread.failure

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
        self._thread.begin_settling()
        try:
            self._thread.wait_until(lambda: not self._deliverable("checkpoint", "sample"), end, progress)
            grace = min(end, time.monotonic() + METRICS_GRACE_S)
            self._thread.wait_until(lambda: not self._deliverable("metrics"), grace, None)
        finally:
            self._thread.end_settling()
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
        entry = enqueue_terminal(self._spool, self.config.run_id, with_reference(payload, uploaded))
        return SettleResult() if entry is None else self._send_terminal(entry, deadline_s)

    def deliver_waiting_terminal(self, deadline_s: float | None = None) -> SettleResult:
        """Send the terminal message that an earlier attempt left in the spool, if there is one."""
        entry = self._spool.head("terminal")
        return SettleResult() if entry is None else self._send_terminal(entry, deadline_s)

    def _send_terminal(self, entry: Entry, deadline_s: float | None) -> SettleResult:
        """Not sent by the delivery thread, so that a transfer that stalls does not hold it up."""
        limit_s = self.config.deadline_s if deadline_s is None else deadline_s
        failure = send_terminal(entry, limit_s, self._delivery, self.config, self._closing)
        if failure is None:
            note_acknowledged(self._spool, entry)
            return SettleResult()
        if isinstance(failure, Refused):
            self._thread.refuse(entry, failure)
        return SettleResult((undelivered(entry, failure.reason),))

    # life

    def start(self) -> None:
        """Begin to deliver, what an earlier process left behind first. Calling it again has no effect.

        Raises:
            ThreadLimitError: The system has no room for its thread; the terminal message can be delivered all the same.
        """
        self._thread.start()

    def close(self) -> None:
        """Stop delivering and release the spool; what waits stays there for the next start."""
        self._closing.set()
        self._thread.join(CLOSE_WAIT_S)
        self._spool.close()
        self._client.close()

    @property
    def is_delivering(self) -> bool:
        """Whether the background thread is running."""
        return self._thread.is_alive

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

    def _add_or_merge_metrics(self, values: dict[str, float], step: int) -> None:
        newest = self._spool.newest("metrics")
        if newest is not None and newest.step == step and not newest.attempted:
            self._spool.replace_body(newest, {"metrics": {**newest.body["metrics"], **values}})
            return
        while (oldest := self._spool.oldest("metrics")) and self._is_full():
            self._spool.remove(oldest)
            self._thread.count_lost_metrics("too many wait for an endpoint that is away")
        self._spool.add("metrics", step, {"metrics": values})

    def _is_full(self) -> bool:
        return self._spool.count("metrics") >= self.config.max_pending_metrics

    def _hold(self, main: Path, files: Sequence[Path]) -> HardLinks | None:
        """Links to `files`; None where the file system does not have them."""
        try:
            return hold(self._spool.directory, main, files)
        except OSError as error:
            log.warning("%s can't be kept from being deleted before it is uploaded: %s", main, error.strerror)
            return None

    def _enqueue_artifact(self, kind: Kind, step: int, artifact: Artifact) -> None:
        body = artifact.body()
        with self._thread.condition:
            if any(entry.step == step and entry.body == body for entry in self._spool.entries(kind)):
                return
            self._spool.add(kind, step, body)
            self._thread.condition.notify_all()
        refusal = self._spool.catch_up()
        if refusal is not None:
            raise UploadError(
                f"The {kind} of step {step}, {self._root / artifact.main}, cannot be kept for upload, since the spool "
                f"{self._spool.directory} cannot be written: {refusal.strerror}. Make room there and resume the run, "
                "which sends the newest checkpoint; what else did not arrive stays where it is."
            )

    def _deliverable(self, *kinds: Kind) -> bool:
        return any(self.config.wants(kind) and self._spool.head(kind) is not None for kind in kinds)

    def _result(self) -> SettleResult:
        refusal = self._spool.catch_up()
        with self._thread.condition:
            reasons = self._thread.reasons()
            waiting = [entry for entry in self._spool.entries() if entry.kind in ("checkpoint", "sample")]
            wanted = [entry for entry in waiting if self.config.wants(entry.kind)]
            left = tuple(undelivered(entry, reasons.get(entry.kind, "")) for entry in wanted)
            refused = "" if refusal is None else refusal.strerror or str(refusal)
            return SettleResult(left, self._spool.count("metrics"), self._thread.lost_metrics, refused)
