"""Sources of stop requests: a flag, a file, a time limit, signals. Does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from ...adapter.contract.exceptions import StopReason, TrainingCanceled
from ...adapter.contract.types import RunState
from ...adapter.plumbing.safe_open import open_regular
from .launcher import job_end_time_s
from .signals import StopSignals

_NO = frozenset({b"0", b"false", b"f", b"no", b"n", b"off"})
_LONGEST_WORD = 64
"""Maximum bytes, blanks included, of a cancel file with a word of `_NO`."""

SAVE_MARGIN = 1.5
"""The time reserved for the last save is this many times the longest save so far."""
UNMEASURED_SHARE, UNMEASURED_MOST_S = 0.05, 30.0
"""Assumed duration of a save before the first was measured: this share of the time until the end, at most this many
seconds."""
_DECAY = 0.99
"""Each check multiplies the longest gap between checks by this, so that one slow step at the start does not end the run
hours too early."""


class Deadline:
    """The time at which a run must have ended, and the time that its last checkpoint needs before that.

    Args:
        max_runtime_s: Limit in seconds since the run began; None means no limit.
        age_s: Seconds since the run began; None counts from the start of the process.
    """

    def __init__(self, max_runtime_s: float | None = None, *, age_s: float | None = None) -> None:
        now, ends_at_s = time.monotonic(), job_end_time_s()
        self._limit_s = max_runtime_s
        ends = [now - (process_age_s() if age_s is None else age_s) + max_runtime_s] if max_runtime_s else []
        ends += [now + ends_at_s - time.time()] if ends_at_s is not None else []
        self.at = min(ends, default=None)
        """End time on the clock of ``time.monotonic``; None means no limit."""
        self.saves = False
        """Whether a stop saves a checkpoint, so that time must be reserved for it."""
        self.save_s: float | None = None
        """Duration of the longest save so far; None before the first."""
        self._unmeasured_s = 0.0 if self.at is None else min(UNMEASURED_SHARE * (self.at - now), UNMEASURED_MOST_S)
        self._checked_at: float | None = None
        self._gap_s = 0.0

    @property
    def margin_s(self) -> float:
        """Seconds before the end at which to stop: time for a save, for the next check, and for the ranks to agree."""
        if not self.saves:
            return 0.0
        save_s = self._unmeasured_s if self.save_s is None else SAVE_MARGIN * self.save_s
        return max(save_s, 0.0) + 2 * self._gap_s

    @property
    def stop_s(self) -> float:
        """Seconds from a stop signal until its checkpoint is saved, from the longest step and save so far."""
        return self._gap_s + (self.save_s or 0.0)

    def is_over(self, now: float) -> bool:
        """Return whether to stop at `now`, on the clock of ``time.monotonic``."""
        return self.at is not None and now + self.margin_s >= self.at

    def begin_training(self, *, saves: bool) -> None:
        """Start to measure the gaps between checks. `saves` tells whether a stop saves a checkpoint."""
        self.saves, self._checked_at = saves, None

    def note_check(self, now: float) -> None:
        """Record a check at `now`, to learn how long a stop that is due may stay unnoticed between two checks."""
        if self._checked_at is not None:
            self._gap_s = max(now - self._checked_at, _DECAY * self._gap_s)
        self._checked_at = now

    def include(self, other: Deadline) -> None:
        """End at the earlier of the two times.

        If `other` has the same limit, ignore it: this deadline counts from the start of the run, `other` perhaps not.
        """
        if other._limit_s and other._limit_s == self._limit_s:
            return
        if self.at is None or (other.at is not None and other.at < self.at):
            self.at, self._unmeasured_s = other.at, other._unmeasured_s


class StopSources:
    """All sources of stop requests for one run, shared by its command, its preparation and its `StopRequests` callback.

    Args:
        cancel_file: A file that asks for a stop as soon as it exists; see `cancel_file_is_set`.
        max_runtime_s: Limit in seconds since the run began; None means no limit.
        age_s: Seconds since the run began; None counts from the start of the process.
        canceled: Whether the run is canceled before it starts.
        signals: Stop signals of this process; None makes an object that handles none yet.
    """

    def __init__(
        self,
        cancel_file: str | os.PathLike[str] | None = None,
        *,
        max_runtime_s: float | None = None,
        age_s: float | None = None,
        canceled: bool = False,
        signals: StopSignals | None = None,
    ) -> None:
        self.signals = signals or StopSignals()
        self.canceled = canceled
        self.cancel_files = [] if cancel_file is None else [Path(cancel_file)]
        self.deadline = Deadline(max_runtime_s, age_s=age_s)
        self.run_state: RunState | None = None
        """State in which the ranks record the stop that they agreed on; None before training."""
        self._checks: list[Callable[[], str | None]] = []

    def add_check(self, check: Callable[[], str | None]) -> None:
        """Also stop when `check` returns a reason."""
        self._checks.append(check)

    def include(self, other: StopSources) -> None:
        """Also stop for the sources of `other`, except for its signals."""
        self.canceled = self.canceled or other.canceled
        self.cancel_files += [path for path in other.cancel_files if path not in self.cancel_files]
        self.deadline.include(other.deadline)
        self._checks += [check for check in other._checks if check not in self._checks]

    @property
    def requested(self) -> StopReason | None:
        """Reason to stop from the flag and the signals of this process; checks no file and no clock."""
        return "canceled" if self.canceled else self.signals.reason

    def reason(self) -> StopReason | None:
        """Return the reason to stop from all sources; None if there is none."""
        if self.requested is not None:
            return self.requested
        if self.deadline.is_over(time.monotonic()):
            return "timeout"
        if any(cancel_file_is_set(path) for path in self.cancel_files):
            return "canceled"
        for check in self._checks:
            reason = check()
            if reason is not None:
                return cast("StopReason", reason) if reason in get_args(StopReason) else "canceled"
        return None

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have agreed to stop, so that no rank needs to tell another about it."""
        return self.run_state is not None and self.run_state.stop_reason is not None

    def is_stopping(self) -> bool:
        """Return whether there is a stop request to this rank or another."""
        return self.is_agreed or self.reason() is not None

    def raise_if_signalled(self) -> None:
        """Raise `TrainingCanceled` if a stop signal has come."""
        if self.signals.reason is not None:
            raise TrainingCanceled(self.signals.reason)

    def raise_if_stopped(self) -> None:
        """Raise `TrainingCanceled` if any source asks for a stop."""
        reason = self.reason()
        if reason is not None:
            raise TrainingCanceled(reason)


def cancel_file_is_set(path: Path) -> bool:
    """Return whether `path` asks for a stop: it exists, and is not a word for no (0, false, f, no, n, off).

    An unreadable file also asks for a stop, and so does any file that is not regular, such as a pipe.
    """
    try:
        with open(open_regular(path), "rb") as file:
            text = file.read(_LONGEST_WORD + 1)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return len(text) > _LONGEST_WORD or text.strip().lower() not in _NO


def process_age_s() -> float:
    """Return the seconds since this process started, imports included."""
    with open("/proc/self/stat") as stat:
        # The second field is the command in parentheses and may hold blanks; starttime is the 22nd.
        started_ticks = int(stat.read().rpartition(")")[2].split()[19])
    # In some containers /proc/uptime counts from the start of the container, but starttime from that of the machine.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
