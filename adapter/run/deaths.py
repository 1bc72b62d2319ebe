"""Count the attempts of a run that were killed in the same step, to end a run that would be killed there again.

Each rank notes the step in progress in a small file that is mapped into memory, so a step pays for no system call, and
the kernel keeps the note of a killed process. The next attempt reads the notes, before it overwrites them.

From the choice of its checkpoint to its first step, an attempt has one note of rank zero instead. This note also lists
the deaths that rank zero has read, for ranks of the same launch that read later.

An attempt that ends by itself removes these notes: a mistake in code or input does not count, and neither does a stop.
An attempt that ends because a rank was lost keeps them, and notes which rank that was.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ..cluster.job_context import host_name
from ..contract.exceptions import RankFailedError
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE, open_own, read_own
from .rank_files import LAUNCH, RESTART

log = logging.getLogger(__name__)

_Note = TypeVar("_Note")

FOLDER = ".deaths"
DEATH = "GENLIGHT_DEATH"
"""Variable that a supervisor sets: the rank that died in the attempt before, and its exit code, as ``RANK CODE``."""
MOST_AT_A_STEP = 2
"""Number of deaths in one step, from one checkpoint, after which an attempt begins at the checkpoint before it."""
MOST_AT_THE_START = 4
"""The same before the first step; more, because a machine that shuts down often kills an attempt there."""
_AGAIN = "attempts in a row were killed"
_TOKEN = "GENLIGHT_START"  # noqa: S105 - identifies a start for the ranks that rank zero starts
_BEGINNING = "begun.json"
_END = "end.txt"
_NUMBERS = struct.Struct("<5q")
_SIZE = 4096
_MOST_WORDS = 400
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class RepeatedDeathError(RankFailedError):
    """Attempts of a run were killed in the same step again and again, so no further one is made."""


class Death(msgspec.Struct, frozen=True):
    """An attempt that was killed, and the step in which that happened."""

    step: int
    """The step in progress; 0 before the first step of the attempt."""
    epoch: int
    batch: int
    """Index of its batch in the epoch."""
    record: int
    """Step of the checkpoint from which the attempt had continued; 0 without one."""
    went_back: bool
    """Whether it had begun at the checkpoint before the newest, because of earlier deaths."""
    job: str
    """Digest of the job."""
    host: str
    rank: int = -1
    """The rank that died; -1 if that is unknown."""
    how: str = ""
    """How it died, in words; empty if that is unknown."""
    rows: str = ""
    """The batch, in words; empty until it has come a second time."""

    @property
    def where(self) -> tuple[int, int, int]:
        """The place in the training: step, epoch and batch."""
        return self.step, self.epoch, self.batch


class _Facts(msgspec.Struct, frozen=True):
    """The part of a rank's note that does not change in each step."""

    job: str
    host: str
    oom_kills: int
    rows: str = ""


class _Beginning(msgspec.Struct, frozen=True):
    """The note of an attempt that has not begun its first step."""

    launch: tuple[str, str]
    """The result of `_launch` on rank zero."""
    attempt: Death
    """The death that counts if the attempt is killed."""
    before: list[Death]
    """The deaths that `repeated_deaths` returned on rank zero."""


class StepNote:
    """The note of this rank about the step in progress.

    Args:
        folder: The run's folder.
        rank: This rank.
        job: Digest of the job.
        record: Step of the checkpoint from which this attempt continues.
        went_back: As in `Death`.
    """

    def __init__(self, folder: Path, rank: int, *, job: str, record: int, went_back: bool) -> None:
        make_directory(folder / FOLDER)
        self._facts = _Facts(job, host_name(), _oom_kills())
        descriptor = open_own(folder / FOLDER / f"rank-{rank}", os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._file = mmap.mmap(descriptor, _SIZE)
            self._file[: _NUMBERS.size] = bytes(_NUMBERS.size)
            self.name_rows("")
        finally:
            os.close(descriptor)
        self._constant = record, int(went_back)
        self._beginning = folder / FOLDER / _BEGINNING if rank == 0 else None

    def name_rows(self, rows: str) -> None:
        """Note the batch that comes next, in words."""
        facts = msgspec.json.encode(msgspec.structs.replace(self._facts, rows=rows[:_MOST_WORDS]))
        self._file[_NUMBERS.size :] = facts.rjust(_SIZE - _NUMBERS.size)

    def begin(self, step: int, epoch: int, batch: int) -> None:
        """Note that a step begins."""
        _NUMBERS.pack_into(self._file, 0, step, epoch, batch, *self._constant)
        if self._beginning is not None:
            self._beginning.unlink(missing_ok=True)
            self._beginning = None


def begin_attempt(
    folder: Path, record: int, deaths: Sequence[Death], *, job: str, went_back: bool, held: contextlib.ExitStack
) -> None:
    """Note on rank zero that an attempt begins. From then on it counts as killed unless its end is noted.

    Args:
        folder: The run's folder.
        record: As in `StepNote`.
        deaths: The deaths before this attempt.
        job: Digest of the job.
        went_back: As in `Death`.
        held: Contexts that are left when the attempt ends.
    """
    os.environ[_TOKEN] = secrets.token_hex(8)
    held.callback(os.environ.pop, _TOKEN, None)
    attempt = Death(0, 0, 0, record, went_back, job, host_name())
    note = msgspec.json.encode(_Beginning(_launch(), attempt, list(deaths)))
    path = folder / FOLDER / _BEGINNING
    try:
        make_directory(path.parent)
        write_bytes_durably(path, note, mode=PRIVATE_FILE, waits_for_disk=False)
        path.with_name(_END).unlink(missing_ok=True)
    except OSError as error:
        log.warning("a repeated death before the first step would not be noticed: %s", error)


def forget_beginning(folder: Path) -> None:
    """Remove the note of an attempt that ended by itself and left no event: it must not count as killed."""
    (folder / FOLDER / _BEGINNING).unlink(missing_ok=True)


def note_end(folder: Path, failure: str) -> None:
    """Note on rank zero how an attempt failed. If no rank was lost, remove all notes: no death counts any more.

    Args:
        folder: The run's folder.
        failure: The text of the failure.
    """
    if RankFailedError.__name__ not in failure:
        forget_deaths(folder)
    elif (folder / FOLDER).exists():
        write_bytes_durably(folder / FOLDER / _END, failure.encode(), mode=PRIVATE_FILE)


def _launch() -> tuple[str, str]:
    """Return two identifiers of this start of all ranks: from the launcher, and from rank zero if it starts the others.

    Ranks belong to one start if either identifier agrees. Without a launcher the first may differ, because Lightning
    sets some of a launcher's variables for the ranks that it starts.
    """
    values = [os.environ.get(name, "") for name in (*LAUNCH, RESTART)]
    return ":".join(values) if any(values) else "", os.environ.get(_TOKEN, "")


def repeated_deaths(folder: Path, job: str) -> list[Death]:
    """Return the last attempts of a run, oldest first, if they were killed in the same step; empty after another end.

    Attempts that were killed before their first step count as well. Every rank gets the same result until all ranks
    have met and `note_deaths` is called.

    Args:
        folder: The run's folder.
        job: Digest of the job. Deaths of another job do not count.
    """
    folder, notes = folder / FOLDER, dict[int, Death]()
    begun = _read(folder / _BEGINNING, _Beginning)
    if begun is not None and begun.attempt.job == job:
        if any(own and own == other for own, other in zip(_launch(), begun.launch, strict=True)):
            return begun.before
        rank, how = _cause(folder)
        last = msgspec.structs.replace(begun.attempt, rank=rank, how=how)
        return [*(death for death in begun.before if (death.where, death.job) == (last.where, last.job)), last]
    for path in sorted(folder.glob("rank-*")):
        with contextlib.suppress(OSError, ValueError, struct.error):  # torn by a power cut, or not ours
            data = read_own(path, limit=_SIZE)
            step, epoch, batch, record, went_back = _NUMBERS.unpack_from(data)
            facts = msgspec.json.decode(data[_NUMBERS.size :].strip(b"\0 "), type=_Facts)
            rank = int(path.name.removeprefix("rank-"))
            is_full = facts.host == host_name() and 0 <= facts.oom_kills < _oom_kills()
            how = "the kernel killed it because memory was full" * is_full
            if step and facts.job == job:
                place = (step, epoch, batch, record, bool(went_back))
                notes[rank] = Death(*place, facts.job, facts.host, -1, how, facts.rows)
    if not notes:
        return []
    rank, how = _cause(folder)
    last = notes.get(rank, notes[min(notes)])
    last = msgspec.structs.replace(last, rank=rank if len(notes) > 1 else min(notes), how=last.how or how)
    before = _read(folder / "deaths.json", list[Death])
    return [*(death for death in before or () if (death.where, death.job) == (last.where, last.job)), last]


def note_deaths(folder: Path, deaths: Sequence[Death]) -> None:
    """Keep the deaths of earlier attempts for later ones. Call it on rank zero, once all ranks have met."""
    path = folder / FOLDER / "deaths.json"
    if deaths or path.exists():
        make_directory(path.parent)
        write_bytes_durably(path, msgspec.json.encode(deaths), mode=PRIVATE_FILE)


def forget_deaths(folder: Path) -> None:
    """Remove all notes: after a completed run, a fresh start, or a failure without a lost rank no death counts."""
    for path in (folder / FOLDER).glob("*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / FOLDER).rmdir()


def describe_deaths(deaths: Sequence[Death]) -> str:
    """Return a sentence with everything that deaths in the same step have in common."""
    last = deaths[-1]
    *most, newest = dict.fromkeys(str(death.record) for death in deaths)
    records = f"{', '.join(most)} and {newest}" if most else newest
    ranks, hosts, ways = ({getattr(death, name) for death in deaths} for name in ("rank", "host", "how"))
    who = f"rank {last.rank}" if len(ranks) == 1 and last.rank >= 0 else "not always the same rank"
    host = f"on {last.host}" if len(hosts) == 1 else "on several hosts"
    how = (last.how or "nothing recorded how") if len(ways) == 1 else f"the last time: {last.how or 'unknown'}"
    step = f"in step {last.step}, in batch {last.batch} of epoch {last.epoch}"
    place = step if last.step else "before their first step"
    rows = f"; its batch: {last.rows}" if last.rows else ""
    return f"{len(deaths)} {_AGAIN} {place}, from the checkpoints of step {records}: {who} {host} ({how}){rows}"


def _cause(folder: Path) -> tuple[int, str]:
    """Return the rank that died, or -1, and how, from the supervisor or the note of the end."""
    if DEATH in os.environ:
        rank, code = map(int, os.environ[DEATH].split())
        return rank, f"signal {-code}"
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = read_own(folder / _END, limit=1 << 20).decode().partition(f"{RankFailedError.__name__}: ")[2]
    words = text.split()
    rank = int(words[1]) if words[:1] == ["rank"] and words[1].isdigit() else -1
    return rank, text


def _read(path: Path, of: type[_Note]) -> _Note | None:
    try:
        return msgspec.json.decode(read_own(path, limit=1 << 20), type=of)
    except (OSError, ValueError, RecursionError):
        return None


def _oom_kills() -> int:
    """Return how many processes of this container the kernel has killed because memory was full; -1 if unknown."""
    for name in _OOM_COUNTERS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = Path(name).read_text(encoding="utf-8").split()
            return int(dict(zip(lines[::2], lines[1::2], strict=True))["oom_kill"])
    return -1
