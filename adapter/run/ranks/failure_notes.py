"""What went wrong on which rank first.

A rank that fails leaves a note in a folder of the run, and rank zero reports the oldest one: what broke on a rank is
seen by the others as a connection that closed, or as a collective that never ends.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from ...contract.exceptions import FailureCategory, RankFailed, StopReason, TrainingCanceled
from ...plumbing.durable import write_bytes_durably
from ...plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from ...plumbing.safe_open import make_directory, read_own
from ...plumbing.threads import started
from .presence import Presence

__all__ = ["LAUNCH_ID", "RankFailures", "launch_id", "watch_ranks"]

log = logging.getLogger(__name__)

FOLDER = ".ranks"
LAUNCH_ID = "GENLIGHT_LAUNCH_ID"
"""Where nothing else tells one launch from the next, what starts the ranks sets this, alike for all."""
LAUNCH = (
    LAUNCH_ID,
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
"""Variables that tell one launch from the next."""
RESTART = "TORCHELASTIC_RESTART_COUNT"
"""So does this one among processes of the same agent of torchrun; one that came later has counted fewer restarts."""
POLL_S = 0.1
PATIENCE_S = 2.0
"""How long rank zero, when it fails, waits to hear of a failure that came before its own."""
ACKNOWLEDGED_WITHIN_S = 15.0
LOOK_AGAIN_S = 60.0
"""How far apart rank zero looks which ranks there are."""
ASK_AGAIN_S = 1.0
"""How far apart it looks whether one of them is lost."""
LAUNCHED_WITHIN_S = 10.0
"""How much sooner than rank zero another rank of the same launch may have begun, and failed."""


LONGEST_NOTE_BYTES = 1 << 20


class Note(msgspec.Struct, frozen=True):
    """What a rank wrote down of its failure."""

    category: FailureCategory | StopReason
    text: str
    resumable: bool
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    rank: Annotated[int, msgspec.Meta(ge=0)]
    at_s: float
    """Seconds since 1970."""
    launch: str
    restart: str = ""

    def failure(self) -> Failure:
        """What rank zero reports of it."""
        text = self.text if self.exit_code == EXIT_STOPPED else f"{self.text} (rank {self.rank})"
        return Failure(self.category, text, self.resumable, self.exit_code)


class ChildProcess(Protocol):
    """A process of another rank."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...


class RankFailures:
    """Notes of failures, one file for each rank.

    Args:
        artifacts_dir: The run's folder, which all ranks share; where they don't, a failure is only seen by the
            connection that it closes.
        expects_ranks: Whether there are other ranks at all.
    """

    def __init__(self, artifacts_dir: Path, *, expects_ranks: bool) -> None:
        self.folder = artifacts_dir / FOLDER
        self.expects_ranks = expects_ranks
        self.children: Sequence[ChildProcess] = ()
        """Processes of other ranks that this one started."""
        self.presence = Presence(artifacts_dir)
        """Ranks that another launcher started."""
        self._began_s = 0.0
        self._told_of: set[str] = set()

    def note(self, rank: int, failure: Failure) -> None:
        """Leave word of a failure on this rank."""
        make_directory(self.folder)
        note = Note(**dataclasses.asdict(failure), rank=rank, at_s=time.time(), launch=launch_id(), restart=_restart())
        write_bytes_durably(self.folder / f"rank-{rank}.json", msgspec.json.encode(note), mode=0o600)

    def wait_until_reported(self) -> None:
        """Return when rank zero has reported what was noted, or does not seem to."""
        end = time.monotonic() + ACKNOWLEDGED_WITHIN_S
        while self.folder.exists() and time.monotonic() < end:
            time.sleep(POLL_S)

    def found(self) -> Failure | None:
        """The oldest failure that a rank noted; one that died without a word where none did."""
        notes = self._notes()
        if notes:
            return min(notes, key=lambda note: note.at_s).failure()
        for number, child in enumerate(self.children, start=1):
            code = child.poll()
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                text = f"train-step:RankFailed: rank {number} {how}"
                return Failure("train-step", text, resumable=False, exit_code=EXIT_FAILED)
        return None

    def first_cause(self, own: Failure, at_s: float) -> Failure:
        """What to report where rank zero failed at `at_s` (seconds since 1970): an older failure of another rank."""
        if not self.expects_ranks:
            return own
        lost = self.lost()
        if lost is not None:
            return dataclasses.replace(lost, resumable=own.resumable)
        end = time.monotonic() + PATIENCE_S
        while (other := self._before(at_s)) is None and time.monotonic() < end:
            time.sleep(POLL_S)
        return own if other is None else dataclasses.replace(other, resumable=own.resumable)

    def lost(self) -> Failure | None:
        """A rank of another launcher that was killed, or whose node was; the others fail because of that."""
        noted = {note.rank for note in self._notes()}
        for rank, host in self.presence.lost().items():
            if rank not in noted:
                how = "ended without a word: it was killed, or its node was lost"
                text = f"train-step:RankFailed: rank {rank} on {host} {how}"
                return Failure("train-step", text, resumable=False, exit_code=EXIT_FAILED)
        return None

    def _before(self, at_s: float) -> Failure | None:
        notes = self._notes()
        older = [note for note in notes if note.at_s < at_s]
        return None if notes and not older else self.found()

    def stop_reason(self) -> str | None:
        """Why another rank was told to stop before the ranks had met; None while none was."""
        failure = self.found() if self.folder.exists() else None
        return failure.category if failure is not None and failure.exit_code == EXIT_STOPPED else None

    def forget_earlier(self, began_s: float) -> None:
        """Leave out what an attempt noted that was killed; this one began at `began_s`, in seconds since 1970."""
        self._began_s = began_s

    def _notes(self) -> list[Note]:
        notes = filter(None, map(self._read, self.folder.glob("rank-*.json")))
        return [note for note in notes if note.launch == launch_id() and note.at_s >= self._since_s(note)]

    def _since_s(self, note: Note) -> float:
        is_surely_of_this_launch = note.restart == _restart() and note.launch
        return self._began_s - (LAUNCHED_WITHIN_S if is_surely_of_this_launch else 0.0)

    def _read(self, path: Path) -> Note | None:
        """A note; None, with a warning, for what no rank of ours can have written."""
        try:
            return msgspec.json.decode(read_own(path, limit=LONGEST_NOTE_BYTES), type=Note)
        except FileNotFoundError:  # cleared meanwhile
            return None
        except (OSError, ValueError, RecursionError) as error:
            if path.name not in self._told_of:
                self._told_of.add(path.name)
                why = error.strerror if isinstance(error, OSError) else error
                log.warning("%s is ignored: %s", path, why)
            return None

    def has_others(self) -> bool:
        """Whether other ranks are there, or were, as far as this one has seen."""
        return self.expects_ranks or any(self.presence.folder.glob("rank-*"))

    def clear(self) -> None:
        """Remove all notes, which also tells the ranks that theirs was read."""
        shutil.rmtree(self.presence.folder, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _have_joined() -> bool:
    """Whether all ranks have met, so that each is there to be seen."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def launch_id() -> str:
    """What ranks of one launch have in common, and no two launches; empty where rank zero starts the others."""
    return " ".join(f"{name}={os.environ[name]}" for name in LAUNCH if name in os.environ)


def _restart() -> str:
    return os.environ.get(RESTART, "")


def watch_ranks(failures: RankFailures, end: Callable[[BaseException, Failure], None]) -> Callable[[], None]:
    """Call `end`, in a thread, once another rank has failed; returns what stops the watch."""
    stopped = threading.Event()

    def watch() -> None:
        looks_again_s = asks_again_s = 0.0
        while not stopped.wait(POLL_S):
            if _have_joined() and time.monotonic() >= looks_again_s:
                failures.presence.look()
                looks_again_s = time.monotonic() + LOOK_AGAIN_S
            failure = failures.found()
            if failure is None and time.monotonic() >= asks_again_s:
                failure = failures.lost()
                asks_again_s = time.monotonic() + ASK_AGAIN_S
            if failure is not None:
                stopped_there = failure.exit_code == EXIT_STOPPED
                end(TrainingCanceled(failure.category) if stopped_there else RankFailed(failure.text), failure)
                return

    started(threading.Thread(target=watch, name="genlight-ranks", daemon=True))
    return stopped.set
