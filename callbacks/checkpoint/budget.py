"""Decides by the clock when a save is due: after a fixed period, or after an interval that follows from a budget.

A budget limits how much training a crash may lose, and for which share of the time saves may stall training. A save
stalls training while the tensors are copied, and is durable some time later. The costliest crash comes just before a
save is durable: it loses the interval and the time since this save began. Every save is measured, for how long it
stalls training and when it is durable; the slowest recent saves count.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..hook.cadence import Pace, suppressed

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..hook.hook import Hook

log = logging.getLogger(__name__)

FIRST_INTERVAL_S = 10.0
"""Seconds until the first save, from which the budget learns what a save costs; less if the budget is smaller."""
_FADES = 0.9
"""Factor on a measured time at each later save, so that one slow save does not count forever."""
_LOOK_EVERY_S = 1.0
"""Seconds between readings of the clock, at the pace of the last steps."""
_CHANGED = 1.25
"""Factor by which the interval must change to be reported again."""


Level: TypeAlias = Literal["ok", "warn"]
DURATION = r"(\d+(?:\.\d+)?) ?(s|min|h)"
"""Pattern of a time such as ``60s``, ``1.5min`` or ``2h``."""


def seconds_of(text: str) -> float:
    """Return the seconds of a time that matches `DURATION`.

    Raises:
        ValueError: It does not match.
    """
    if (found := re.fullmatch(DURATION, text)) is None:
        raise ValueError(
            f'Invalid `lose_at_most`. Expected a time such as "60s", "5min" or "1h", but received {text!r}.'
        )
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]]


@dataclass
class Budget:
    """The interval between saves, from the times that saves have taken in this run.

    Args:
        lose_at_most_s: Most seconds of training that a crash may cost; infinite without this limit.
        pay_at_most: Largest share of the time in which saves stall training; 1 without this limit.
    """

    lose_at_most_s: float = math.inf
    pay_at_most: float = 1.0
    stall_s: float = 0.0
    """Seconds for which a save stops training."""
    durable_s: float = 0.0
    """Seconds from the start of a save until it is durable; 0 before the first."""
    _reported_s: float = field(default=0.0, repr=False)

    @property
    def interval_s(self) -> float:
        """Seconds between the starts of two saves.

        The longest interval is `lose_at_most` minus the time until a save is durable. Without `pay_at_most`, that is
        the interval. With `pay_at_most`, it is the shortest interval at which saves stall training for at most that
        share, but no more than the longest. It is never shorter than the time until a save is durable.
        """
        if not self.durable_s:
            return min(FIRST_INTERVAL_S, self.lose_at_most_s / 2)
        longest_s = max(self.lose_at_most_s - self.durable_s, 0.0)
        paid_s = self.stall_s / self.pay_at_most if self.pay_at_most < 1 else longest_s
        return max(min(paid_s, longest_s), self.durable_s)

    def note_stall(self, seconds: float) -> None:
        """Note how long a save has stopped training."""
        self.stall_s = max(seconds, _FADES * self.stall_s)

    def note_durable(self, seconds: float) -> tuple[Level, str] | None:
        """Note how long a save took until it was durable.

        Returns:
            If the interval has changed since the last report: whether the budget is kept, and the figures in words.
        """
        self.durable_s = max(seconds, _FADES * self.durable_s)
        interval_s = self.interval_s
        if self._reported_s and 1 / _CHANGED < interval_s / self._reported_s < _CHANGED:
            return None
        self._reported_s = interval_s
        faults = []
        if interval_s + self.durable_s > self.lose_at_most_s:
            faults.append(f"`lose_at_most` {self.lose_at_most_s:.3g} s cannot be kept")
        if self.stall_s > self.pay_at_most * interval_s:
            faults.append(f"`pay_at_most` {self.pay_at_most:.3g} cannot be kept")
        text = "; ".join([*faults, f"a checkpoint is saved every {self}"])
        log.log(logging.WARNING if faults else logging.INFO, text)
        return "warn" if faults else "ok", text

    def __str__(self) -> str:
        """Return in words what this interval costs, and what half and twice this interval would cost."""
        intervals = [self.interval_s * factor for factor in (1, 0.5, 2)]
        costs = [
            f"{interval_s:.3g} s loses at most {interval_s + self.durable_s:.3g} s and stalls for "
            f"{100 * self.stall_s / interval_s:.2g} % of the time"
            for interval_s in intervals
        ]
        return "; ".join(costs)

    def state_dict(self) -> dict[str, Any]:
        """Return the measured times."""
        return {"stall_s": self.stall_s, "durable_s": self.durable_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the measured times of an earlier attempt."""
        self.stall_s, self.durable_s = float(state["stall_s"]), float(state["durable_s"])


class SaveClock:
    """Decides whether a save is due by the clock. Rank zero decides for all; all ranks check in the same steps.

    Args:
        every_minutes: Minutes between saves, counted from now.
        step: Training begins after this step.
        budget: Decides the time between saves in place of `every_minutes`.
    """

    def __init__(self, every_minutes: float, step: int, budget: Budget | None = None) -> None:
        self._every_s = 60 * every_minutes
        self._budget = budget
        self._pace = Pace(_LOOK_EVERY_S)
        self.rewind(step)
        self.note_save()

    def rewind(self, step: int) -> None:
        """Continue from `step`, to which the run was put back."""
        self._next_look = step + 1

    def note_save(self) -> None:
        """Restart the interval: a save begins, for any reason."""
        self._saved_s = time.monotonic()

    def is_due(self, hook: Hook, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Whether `hook` must save after this step, the same on all ranks; sets its ``next_due_step``."""
        step, is_due = trainer.global_step, False
        if step >= self._next_look and not suppressed(pl_module):
            every_s = self._every_s if self._budget is None else self._budget.interval_s
            answer = time.monotonic() - self._saved_s >= every_s, self._pace.next_look(step)
            is_due, self._next_look = trainer.strategy.broadcast(answer) if trainer.world_size > 1 else answer
        hook.next_due_step = min(hook.next_due_step, self._next_look)
        return is_due
