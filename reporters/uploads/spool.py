"""What is still to be delivered, in a journal on disk that survives the process.

The journal is a file of JSON lines. One ``write`` adds an entry, notes that a part of it was delivered, or removes
it, so that a process that is killed loses nothing and a new one finds what its predecessor left; a torn last line is
cut off. What a disk refuses is held in memory, and written once the disk takes it. Plain files rather than a database,
because a write-ahead log in shared memory does not work on the network file systems that clusters keep their runs on.

The journal holds paths, digests and payloads. It never holds a token or a URL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...adapter.contract.exceptions import StartupContractError, UploadError
from ...adapter.plumbing.durable import TEMPORARY_PREFIX, fsync_directory, write_all, write_bytes_durably
from ...adapter.plumbing.file_lock import FileLock, LockHeldError
from ...adapter.plumbing.safe_open import make_directory, open_own, read_own
from .artifact import files_outside, unpack
from .config import UploadConfig
from .hard_links import release_others
from .journal import (
    DESCRIPTION,
    JOURNAL,
    Content,
    Description,
    Entry,
    Line,
    fault_of,
    read_content,
    read_description,
)
from .outcome import REQUIRED_KINDS
from .payloads import Kind

__all__ = ["Spool", "SpoolInUseError", "claim", "look_through"]

log = logging.getLogger(__name__)

LOCK = "lock"
REWRITE_FROM_BYTES = 1 << 20
_OWN_TEMPORARIES = (f"{TEMPORARY_PREFIX}{JOURNAL}", f"{TEMPORARY_PREFIX}{DESCRIPTION}")


class SpoolInUseError(UploadError):
    """A live run, of this process or another, has the spool open."""


class Spool:
    """The journal of one run, open for change by one process; its methods may be called from several threads.

    Raises:
        SpoolInUseError: Another run has the spool open.
        UploadError: The journal is damaged.
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))
        make_directory(self.directory)
        self._mutex = threading.RLock()
        self._rewriting = threading.RLock()
        """Taken before `_mutex`, never after it."""
        self._lock = self._take_lock()
        self._path = self.directory / JOURNAL
        self._descriptor = -1
        self._refusal: OSError | None = None
        """Why the disk lacks some of what is in memory."""
        try:
            fsync_directory(self.directory)
            self._sweep()
            self._content, whole = read_content(self._path)
            for entry in self._content.by_seq.values():
                entry.failure, entry.auth = None, False  # a new start is a new chance
                entry.attempted = True
            self._open_journal()
            os.ftruncate(self._descriptor, whole)
            self._size = whole
            self._live_size = 0
            if whole:
                self._rewrite_if_possible()
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> FileLock:
        try:
            return FileLock(self.directory / LOCK, is_required=False)
        except LockHeldError as error:
            raise SpoolInUseError(
                f"The upload spool {self.directory} is in use by another run. Wait for it to end, stop it, or use "
                "another directory."
            ) from error

    def _rewrite_if_possible(self) -> None:
        try:
            self.rewrite()
        except OSError as error:
            log.warning("the upload journal %s cannot be made smaller: %s", self._path, error.strerror)

    def _sweep(self) -> None:
        """Remove what a process that was killed while it rewrote the journal left."""
        for name in os.listdir(self.directory):
            if name.startswith(_OWN_TEMPORARIES) or name == JOURNAL + ".new":
                (self.directory / name).unlink()

    def _open_journal(self) -> None:
        self._descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, kind: Kind, step: int, body: dict[str, Any]) -> Entry:
        """Append an entry; it survives the process when this returns, unless `catch_up` says otherwise."""
        with self._mutex:
            entry = Entry(self._content.next_seq, kind, step, body, parts={}, attempted=False)
            self._append(Line("add", entry=entry))
            return entry

    def replace_body(self, entry: Entry, body: dict[str, Any]) -> None:
        """Change an entry that was not attempted yet."""
        self._append(Line("body", seq=entry.seq, body=body))

    def note_part(self, entry: Entry, part: str, receipt: dict[str, Any]) -> None:
        """A part of `entry` was delivered and must not be sent again."""
        self._append(Line("part", seq=entry.seq, part=part, receipt=receipt))

    def fail(self, entry: Entry, reason: str, *, auth: bool) -> None:
        """`entry` can't be delivered in this attempt; it stays for the next one."""
        self._append(Line("failed", seq=entry.seq, failure=reason, auth=auth))

    def remove(self, entry: Entry) -> None:
        """`entry` was delivered, or is given up for good."""
        self._append(Line("gone", seq=entry.seq))

    def add_receipt(self, key: str, receipt: dict[str, Any]) -> None:
        """Remember a delivery beyond the life of its entry, durably; the newest 1024 are kept."""
        self._append(Line("receipt", key=key, receipt=receipt))
        self.sync()

    def receipt(self, key: str) -> dict[str, Any] | None:
        """What `add_receipt` remembered."""
        with self._mutex:
            return self._content.receipts.get(key)

    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """The entries that wait, oldest first."""
        with self._mutex:
            return list((self._content.by_seq if kind is None else self._content.entries[kind]).values())

    def head(self, kind: Kind) -> Entry | None:
        """The oldest entry of `kind` that can be tried."""
        with self._mutex:
            return next((entry for entry in self._content.entries[kind].values() if entry.failure is None), None)

    def oldest(self, kind: Kind) -> Entry | None:
        """The entry of `kind` that was added first, whether it can be tried or not."""
        with self._mutex:
            return next(iter(self._content.entries[kind].values()), None)

    def newest(self, kind: Kind) -> Entry | None:
        """The entry of `kind` that was added last."""
        with self._mutex:
            return next(reversed(self._content.entries[kind].values()), None)

    def count(self, kind: Kind) -> int:
        """How many entries of `kind` wait."""
        with self._mutex:
            return len(self._content.entries[kind])

    def describe(self, facts: dict[str, Any]) -> None:
        """Write down whose spool it is, for commands that look at it later; `read_description` gives it back."""
        data = msgspec.json.format(msgspec.json.encode(facts, order="sorted")) + b"\n"
        path = self.directory / DESCRIPTION
        with contextlib.suppress(OSError):  # what is not a file of ours is replaced
            if read_own(path, limit=len(data)) == data:
                return
        write_bytes_durably(path, data, mode=0o600)

    def sync(self) -> None:
        """Make what was added survive a power cut as well; a thread that adds meanwhile does not wait for the disk."""
        with self._mutex:
            descriptor = os.dup(self._descriptor) if self._descriptor >= 0 else -1
        if descriptor >= 0:
            try:
                os.fdatasync(descriptor)
            except OSError as error:
                self._refusal = error
            finally:
                os.close(descriptor)

    def catch_up(self) -> OSError | None:
        """Write what the disk has refused so far; returns why that cannot be done, None where nothing is missing."""
        if self._refusal is not None and self._descriptor >= 0:
            with contextlib.suppress(OSError):  # which is noted
                self.rewrite()
        return self._refusal

    def forget_everything(self) -> None:
        """Drop entries and receipts; for a directory that belonged to another run."""
        with self._mutex:
            self._content = Content()
        self.rewrite()

    def close(self) -> None:
        """Release the spool to other processes; what waits stays on disk."""
        if (refusal := self.catch_up()) is not None:
            log.error("not all that waits in %s could be kept there: %s", self.directory, refusal.strerror)
        with self._mutex:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._lock.release()

    def _append(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        with self._mutex:
            if self._descriptor < 0:
                raise UploadError(f"The spool {self.directory} is closed.")
            try:
                if self._refusal is not None:  # a line must not be glued to half of the one before it
                    os.ftruncate(self._descriptor, self._size)
                write_all(self._descriptor, data)
                self._size += len(data)
            except OSError as error:
                self._refuse(error)
            self._content.apply(line)

    def _refuse(self, error: OSError) -> None:
        if self._refusal is None:
            log.error("the upload spool %s cannot be written: %s", self.directory, error.strerror)
        self._refusal = error
        with contextlib.suppress(OSError):  # the next line tries it again
            os.ftruncate(self._descriptor, self._size)

    def rewrite_when_worthwhile(self) -> None:
        """Drop the lines of what is gone once they are most of the journal; add those that the disk has refused."""
        if self._refusal is not None or self._size > max(REWRITE_FROM_BYTES, 4 * self._live_size):
            self.rewrite()

    def rewrite(self) -> None:
        """Rewrite the journal with what still waits.

        The mutex is not held while the disk syncs, because a training step may be waiting to add an entry: lines that
        are added meanwhile are carried over.
        """
        with self._rewriting:
            self._rewrite()

    def _rewrite(self) -> None:
        with self._mutex:
            snapshot = b"".join(msgspec.json.encode(line) + b"\n" for line in self._content.lines())
            taken_at = self._size
            refusal = self._refusal
        try:
            self._replace(snapshot, taken_at)
        except OSError as error:
            if refusal is not None:
                self._refusal = error
            raise
        with self._mutex:
            if self._refusal is refusal:  # else the disk has refused a line meanwhile
                self._refusal = None

    def _replace(self, snapshot: bytes, taken_at: int) -> None:
        fresh = self._path.with_name(JOURNAL + ".new")
        write_bytes_durably(fresh, snapshot, mode=0o600)
        with self._mutex:
            if self._descriptor < 0:
                fresh.unlink()
                return
            self._adopt(fresh, len(snapshot), taken_at)

    def _adopt(self, fresh: Path, snapshot_size: int, taken_at: int) -> None:
        added = open_own(self._path, os.O_RDONLY)
        target = open_own(fresh, os.O_WRONLY | os.O_APPEND)
        try:
            late = os.pread(added, self._size - taken_at, taken_at)
            write_all(target, late)
        except BaseException:
            os.close(target)
            raise
        finally:
            os.close(added)
        os.replace(fresh, self._path)
        os.close(self._descriptor)
        self._descriptor = target
        self._size = snapshot_size + len(late)
        self._live_size = snapshot_size


def claim(spool: Spool, config: UploadConfig, targets: Sequence[str]) -> int:
    """Write down whose spool it is; how often an uploader was made for it, this time included.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: uploads of another run wait in it; they are not sent under
            this one's name.
    """
    try:
        before = read_description(spool.directory)
    except UploadError:
        before = Description(config.run_id)
    if before.run_id != config.run_id:
        if spool.entries():
            raise StartupContractError(
                "startup.artifacts_in_use",
                f"The upload spool {spool.directory} holds uploads of run {before.run_id!r}, not of "
                f"{config.run_id!r}. Deliver them by `genlight uploads retry "
                f"{shlex.quote(str(spool.directory.parent))}`, or use another directory.",
            )
        spool.forget_everything()
        before = Description(config.run_id)
    starts = max(before.starts, 0) + 1
    facts = {"run_id": config.run_id, "owner": config.owner, "targets": list(targets)}
    spool.describe({**facts, "starts": starts, "stores_files": config.stores_files()})
    return starts


def look_through(spool: Spool, config: UploadConfig, *, keep_terminal: bool) -> None:
    """An earlier attempt's terminal message is out of date; what has vanished from disk is lost."""
    if not keep_terminal:
        for entry in spool.entries("terminal"):
            spool.remove(entry)
    _drop_malformed(spool)
    _drop_vanished(spool)
    _refuse_files_outside(spool, config)
    for kind in REQUIRED_KINDS:
        if spool.count(kind) and not config.wants(kind):
            log.warning("uploads of kind %s wait in %s, but no URL is set for them", kind, spool.directory)
    artifacts = [unpack(entry.body) for entry in (*spool.entries("sample"), *spool.entries("checkpoint"))]
    links = [artifact.files[-1].location(spool.directory.parent) for artifact in artifacts if artifact.held]
    release_others(spool.directory, links)


def _drop_malformed(spool: Spool) -> None:
    for entry in spool.entries():
        fault = fault_of(entry)
        if fault is not None:
            log.warning("an upload of kind %s in %s is ignored: %s", entry.kind, spool.directory, fault)
            spool.remove(entry)


def _refuse_files_outside(spool: Spool, config: UploadConfig) -> None:
    """A journal that came with a folder from elsewhere could name any file of this machine."""
    root = spool.directory.parent
    for entry in (*spool.entries("sample"), *spool.entries("checkpoint")):
        found = files_outside(unpack(entry.body), root, config.roots)
        if found:
            reason = f"{found[0]} lies outside of the run's folders; name its folder as another root"
            spool.fail(entry, reason, auth=False)


def _drop_vanished(spool: Spool) -> None:
    root = spool.directory.parent
    for entry in (*spool.entries("sample"), *spool.entries("checkpoint")):
        missing = [file.path for file in unpack(entry.body).files if not file.location(root).exists()]
        if missing:
            log.warning("the %s of step %d is no longer there to upload: %s", entry.kind, entry.step, missing)
            spool.remove(entry)
