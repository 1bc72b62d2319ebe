"""The queue of a run's uploads: a directory that survives the process.

::

    uploads/000000012.json            one entry, with the progress of its delivery
    uploads/links/000000012/…         hard links to a checkpoint's files, so that it may be deleted before the delivery
    uploads/delivered/000000007.json  a delivered checkpoint, or an acknowledged end of the run
    uploads/lock                      held by the process that delivers

Every file appears complete, by a rename. If the disk refuses a write, the entry stays in memory and is written later.
The files contain paths, digests and payloads; never a token or a URL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from ...adapter.contract.exceptions import StartupContractError, UploadError
from ...adapter.plumbing.durable import TEMPORARY_PREFIX, make_directory, write_bytes_durably
from ...adapter.plumbing.file_lock import FileLock, LockHeldError, NoLocksError
from ...adapter.plumbing.safe_open import PRIVATE_FILE, read_own
from .config import QUEUE_DIRECTORY

log = logging.getLogger(__name__)

DELIVERED = "delivered"
LINKS = "links"
LOCK = "lock"
LARGEST_ENTRY_BYTES = 1 << 26

Kind = Literal["metrics", "sample", "checkpoint", "terminal"]


class File(msgspec.Struct, frozen=True):
    """One file of a checkpoint or sample, as queued."""

    path: str
    """Its path; relative to the run's folder if it is inside."""
    layout: str
    """Its path at the destination: relative to the folder of the commit record (the last file)."""
    size_bytes: int
    mtime_ns: int


class UploadedFile(msgspec.Struct, frozen=True):
    """Facts about a delivered file."""

    ref: str | None
    """The file store's reference; None without a store."""
    sha256: str | None
    """None for a directory."""
    size_bytes: int


class Entry(msgspec.Struct, kw_only=True):
    """One message or artifact to deliver, with the progress of its delivery.

    A checkpoint or sample has `files`; metrics and the end of a run have a `payload`.
    """

    run_id: str
    kind: Kind
    step: int
    to: tuple[str, ...]
    """Names of its destinations, but not their addresses, because the folder may come from an unknown source."""
    seq: int = 0
    owner: str = ""
    """Owner of the files in the file store."""
    payload: dict[str, Any] = {}
    """The message of metrics, or of the end of the run."""
    key: str = ""
    """The idempotency key of that message."""
    local_path: str = ""
    """The file or folder that the message about a checkpoint or sample names."""
    files: tuple[File, ...] = ()
    """The commit record of a checkpoint, or the JSON of a sample, comes last."""
    final: bool = False
    parts: dict[str, UploadedFile | None] = {}
    """The parts that were delivered, by name."""
    reason: str = ""
    """Why the last try failed, without secrets."""
    refusals: dict[str, str] = {}
    """Destinations to which this attempt no longer tries to deliver, each with the reason."""
    refused: bool = False
    """Whether no further part can be delivered in this attempt."""
    auth: bool = False
    """Whether the server refused our credentials."""

    def __post_init__(self) -> None:
        """Refuse entries that genlight never queues, such as one with a layout that leaves its folder."""
        if not self.to or (self.kind in ("checkpoint", "sample") and not self.files):
            raise ValueError("it has no destination or no file")
        for file in self.files:
            layout = PurePosixPath(file.layout)
            if not layout.parts or layout.is_absolute() or ".." in layout.parts or "\0" in file.layout:
                raise ValueError(f"its layout {file.layout!r} leaves its folder")
            if "\0" in file.path:
                raise ValueError(f"{file.path!r} is not a path")

    def __str__(self) -> str:
        name = Path(self.local_path).name or self.kind
        return f"{self.kind} of step {self.step} ({name}): {self.reason or 'not sent before the deadline'}"

    @property
    def subject(self) -> int | None:
        """Index of the file at `local_path`; None if that is a folder."""
        return next((index for index, file in enumerate(self.files) if file.path == self.local_path), None)

    def name_in_store(self, file: File) -> str:
        """Return the name of a file in the store, such as ``trainer/lora.safetensors``.

        The name omits the folder of a checkpoint (``step-00000200/``), because that only repeats the step. It includes
        the folder of a sample, because a step may have several samples.
        """
        folder, _, rest = file.layout.partition("/")
        is_own_folder = folder.partition("~")[0] == PurePosixPath(self.files[-1].layout).stem
        return rest if rest and is_own_folder and self.kind == "checkpoint" else file.layout

    @property
    def identity(self) -> tuple[object, ...]:
        """Key for deduplication: equal if step and files are equal."""
        return self.step, self.final, self.local_path, self.files


def pack(root: Path, main: Path, files: Iterable[str | os.PathLike[str]]) -> tuple[File, ...]:
    """Return the files of a checkpoint or sample in order, with their sizes and times.

    Args:
        root: The run's folder; paths inside it are stored relative to it.
        main: The commit record of a checkpoint, or the JSON of a sample; it comes last.
        files: The other files; a directory means all files in it.

    Raises:
        UploadError: A file does not exist, or two would have the same name in a store.
    """
    packed: dict[str, File] = {}
    for path in (*dict.fromkeys(path for each in files for path in _files_in(each) if path != main), main):
        layout = path.relative_to(main.parent).as_posix() if path.is_relative_to(main.parent) else path.name
        try:
            status = os.stat(path)
        except OSError as error:
            raise UploadError(f"{path} cannot be uploaded: {error.strerror}") from error
        file = File(stored_path(path, root), layout, status.st_size, status.st_mtime_ns)
        other = packed.setdefault(layout.replace("/", "_"), file)
        if other is not file:
            raise UploadError(f"{other.path} and {path} would have the same name in the file store; rename one.")
    return tuple(packed.values())


def stored_path(path: str | os.PathLike[str], root: Path) -> str:
    """Return `path` as stored in the queue: relative to `root` if inside it, otherwise absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)


def _files_in(path: str | os.PathLike[str]) -> list[Path]:
    """Return `path`, or all files in it if it is a directory, as absolute paths in a stable order."""
    absolute = Path(os.path.abspath(path))
    return sorted(each for each in absolute.rglob("*") if not each.is_dir()) if absolute.is_dir() else [absolute]


class Queue:
    """The queue at `directory`. Only one process at a time may open it, and any of its threads may change it.

    Attributes:
        directory: Its directory.
        root: The run's folder, to which the paths of files are relative.
        changed: Guards the entries, and is notified when they change.
        foreign: Entries of other runs, or for other destinations. They stay as they are.

    Args:
        directory: The directory; it is created if absent.
        is_ours: Returns whether this process delivers an entry.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another process uses the queue.
            ``startup.invalid_artifact_paths``: it cannot be written.
        UploadError: A file in it is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str], is_ours: Callable[[Entry], bool] = bool) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.root = self.directory.parent
        self.changed = threading.Condition()
        self._closed = False
        self._refusal: OSError | None = None
        """The error of a write that the disk refused, so that an entry is only in memory; None if all are on disk."""
        try:
            make_directory(self.directory / DELIVERED)
            self._lock = FileLock(self.directory / LOCK)
            try:
                self._open(is_ours)
            except BaseException:
                self._lock.release()
                raise
        except (LockHeldError, NoLocksError) as error:
            why = "is in use by another run" if isinstance(error, LockHeldError) else "cannot be locked"
            raise StartupContractError(
                "startup.artifacts_in_use",
                f"The upload queue {self.directory} {why} ({error.strerror}). Use another directory, or wait for that "
                "run to end.",
            ) from error
        except OSError as error:
            raise StartupContractError(
                "startup.invalid_artifact_paths",
                f"The upload queue {str(self.directory)!r} cannot be written: {error.strerror or error}. Choose "
                "another folder: `default_root_dir` of the trainer, or `TRAINER_ARTIFACTS_DIR` for a job.",
            ) from error

    def _open(self, is_ours: Callable[[Entry], bool]) -> None:
        """Read the entries of earlier processes, and remove the incomplete files and links of killed ones."""
        for folder in (self.directory, self.directory / DELIVERED):
            for debris in folder.glob(f"{TEMPORARY_PREFIX}*.json-*"):  # left by a killed process
                debris.unlink()
        self._delivered = {entry.seq: entry for entry in read_entries(self.directory / DELIVERED)}
        for entry in [*self._delivered.values()]:
            if entry.files and not (self.root / entry.files[-1].path).exists():  # deleted, so nobody can queue it again
                self._path(entry.seq, DELIVERED).unlink()
                del self._delivered[entry.seq]
        for seq in self._delivered:  # a process may have been killed before it removed the waiting entry
            self._path(seq).unlink(missing_ok=True)
        waiting = read_entries(self.directory)
        self._entries = {entry.seq: entry for entry in waiting if is_ours(entry)}
        self.foreign = [entry for entry in waiting if entry.seq not in self._entries]
        for entry in self._entries.values():
            entry.reason, entry.refused, entry.auth, entry.refusals = "", False, False, {}  # this attempt may succeed
        self._next_seq = count(max([entry.seq for entry in waiting] + [*self._delivered], default=0) + 1)
        links = self.directory / LINKS
        for name in os.listdir(links) if links.is_dir() else ():
            if not (name.isdecimal() and any(entry.seq == int(name) for entry in waiting)):
                shutil.rmtree(links / name, ignore_errors=True)  # left by a process that died before it added the entry

    def add(self, entry: Entry) -> None:
        """Append an entry. It survives the process once this returns, unless `catch_up` reports an error.

        Metrics are frequent and best effort: they survive a kill but not a power cut. Afterwards the files of a
        checkpoint may be deleted, unless `unlinked_files` has them.
        """
        with self.changed:
            entry.seq = next(self._next_seq)
            if entry.kind == "checkpoint":
                self._link_files(entry)
            self._write(entry)
            self._entries[entry.seq] = entry
            self.changed.notify_all()

    def save(self, entry: Entry) -> None:
        """Write a changed entry to disk."""
        self._write(entry)
        with self.changed:
            if not self.holds(entry):  # removed meanwhile
                self._unlink(self._path(entry.seq))

    def refuse(self, entry: Entry) -> None:
        """Mark `entry` as undeliverable in this attempt; it stays for the next one."""
        entry.refused = True
        self.save(entry)
        with self.changed:
            self.changed.notify_all()

    def finish(self, entry: Entry) -> None:
        """Remove a delivered `entry`. A checkpoint, or the end of a run, is remembered so that it is not sent again."""
        if entry.kind in ("checkpoint", "terminal"):
            self._write(entry, DELIVERED)
            with self.changed:
                self._remember(entry)
        self.remove(entry)

    def _remember(self, entry: Entry) -> None:
        for older in self.delivered(entry.kind):
            if older.files and (older.run_id, older.files[-1].path) == (entry.run_id, entry.files[-1].path):
                del self._delivered[older.seq]
                self._unlink(self._path(older.seq, DELIVERED))
        self._delivered[entry.seq] = entry

    def remove(self, entry: Entry) -> None:
        """Remove `entry` after it was delivered or dropped."""
        with self.changed:
            if self._entries.pop(entry.seq, None) is not None:
                self._unlink(self._path(entry.seq))
                shutil.rmtree(self._links(entry), ignore_errors=True)
            self.changed.notify_all()

    def entries(self, *kinds: Kind) -> list[Entry]:
        """Return our waiting entries of `kinds` (by default all), oldest first."""
        with self.changed:
            entries = list(self._entries.values())
        return [entry for entry in entries if not kinds or entry.kind in kinds]

    def delivered(self, kind: Kind) -> list[Entry]:
        """Return the delivered entries of `kind`, from all processes."""
        with self.changed:
            delivered = list(self._delivered.values())
        return [entry for entry in delivered if entry.kind == kind]

    def holds(self, entry: Entry) -> bool:
        """Return whether `entry` still waits; a newer one may have replaced it."""
        with self.changed:
            return entry.seq in self._entries

    def head(self, *kinds: Kind) -> Entry | None:
        """Return the oldest entry of `kinds` that can be tried."""
        return next((entry for entry in self.entries(*kinds) if not entry.refused), None)

    def location(self, entry: Entry, file: File) -> Path:
        """Return the path to read a file from: its link, or the file itself."""
        link = self._links(entry) / file.layout
        return link if link.exists() else self.root / file.path

    def files_outside(self, entry: Entry, roots: Iterable[str | os.PathLike[str]]) -> list[str]:
        """Return the files of an entry that are neither in the run's folder nor in `roots`; links are followed.

        The folder may come from an unknown source, so its queue could name any file of this machine.
        """
        allowed = [os.path.realpath(folder) for folder in (self.root, *roots)]
        places = {file.path: Path(os.path.realpath(self.location(entry, file))) for file in entry.files}
        return [path for path, place in places.items() if not any(place.is_relative_to(folder) for folder in allowed)]

    def unlinked_files(self) -> set[Path]:
        """Return the files of waiting checkpoints that must not be deleted because they could not be linked."""
        waiting = [entry for entry in self.entries("checkpoint") if not self._links(entry).is_dir()]
        return {self.root / file.path for entry in waiting for file in entry.files}

    def catch_up(self) -> OSError | None:
        """Retry the writes that the disk refused; return the error, or None if nothing is missing."""
        with self.changed:
            if self._refusal is not None and not self._closed:
                self._refusal = None
                self._write_missing()
            return self._refusal

    def _write_missing(self) -> None:
        """Write the entries that the disk refused, and remove files of entries that are gone."""
        foreign = {entry.seq for entry in self.foreign}
        for path in _entry_files(self.directory):
            if int(path.stem) not in {*self._entries, *foreign}:
                self._unlink(path)
        for entry in self._delivered.values():
            if not self._path(entry.seq, DELIVERED).exists():
                self._write(entry, DELIVERED)
        for entry in self._entries.values():
            if self._refusal is None:
                self.save(entry)

    def close(self) -> None:
        """Release the queue to other processes; waiting entries stay on disk."""
        if self._closed:
            return
        if (refusal := self.catch_up()) is not None:
            log.error("some entries of the upload queue %s could not be written: %s", self.directory, refusal.strerror)
        self._closed = True
        self._lock.release()

    def _path(self, seq: int, folder: str = "") -> Path:
        return self.directory / folder / f"{seq:09d}.json"

    def _links(self, entry: Entry) -> Path:
        return self.directory / LINKS / f"{entry.seq:09d}"

    def _link_files(self, entry: Entry) -> None:
        """Make hard links to the files of a checkpoint: they keep the bytes without a copy.

        Retention deletes checkpoints whether they were delivered or not.
        """
        links = self._links(entry)
        try:
            for file in entry.files:
                make_directory((links / file.layout).parent)
                os.link(os.path.realpath(self.root / file.path), links / file.layout)
        except OSError as error:  # another file system than the queue's, or one without hard links
            shutil.rmtree(links, ignore_errors=True)
            path, reason = self.root / entry.files[-1].path, error.strerror or error
            log.warning(
                "%s cannot be linked, so do not delete it until it is uploaded (`Checkpoint` will not): %s",
                path,
                reason,
            )

    def _write(self, entry: Entry, folder: str = "") -> None:
        if self._closed:
            raise UploadError(f"The upload queue {self.directory} is closed.")
        data, waits = msgspec.json.encode(entry), entry.kind != "metrics"
        with self._keeping_refusal():
            write_bytes_durably(self._path(entry.seq, folder), data, mode=PRIVATE_FILE, waits_for_disk=waits)

    def _unlink(self, path: Path) -> None:
        with self._keeping_refusal():
            if not self._closed:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _keeping_refusal(self) -> Iterator[None]:
        """Store an error of the disk until `catch_up` retries the write."""
        try:
            yield
        except OSError as error:
            if self._refusal is None:
                log.error("the upload queue %s cannot be written: %s", self.directory, error.strerror)  # noqa: TRY400
            self._refusal = error


def read_entries(directory: str | os.PathLike[str]) -> list[Entry]:
    """Return the waiting entries of the queue at `directory`, oldest first; take no lock and change nothing.

    An empty file, left by a power cut, is skipped.

    Raises:
        UploadError: An entry is damaged.
    """
    entries = []
    for path in sorted(_entry_files(Path(directory)), key=lambda path: int(path.stem)):
        try:
            data = read_own(path, limit=LARGEST_ENTRY_BYTES)
            if data.strip():
                entry = msgspec.json.decode(data, type=Entry)
                if entry.seq != int(path.stem):
                    raise ValueError(f"its number is {entry.seq}")
                entries.append(entry)
        except FileNotFoundError:
            continue  # delivered meanwhile
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UploadError(f"The upload {path} is damaged ({why}). Move it away to continue without it.") from error
    return entries


def count_waiting(run: str | os.PathLike[str]) -> int:
    """Return the number of waiting uploads of the run in folder `run`; only file names are read."""
    return len(_entry_files(Path(run, QUEUE_DIRECTORY)))


def _entry_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*.json") if path.stem.isdecimal()]
