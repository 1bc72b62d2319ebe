"""The queue of a run's uploads: a directory, which survives the process.

::

    uploads/000000012.json          one thing to deliver, and how far its delivery has come
    uploads/links/000000012/…       hard links to its files, where these may be deleted before they have arrived
    uploads/delivered/<digest>.json a receipt of a delivery, which outlives its entry
    uploads/about.json              whose queue it is
    uploads/lock                    held by the process that delivers

Every file appears whole, by a rename. What a disk refuses is kept in memory, and written once the disk takes it. The
files hold paths, digests and payloads; never a token or a URL.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from ...adapter.contract.exceptions import UploadError
from ...adapter.plumbing.durable import TEMPORARY_PREFIX, write_bytes_durably
from ...adapter.plumbing.file_lock import FileLock, LockHeldError, NoLocksError
from ...adapter.plumbing.safe_open import PRIVATE_FILE, make_directory, read_own
from .config import QUEUE_DIRECTORY

__all__ = [
    "ABOUT",
    "Artifact",
    "ArtifactFile",
    "Description",
    "Entry",
    "Kind",
    "Message",
    "Queue",
    "QueueInUseError",
    "Receipt",
    "UploadedFile",
    "count_waiting",
    "files_in",
    "files_outside",
    "layout_of",
    "pack",
    "queue_of_run",
    "read_description",
    "read_entries",
    "stored_path",
]

log = logging.getLogger(__name__)

ABOUT = "about.json"
DELIVERED = "delivered"
LINKS = "links"
LOCK = "lock"
MAX_RECEIPTS = 1024
LARGEST_ENTRY_BYTES = 1 << 26
LARGEST_DESCRIPTION_BYTES = 1 << 20


Kind = Literal["metrics", "sample", "checkpoint", "terminal"]


@dataclass(frozen=True)
class UploadedFile:
    """The file store's answer about a file that it received."""

    ref: str | None
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ArtifactFile:
    """One file of an artifact."""

    path: str
    """Where it lies (relative to the run's folder where it is inside)."""
    name: str
    """Its name in a file store, after the prefix that names the step; slashes become underscores there."""
    layout: str
    """Its path relative to the artifact's main file, for targets that keep folders."""
    size_bytes: int
    mtime_ns: int

    def location(self, root: Path) -> Path:
        """Where the file lies, the run's folder being at `root`."""
        return root / self.path

    def is_unchanged(self, root: Path) -> bool:
        """Whether the file still has the size and time that it was queued with."""
        try:
            found = os.stat(self.location(root))
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size_bytes, self.mtime_ns)


@dataclass(frozen=True)
class Artifact:
    """The files of one upload; the one that makes the others count (a checkpoint's record) comes last."""

    local_path: str
    """The path that is reported (relative to the run's folder where it is inside)."""
    files: tuple[ArtifactFile, ...]
    subject: int | None
    """Index of the file that the message describes; None where it is a directory."""
    subject_bytes: int
    """Size of what the message describes."""
    main: str
    """The commit record, sample or only file, by the path with which it was queued."""
    final: bool = False

    def __post_init__(self) -> None:
        """Refuse what no process of ours can have queued: a layout, say, that leads out of its folder."""
        if not self.files or not (self.subject is None or 0 <= self.subject < len(self.files)):
            raise ValueError("it does not say which file it is about")
        for file in self.files:
            if not _is_inside(file.layout):
                raise ValueError(f"its layout {file.layout!r} leads out of its folder")
            if "\0" in file.path:
                raise ValueError(f"{file.path!r} is not a path")

    def is_same(self, other: Artifact) -> bool:
        """Whether `other` is about the same files, which may be held by other links."""

        def identity(artifact: Artifact) -> tuple[object, ...]:
            files = [(file.name, file.layout, file.size_bytes, file.mtime_ns) for file in artifact.files]
            return artifact.local_path, artifact.main, artifact.final, files

        return identity(self) == identity(other)


def files_outside(artifact: Artifact, root: Path, roots: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files of an artifact that lie neither in the run's folder at `root` nor in one of `roots`, links followed.

    A journal may have come with a folder from elsewhere. What it names there must not leave this machine.
    """
    allowed = [os.path.realpath(folder) for folder in (root, *roots)]
    places = {file.path: Path(os.path.realpath(file.location(root))) for file in artifact.files}
    return [path for path, place in places.items() if not any(place.is_relative_to(folder) for folder in allowed)]


def _is_inside(layout: str) -> bool:
    path = PurePosixPath(layout)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in layout


def pack(
    root: Path,
    main: str | os.PathLike[str],
    files: Iterable[str | os.PathLike[str]],
    *,
    kind: Kind = "checkpoint",
    primary: str | os.PathLike[str] | None = None,
    final: bool = False,
    links: Path | None = None,
) -> Artifact:
    """Look at the files of an artifact and put them in order.

    Args:
        root: The run's folder; paths inside it are remembered relative to it.
        main: The commit record of a checkpoint, the JSON of a sample, or the only file.
        files: The files that belong to it; a directory stands for all files in it.
        kind: Whether it is a checkpoint or a sample.
        primary: The path that the message describes instead of `main`; a file or a directory.
        final: Whether this is the end of the run.
        links: A folder with links to the files, in their layout, from which they are sent.

    Raises:
        UploadError: A file does not exist, or two would have the same name in a store.
    """
    main_path = Path(os.path.abspath(main))
    subject_path = Path(os.path.abspath(primary)) if primary is not None else main_path
    ordered = _in_order(main_path, files, subject_path)
    packed = tuple(_look_at(path, root, main_path, kind, links) for path in ordered)
    _refuse_same_names(packed)
    size = sum(file.size_bytes for path, file in zip(ordered, packed, strict=True) if path.is_relative_to(subject_path))
    subject = None if subject_path.is_dir() else ordered.index(subject_path)
    return Artifact(stored_path(subject_path, root), packed, subject, size, stored_path(main_path, root), final)


def stored_path(path: str | os.PathLike[str], root: Path) -> str:
    """`path` as the queue remembers it: relative to `root` when inside, else absolute."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)


def _in_order(main: Path, files: Iterable[str | os.PathLike[str]], subject: Path) -> list[Path]:
    """Every file once: the given ones, the subject's, and `main` last."""
    found: dict[Path, None] = {}
    for given in (*files, subject):
        found.update(dict.fromkeys(files_in(given)))
    last = list(files_in(main))
    return [path for path in found if path not in last] + last


def files_in(given: str | os.PathLike[str]) -> Iterator[Path]:
    """`given`, or all files in it where it is a directory, as absolute paths in a stable order."""
    path = Path(os.path.abspath(given))
    if not path.is_dir():
        yield path
        return
    for top, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(top, name) for name in sorted(names))


def layout_of(path: Path, main: Path) -> Path:
    """The path of a file relative to the folder of `main`; its name where it lies elsewhere."""
    return path.relative_to(main.parent) if path.is_relative_to(main.parent) else Path(path.name)


def _look_at(path: Path, root: Path, main: Path, kind: Kind, links: Path | None) -> ArtifactFile:
    layout = layout_of(path, main)
    source = path if links is None else links / layout
    try:
        found = os.stat(source)
    except OSError as error:
        raise UploadError(f"{path} cannot be uploaded: {error.strerror}") from error
    name = _name_within(layout, main, kind)
    return ArtifactFile(stored_path(source, root), name, layout.as_posix(), found.st_size, found.st_mtime_ns)


def _name_within(layout: Path, main: Path, kind: Kind) -> str:
    """``trainer/lora.safetensors`` for ``step-00000200/trainer/lora.safetensors``.

    The folder of a checkpoint says no more than the step and the record's name; a step may have several samples, whose
    folders distinguish them.
    """
    folder = layout.parts[0]
    is_own_folder = len(layout.parts) > 1 and folder.partition("~")[0] in (main.stem, main.name)
    return Path(*layout.parts[1:]).as_posix() if is_own_folder and kind == "checkpoint" else layout.as_posix()


def _refuse_same_names(files: Sequence[ArtifactFile]) -> None:
    taken: dict[str, str] = {}
    for file in files:
        other = taken.setdefault(file.name.replace("/", "_"), file.path)
        if other != file.path:
            raise UploadError(
                f"{other} and {file.path} would have the same name in the file store; rename one of them."
            )


class QueueInUseError(UploadError):
    """A live run, of this process or another, delivers from the queue."""


class Entry(msgspec.Struct):
    """One thing to deliver, and how far its delivery has come."""

    seq: int
    kind: Kind
    step: int
    body: Any
    """An `Artifact`, or of metrics and the end of the run a `Message`."""
    parts: dict[str, UploadedFile | None] = {}
    """The parts that were delivered, by name, with the store's answer about a file."""
    failure: str | None = None
    """Why it can't be delivered, in safe text; None while it can be tried."""
    auth: bool = False


class Receipt(msgspec.Struct, frozen=True):
    """The facts about a delivery that outlive its entry."""

    key: str
    content: str = ""
    """Digest of everything that was delivered."""
    ref: str | None = None
    sha256: str | None = None
    size_bytes: int = 0


class Description(msgspec.Struct, frozen=True):
    """Whose queue it is. Where to send what waits is not read from here: the folder may have come from elsewhere."""

    run_id: str
    owner: str = ""
    targets: list[str] = []
    """Names of further destinations, for a person to look at."""
    starts: int = 0
    stores_files: bool = False


class Message(msgspec.Struct):
    """The payload of an entry of metrics, or of the end of the run."""

    payload: dict[str, Any]
    """The JSON object that is sent."""
    key: str
    """Its idempotency key."""


class Queue:
    """The queue at `directory`, open for change by one process; its methods may be called from several threads.

    Raises:
        QueueInUseError: Another run has it open.
        UploadError: A file of it is damaged.
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))
        make_directory(self.directory)
        self._mutex = threading.RLock()
        self._closed = False
        self._refusal: OSError | None = None
        """Why the disk does not hold what is in memory."""
        self._has_logged = False
        self._unwritten: set[int] = set()
        self._receipts: dict[str, Receipt] = {}
        try:
            self._lock = FileLock(self.directory / LOCK)
        except LockHeldError as error:
            raise QueueInUseError(
                f"The upload queue {self.directory} is in use by another run. Wait for it to end, stop it, or use "
                "another directory."
            ) from error
        except NoLocksError as error:
            raise QueueInUseError(
                f"The upload queue {self.directory} cannot be locked ({error.strerror}). Use a directory on a file "
                "system with locks."
            ) from error
        try:
            make_directory(self.directory / DELIVERED)
            self._sweep()
            self._entries = {entry.seq: entry for entry in read_entries(self.directory)}
            for entry in self._entries.values():
                entry.failure, entry.auth = None, False  # a new start is a new chance
            self._next_seq = count(max(self._entries, default=0) + 1)
            self._drop_links()
        except BaseException:
            self.close()
            raise

    def new_seq(self) -> int:
        """The number of the entry that is added next with it."""
        with self._mutex:
            return next(self._next_seq)

    def add(self, kind: Kind, step: int, body: Any, *, seq: int | None = None) -> Entry:
        """Append an entry; it survives the process when this returns, unless `catch_up` says otherwise.

        Metrics, which come often and are best effort, survive a kill but not a power cut.
        """
        entry = Entry(self.new_seq() if seq is None else seq, kind, step, body, parts={})
        self.save(entry)
        with self._mutex:
            self._entries[entry.seq] = entry
        return entry

    def save(self, entry: Entry) -> None:
        """Write down what has changed in an entry."""
        if self._closed:
            raise UploadError(f"The upload queue {self.directory} is closed.")
        try:
            data, waits = msgspec.json.encode(entry), entry.kind != "metrics"
            write_bytes_durably(self._path(entry.seq), data, mode=PRIVATE_FILE, waits_for_disk=waits)
        except OSError as error:
            with self._mutex:
                self._unwritten.add(entry.seq)
                self._refuse(error)

    def fail(self, entry: Entry, reason: str, *, auth: bool) -> None:
        """`entry` can't be delivered in this attempt; it stays for the next one."""
        entry.failure, entry.auth = reason, auth
        self.save(entry)

    def remove(self, entry: Entry) -> None:
        """`entry` was delivered, or is given up for good."""
        with self._mutex:
            if self._closed:
                raise UploadError(f"The upload queue {self.directory} is closed.")
            self._entries.pop(entry.seq, None)
            self._drop_file(entry.seq)
        if entry.kind == "checkpoint":
            self.release(entry.seq)

    def _drop_file(self, seq: int) -> None:
        try:
            self._path(seq).unlink(missing_ok=True)
        except OSError as error:
            self._unwritten.add(seq)
            self._refuse(error)

    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """The entries that wait, oldest first."""
        with self._mutex:
            return [entry for entry in self._entries.values() if kind in (None, entry.kind)]

    def head(self, kind: Kind) -> Entry | None:
        """The oldest entry of `kind` that can be tried."""
        return next((entry for entry in self.entries(kind) if entry.failure is None), None)

    def drop_oldest(self, kind: Kind, *, keep: int) -> int:
        """Remove the oldest entries of `kind` beyond the newest `keep`; returns how many these were."""
        waiting = self.entries(kind)
        oldest = waiting[: max(len(waiting) - keep, 0)]
        for entry in oldest:
            self.remove(entry)
        return len(oldest)

    def add_receipt(self, receipt: Receipt) -> None:
        """Remember a delivery beyond the life of its entry; the newest 1024 are kept."""
        self._receipts[receipt.key] = receipt
        try:
            write_bytes_durably(self._receipt_path(receipt.key), msgspec.json.encode(receipt), mode=PRIVATE_FILE)
        except OSError as error:
            self._refuse(error)

    def receipt(self, key: str) -> Receipt | None:
        """The receipt of that key, by whichever process of the run."""
        if key not in self._receipts:
            path = self._receipt_path(key)
            try:
                receipt = msgspec.json.decode(read_own(path, limit=LARGEST_DESCRIPTION_BYTES), type=Receipt)
            except FileNotFoundError:
                return None
            except (OSError, ValueError, RecursionError) as error:
                log.warning(
                    "the receipt %s cannot be read, so that what it is about may be sent again: %s", path, error
                )
                return None
            self._receipts[key] = receipt
        return self._receipts[key]

    def link_files(self, seq: int, main: Path, files: Iterable[Path]) -> Path:
        """A folder of hard links to `files`, for the entry `seq`; `remove` drops it.

        Retention deletes checkpoints whether they have arrived or not, and a link keeps the bytes at no cost. Files in
        the folder of `main` and below keep their layout.

        Raises:
            OSError: A file is missing, or the file system has no hard links, or is another one than the queue's.
        """
        folder = self.directory / LINKS / _name(seq)
        try:
            for file in dict.fromkeys(files):
                link = folder / layout_of(file, main)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(os.path.realpath(file), link)
        except OSError:
            self.release(seq)
            raise
        return folder

    def release(self, seq: int) -> None:
        """Drop the links of the entry `seq`."""
        shutil.rmtree(self.directory / LINKS / _name(seq), ignore_errors=True)

    def describe(self, description: Description) -> None:
        """Write down whose queue it is, for the next start and for commands; `read_description` gives it back."""
        data = msgspec.json.format(msgspec.json.encode(description, order="sorted")) + b"\n"
        write_bytes_durably(self.directory / ABOUT, data, mode=PRIVATE_FILE)

    def catch_up(self) -> OSError | None:
        """Write what the disk has refused so far; returns why that cannot be done, None where nothing is missing."""
        with self._mutex:
            if self._refusal is None or self._closed:
                return self._refusal
            waiting, self._unwritten, self._refusal = self._unwritten, set(), None
            for seq in waiting:
                if seq in self._entries:
                    self.save(self._entries[seq])
                else:
                    self._drop_file(seq)
            for key in [key for key in self._receipts if not self._receipt_path(key).exists()]:
                self.add_receipt(self._receipts[key])
            self._has_logged = self._refusal is not None
            return self._refusal

    def close(self) -> None:
        """Release the queue to other processes; what waits stays on disk."""
        if self._closed:
            return
        if (refusal := self.catch_up()) is not None:
            log.error("not all that waits in %s could be kept there: %s", self.directory, refusal.strerror)
        self._closed = True
        self._lock.release()

    def _path(self, seq: int) -> Path:
        return self.directory / f"{_name(seq)}.json"

    def _receipt_path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return self.directory / DELIVERED / f"{digest[:40]}.json"

    def _refuse(self, error: OSError) -> None:
        if not self._has_logged:
            self._has_logged = True
            log.error("the upload queue %s cannot be written: %s", self.directory, error.strerror)
        self._refusal = error

    def _sweep(self) -> None:
        """Remove what a killed process left half-written, and receipts beyond the newest."""
        delivered = self.directory / DELIVERED
        receipts = sorted(delivered.glob("*.json"), key=lambda path: path.lstat().st_mtime_ns)
        ours = [*self.directory.glob(f"{TEMPORARY_PREFIX}*.json-*"), *delivered.glob(f"{TEMPORARY_PREFIX}*.json-*")]
        for path in (*ours, *receipts[:-MAX_RECEIPTS]):
            path.unlink()

    def _drop_links(self) -> None:
        """Of a process that died before it added their entry."""
        links = self.directory / LINKS
        for name in os.listdir(links) if links.is_dir() else ():
            if not (name.isdecimal() and int(name) in self._entries):
                shutil.rmtree(links / name, ignore_errors=True)


def queue_of_run(directory: Path, run_id: str) -> Path:
    """The queue for a run's uploads: `directory`, or the first of ``uploads-2`` and so on that no other run waits in.

    Uploads of another run that failed stay where they are; nothing of them is sent under this run's name.
    """
    for number in count(1):
        place = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            other = read_description(place).run_id
        except UploadError:
            return place
        if other == run_id or not any(_entry_files(place)):
            return place
        log.warning(
            "%s holds uploads of run %r; those of %r go to the folder of the next number. `genlight uploads retry %s` "
            "delivers the others",
            *(place, other, run_id, shlex.quote(str(place))),
        )
    raise AssertionError("numbers have no end")


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
                entry.body = msgspec.convert(
                    entry.body, Artifact if entry.kind in ("checkpoint", "sample") else Message
                )
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
    """How many uploads wait in the queues of the run whose folder is `run`, by their names alone."""
    return sum(len(_entry_files(place)) for place in Path(run).glob(f"{QUEUE_DIRECTORY}*"))


def read_description(directory: str | os.PathLike[str]) -> Description:
    """Whose queue lies at `directory`.

    Raises:
        UploadError: There is no queue, or the description is damaged.
    """
    path = Path(directory) / ABOUT
    try:
        return msgspec.json.decode(read_own(path, limit=LARGEST_DESCRIPTION_BYTES), type=Description)
    except (OSError, ValueError, RecursionError) as error:
        raise UploadError(f"{directory} is not an upload queue: {path.name} cannot be read ({error}).") from error


def _entry_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*.json") if path.stem.isdecimal()]


def _name(seq: int) -> str:
    return f"{seq:09d}"
