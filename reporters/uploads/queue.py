"""The queue of a run's uploads: a directory, which survives the process.

::

    uploads/000000012.json            one thing to deliver, and how far its delivery has come
    uploads/links/000000012/…         hard links to the files of a checkpoint, which may be deleted before they arrive
    uploads/delivered/000000007.json  a checkpoint that has arrived, or an end of the run that was acknowledged
    uploads/lock                      held by the process that delivers

Every file appears whole, by a rename. What a disk refuses is kept in memory, and written once the disk takes it. The
files hold paths, digests and payloads; never a token or a URL.
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

__all__ = [
    "LINKS",
    "Entry",
    "File",
    "Kind",
    "Queue",
    "UploadedFile",
    "count_waiting",
    "pack",
    "read_entries",
    "stored_path",
]

log = logging.getLogger(__name__)

DELIVERED = "delivered"
LINKS = "links"
LOCK = "lock"
LARGEST_ENTRY_BYTES = 1 << 26

Kind = Literal["metrics", "sample", "checkpoint", "terminal"]


class File(msgspec.Struct, frozen=True):
    """One file of a checkpoint or sample, as it was queued."""

    path: str
    """Its path (relative to the run's folder if it is inside)."""
    layout: str
    """Its path relative to the folder of the last file, the commit record."""
    size_bytes: int
    mtime_ns: int


class UploadedFile(msgspec.Struct, frozen=True):
    """The facts about a file that was delivered."""

    ref: str | None
    """The file store's reference; None without a store."""
    sha256: str | None
    """None for a directory."""
    size_bytes: int


class Entry(msgspec.Struct, kw_only=True):
    """One thing to deliver, and how far its delivery has come.

    A checkpoint or sample has `files`; metrics and the end of a run have a `payload`.
    """

    run_id: str
    kind: Kind
    step: int
    to: tuple[str, ...]
    """Names of its destinations. Their addresses are not read from here: the folder may have come from elsewhere."""
    seq: int = 0
    owner: str = ""
    """Owner of the files in the file store."""
    payload: dict[str, Any] = {}
    """The message of metrics, or of the end of the run."""
    key: str = ""
    """The idempotency key of that message."""
    local_path: str = ""
    """The path that a checkpoint or sample is reported by, a file or a folder."""
    files: tuple[File, ...] = ()
    """The commit record of a checkpoint, or the JSON of a sample, comes last."""
    final: bool = False
    parts: dict[str, UploadedFile | None] = {}
    """The parts that were delivered, by name."""
    reason: str = ""
    """Why the last try failed, in safe text."""
    refusals: dict[str, str] = {}
    """Destinations to which it cannot be delivered in this attempt, each with the reason."""
    refused: bool = False
    """Whether nothing more of it can be delivered in this attempt."""
    auth: bool = False
    """Whether the server refused our credentials."""

    def __post_init__(self) -> None:
        """Refuse what no process of ours can have queued: a layout, say, that leads out of its folder."""
        if not self.to or (self.kind in ("checkpoint", "sample") and not self.files):
            raise ValueError("it names no destination, or no file")
        for file in self.files:
            layout = PurePosixPath(file.layout)
            if not layout.parts or layout.is_absolute() or ".." in layout.parts or "\0" in file.layout:
                raise ValueError(f"its layout {file.layout!r} leads out of its folder")
            if "\0" in file.path:
                raise ValueError(f"{file.path!r} is not a path")

    def __str__(self) -> str:
        name = Path(self.local_path).name or self.kind
        return f"{self.kind} of step {self.step} ({name}): {self.reason or 'not sent before the deadline'}"

    @property
    def subject(self) -> int | None:
        """Index of the file that it is reported by; None for a folder."""
        return next((index for index, file in enumerate(self.files) if file.path == self.local_path), None)

    def name_in_store(self, file: File) -> str:
        """``trainer/lora.safetensors`` for ``step-00000200/trainer/lora.safetensors``.

        The folder of a checkpoint says no more than the step and the record's name; a step may have several samples,
        whose folders distinguish them.
        """
        folder, _, rest = file.layout.partition("/")
        is_own_folder = folder.partition("~")[0] == PurePosixPath(self.files[-1].layout).stem
        return rest if rest and is_own_folder and self.kind == "checkpoint" else file.layout

    @property
    def identity(self) -> tuple[object, ...]:
        """Key for deduplication: equal if step and files are equal."""
        return self.step, self.final, self.local_path, self.files


def pack(root: Path, main: Path, files: Iterable[str | os.PathLike[str]]) -> tuple[File, ...]:
    """Look at the files of a checkpoint or sample and put them in order.

    Args:
        root: The run's folder; paths inside it are remembered relative to it.
        main: The commit record of a checkpoint, or the JSON of a sample; it comes last.
        files: The files that belong to it; a directory stands for all files in it.

    Raises:
        UploadError: A file does not exist, or two would have the same name in a store.
    """
    packed: dict[str, File] = {}
    for path in (*dict.fromkeys(path for given in files for path in _files_in(given) if path != main), main):
        layout = path.relative_to(main.parent).as_posix() if path.is_relative_to(main.parent) else path.name
        try:
            found = os.stat(path)
        except OSError as error:
            raise UploadError(f"{path} cannot be uploaded: {error.strerror}") from error
        file = File(stored_path(path, root), layout, found.st_size, found.st_mtime_ns)
        other = packed.setdefault(layout.replace("/", "_"), file)
        if other is not file:
            raise UploadError(f"{other.path} and {path} would have the same name in the file store; rename one.")
    return tuple(packed.values())


def stored_path(path: str | os.PathLike[str], root: Path) -> str:
    """`path` as the queue remembers it: relative to `root` when inside, else absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)


def _files_in(given: str | os.PathLike[str]) -> Iterator[Path]:
    """`given`, or all files in it if it is a directory, as absolute paths in a stable order."""
    path = Path(os.path.abspath(given))
    yield from sorted(each for each in path.rglob("*") if not each.is_dir()) if path.is_dir() else [path]


class Queue:
    """The queue at `directory`, open for change by one process; its methods may be called from several threads.

    Attributes:
        directory: Its directory.
        root: The run's folder, to which the paths of files are relative.
        changed: Guards the entries, and is notified when they change.
        left_alone: Entries of other runs, or for other destinations.

    Args:
        directory: Where it lies; it is made when absent.
        is_ours: Whether this process delivers an entry. The others stay as they are.

    Raises:
        StartupContractError: ``startup.artifacts_in_use``: another process has it open.
            ``startup.invalid_artifact_paths``: it cannot be written.
        UploadError: A file of it is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str], is_ours: Callable[[Entry], bool] = bool) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.root = self.directory.parent
        self.changed = threading.Condition()
        self._closed = False
        self._refusal: OSError | None = None
        """Why the disk does not hold what is in memory."""
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
        for folder in (self.directory, self.directory / DELIVERED):
            for debris in folder.glob(f"{TEMPORARY_PREFIX}*.json-*"):  # of a process that was killed
                debris.unlink()
        self._delivered = {entry.seq: entry for entry in read_entries(self.directory / DELIVERED)}
        for entry in [*self._delivered.values()]:
            if entry.files and not (self.root / entry.files[-1].path).exists():  # so it can't be queued once more
                self._path(entry.seq, DELIVERED).unlink()
                del self._delivered[entry.seq]
        for seq in self._delivered:  # a process may have been killed between the two
            self._path(seq).unlink(missing_ok=True)
        waiting = read_entries(self.directory)
        self._entries = {entry.seq: entry for entry in waiting if is_ours(entry)}
        self.left_alone = [entry for entry in waiting if entry.seq not in self._entries]
        for entry in self._entries.values():
            entry.reason, entry.refused, entry.auth, entry.refusals = "", False, False, {}  # a new start may deliver it
        self._next_seq = count(max([entry.seq for entry in waiting] + [*self._delivered], default=0) + 1)
        links = self.directory / LINKS
        for name in os.listdir(links) if links.is_dir() else ():
            if not (name.isdecimal() and any(entry.seq == int(name) for entry in waiting)):
                shutil.rmtree(links / name, ignore_errors=True)  # of a process that died before it added their entry

    def add(self, entry: Entry) -> None:
        """Append an entry; it survives the process when this returns, unless `catch_up` says otherwise.

        Metrics, which come often and are best effort, survive a kill but not a power cut. The files of a checkpoint may
        be deleted from now on, but for those that `unlinked_files` names.
        """
        with self.changed:
            entry.seq = next(self._next_seq)
            if entry.kind == "checkpoint":
                self._link_files(entry)
            self._write(entry)
            self._entries[entry.seq] = entry
            self.changed.notify_all()

    def save(self, entry: Entry) -> None:
        """Write down what has changed in an entry."""
        self._write(entry)
        with self.changed:
            if not self.holds(entry):  # by now
                self._unlink(self._path(entry.seq))

    def refuse(self, entry: Entry) -> None:
        """`entry` can't be delivered in this attempt; it stays for the next one."""
        entry.refused = True
        self.save(entry)
        with self.changed:
            self.changed.notify_all()

    def finish(self, entry: Entry) -> None:
        """`entry` was delivered. A checkpoint, or the end of a run, is remembered, so that it is not sent again."""
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
        """Forget `entry`, after it was delivered or given up for good."""
        with self.changed:
            if self._entries.pop(entry.seq, None) is not None:
                self._unlink(self._path(entry.seq))
                shutil.rmtree(self._links(entry), ignore_errors=True)
            self.changed.notify_all()

    def entries(self, *kinds: Kind) -> list[Entry]:
        """Waiting entries of `kinds` that are ours, oldest first; of all kinds if none is given."""
        with self.changed:
            entries = list(self._entries.values())
        return [entry for entry in entries if not kinds or entry.kind in kinds]

    def delivered(self, kind: Kind) -> list[Entry]:
        """The entries of `kind` that were delivered, by whichever process."""
        with self.changed:
            delivered = list(self._delivered.values())
        return [entry for entry in delivered if entry.kind == kind]

    def holds(self, entry: Entry) -> bool:
        """Whether `entry` still waits; a newer one may have replaced it."""
        with self.changed:
            return entry.seq in self._entries

    def head(self, *kinds: Kind) -> Entry | None:
        """The oldest entry of `kinds` that can be tried."""
        return next((entry for entry in self.entries(*kinds) if not entry.refused), None)

    def location(self, entry: Entry, file: File) -> Path:
        """Path that a file is sent from: its link, or the file itself."""
        link = self._links(entry) / file.layout
        return link if link.exists() else self.root / file.path

    def files_outside(self, entry: Entry, roots: Iterable[str | os.PathLike[str]]) -> list[str]:
        """The files of an entry that lie neither in the run's folder nor in one of `roots`, links followed.

        The queue may have come with a folder from elsewhere. What it names there must not leave this machine.
        """
        allowed = [os.path.realpath(folder) for folder in (self.root, *roots)]
        places = {file.path: Path(os.path.realpath(self.location(entry, file))) for file in entry.files}
        return [path for path, place in places.items() if not any(place.is_relative_to(folder) for folder in allowed)]

    def unlinked_files(self) -> set[Path]:
        """The files of checkpoints that wait and must not be deleted, since no link could be made to them."""
        waiting = [entry for entry in self.entries("checkpoint") if not self._links(entry).is_dir()]
        return {self.root / file.path for entry in waiting for file in entry.files}

    def catch_up(self) -> OSError | None:
        """Write what the disk has refused so far; return why that fails, or None if nothing is missing."""
        with self.changed:
            if self._refusal is not None and not self._closed:
                self._refusal = None
                self._write_missing()
            return self._refusal

    def _write_missing(self) -> None:
        alone = {entry.seq for entry in self.left_alone}
        for path in _entry_files(self.directory):
            if int(path.stem) not in {*self._entries, *alone}:
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
            log.error("not all that waits in %s could be kept there: %s", self.directory, refusal.strerror)
        self._closed = True
        self._lock.release()

    def _path(self, seq: int, folder: str = "") -> Path:
        return self.directory / folder / f"{seq:09d}.json"

    def _links(self, entry: Entry) -> Path:
        return self.directory / LINKS / f"{entry.seq:09d}"

    def _link_files(self, entry: Entry) -> None:
        """Make hard links to the files of a checkpoint. They keep the bytes at no cost.

        Retention deletes checkpoints whether they have arrived or not.
        """
        links = self._links(entry)
        try:
            for file in entry.files:
                make_directory((links / file.layout).parent)
                os.link(os.path.realpath(self.root / file.path), links / file.layout)
        except OSError as error:  # on another file system than the queue, or on one without hard links
            shutil.rmtree(links, ignore_errors=True)
            path, reason = self.root / entry.files[-1].path, error.strerror or error
            log.warning(
                "%s can't be kept from being deleted, but by `Checkpoint`, until it is uploaded: %s", path, reason
            )

    def _write(self, entry: Entry, folder: str = "") -> None:
        if self._closed:
            raise UploadError(f"The upload queue {self.directory} is closed.")
        data, waits = msgspec.json.encode(entry), entry.kind != "metrics"
        with self._noting_refusal():
            write_bytes_durably(self._path(entry.seq, folder), data, mode=PRIVATE_FILE, waits_for_disk=waits)

    def _unlink(self, path: Path) -> None:
        with self._noting_refusal():
            if not self._closed:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        """Writes that the disk refuses stay in memory until `catch_up`."""
        try:
            yield
        except OSError as error:
            if self._refusal is None:
                log.error("the upload queue %s cannot be written: %s", self.directory, error.strerror)  # noqa: TRY400
            self._refusal = error


def read_entries(directory: str | os.PathLike[str]) -> list[Entry]:
    """The entries that wait in the queue at `directory`, oldest first; takes no lock and changes nothing.

    An empty file, as a power cut leaves it, is no entry.

    Raises:
        UploadError: One is damaged.
    """
    entries = []
    for path in sorted(_entry_files(Path(directory)), key=lambda path: int(path.stem)):
        try:
            data = read_own(path, limit=LARGEST_ENTRY_BYTES)
            if data.strip():
                entry = msgspec.json.decode(data, type=Entry)
                if entry.seq != int(path.stem):
                    raise ValueError(f"it says that it is number {entry.seq}")
                entries.append(entry)
        except FileNotFoundError:
            continue  # delivered meanwhile
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UploadError(f"The upload {path} is damaged ({why}). Move it aside to go on without it.") from error
    return entries


def count_waiting(run: str | os.PathLike[str]) -> int:
    """How many uploads wait in the queue of the run in folder `run`; reads only file names."""
    return len(_entry_files(Path(run, QUEUE_DIRECTORY)))


def _entry_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*.json") if path.stem.isdecimal()]
