"""Where a request to stop can come from, without torch: a flag, a file, a limit, signals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from ...adapter.contract.exceptions import StopReason, TrainingCanceled
from ...adapter.contract.run_state import RunState
from ...adapter.plumbing.safe_open import open_regular
from .signals import StopSignals, job_end_time_s

__all__ = ["Deadline", "StopSources", "cancel_file_is_set", "process_age_s"]

_NO = frozenset({b"0", b"false", b"f", b"no", b"n", b"off"})
_LONGEST_WORD = 64
"""Bytes, blanks included, that a cancel file with a word of `_NO` may have."""

SAVE_MARGIN = 1.5
"""How much longer than the longest one so far the last save may take."""
UNMEASURED_SHARE, UNMEASURED_MOST_S = 0.05, 30.0
"""The assumed duration of the first save: a share of the whole time, and a bound on it."""
_FORGETTING = 0.99
"""How much of the longest time stays at each check: one slow step at the start must not cost hours at the end."""


class Deadline:
    """When a run must have ended, and how long before that it has to stop for its last checkpoint.

    Args:
        max_runtime_s: Limit in seconds since the run began; None means no limit.
        age_s: How long ago the run began; None takes the start of the process.
    """

    def __init__(self, max_runtime_s: float | None = None, *, age_s: float | None = None) -> None:
        now, ends_at_s = time.monotonic(), job_end_time_s()
        self._limit_s = max_runtime_s
        ends = [now - (process_age_s() if age_s is None else age_s) + max_runtime_s] if max_runtime_s else []
        ends += [now + ends_at_s - time.time()] if ends_at_s is not None else []
        self.at = min(ends, default=None)
        """On the clock of ``time.monotonic``; None means no limit."""
        self.saves = False
        """Whether a stop saves a checkpoint, for which time must be left."""
        self.save_s: float | None = None
        """The longest save so far; None while there was none."""
        self._unmeasured_s = 0.0 if self.at is None else min(UNMEASURED_SHARE * (self.at - now), UNMEASURED_MOST_S)
        self._looked_at: float | None = None
        self._gap_s = 0.0

    @property
    def margin_s(self) -> float:
        """How long before the end to stop: a save, the time to the next look, and as much until the ranks agree."""
        if not self.saves:
            return 0.0
        save_s = self._unmeasured_s if self.save_s is None else SAVE_MARGIN * self.save_s
        return max(save_s, 0.0) + 2 * self._gap_s

    @property
    def stop_s(self) -> float:
        """How long a stop takes from the signal until its checkpoint is saved, by the longest of both so far."""
        return self._gap_s + (self.save_s or 0.0)

    def is_over(self, now: float) -> bool:
        """Whether to stop at `now`, on the clock of ``time.monotonic``."""
        return self.at is not None and now + self.margin_s >= self.at

    def begin_training(self, *, saves: bool) -> None:
        """From now on `note_look` is called about once a step, and a stop saves a checkpoint or does not."""
        self.saves, self._looked_at = saves, None

    def note_look(self, now: float) -> None:
        """A stop that is due would be noticed at `now`, and not again before the next call."""
        if self._looked_at is not None:
            self._gap_s = max(now - self._looked_at, _FORGETTING * self._gap_s)
        self._looked_at = now

    def include(self, other: Deadline) -> None:
        """End as soon as either of the two; the same limit counts as this one does, which knows when the run began."""
        if other._limit_s and other._limit_s == self._limit_s:
            return
        if self.at is None or (other.at is not None and other.at < self.at):
            self.at, self._unmeasured_s = other.at, other._unmeasured_s


class StopSources:
    """Everything that can ask one run to stop, shared by all that look: its preparation, its callback, its command.

    Args:
        cancel_file: A file that asks for a stop as soon as it is there; see `cancel_file_is_set`.
        max_runtime_s: Limit in seconds since the run began; None means no limit.
        age_s: How long ago that was; None takes the start of the process.
        canceled: Whether the run is cancelled before it starts.
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
        """Where the ranks agree on a stop, once they train."""
        self._checks: list[Callable[[], str | None]] = []

    def add_check(self, check: Callable[[], str | None]) -> None:
        """Also stop when `check` returns a reason."""
        self._checks.append(check)

    def include(self, other: StopSources) -> None:
        """Stop for what `other` says as well; signals are those of this object."""
        self.canceled = self.canceled or other.canceled
        self.cancel_files += [path for path in other.cancel_files if path not in self.cancel_files]
        self.deadline.include(other.deadline)
        self._checks += [check for check in other._checks if check not in self._checks]

    @property
    def requested(self) -> StopReason | None:
        """Why to stop, by the flag and the signals of this process; looks at no file and no clock."""
        return "canceled" if self.canceled else self.signals.reason

    def reason(self) -> StopReason | None:
        """Why to stop, by all sources; None where none asks for it."""
        if self.requested is not None:
            return self.requested
        if self.deadline.is_over(time.monotonic()):
            return "timeout"
        if any(cancel_file_is_set(path) for path in self.cancel_files):
            return "canceled"
        for check in self._checks:
            found = check()
            if found is not None:
                return cast("StopReason", found) if found in get_args(StopReason) else "canceled"
        return None

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks stop together, so that none needs a notice."""
        return self.run_state is not None and self.run_state.stop_reason is not None

    def is_stopping(self) -> bool:
        """Whether this rank or another one was asked to stop."""
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
    """Whether `path` asks for a stop: it exists, unless its text is a word that means no (0, false, f, no, n, off).

    A file that cannot be read counts too, and so does anything but a regular file, such as a pipe.
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
    """Seconds since this process was started, imports included."""
    with open("/proc/self/stat") as stat:
        # The second field is the command in parentheses and may hold blanks; starttime is the 22nd.
        started_ticks = int(stat.read().rpartition(")")[2].split()[19])
    # Not /proc/uptime: in some containers that counts from the container's start, starttime from the machine's.
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
