"""Which rung follows a fault: plain numbers, the same on all ranks, that a checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, cast, get_args

__all__ = ["RUNGS", "Attempt", "Ladder", "Rung"]

Rung = Literal["skip", "lower_lr", "roll_back"]
RUNGS: Final[tuple[Rung, ...]] = get_args(Rung)


@dataclass(frozen=True)
class Attempt:
    """One rung that was taken."""

    number: int
    """From 1, within its incident."""
    rung: Rung
    step: int
    """The step in which the fault was found."""
    fault: str
    """The finding, in words."""


class Ladder:
    """Climbs a rung with each fault, and begins again at the bottom when an incident is over.

    An incident begins with a fault and is over once `good_steps` steps have been trained beyond the furthest step in
    which it showed; a roll-back has to come that far again first. So a run that meets the same fault again and again
    climbs, and cannot go in circles.

    Args:
        rungs: From the bottom; the last one is taken again where attempts are left.
        max_attempts: How many rungs an incident may take.
        good_steps: How many steps without a fault end it.
    """

    def __init__(self, rungs: Sequence[Rung], max_attempts: int, good_steps: int) -> None:
        self.rungs = tuple(rungs)
        self.max_attempts = max_attempts
        self.good_steps = good_steps
        self.attempts: list[Attempt] = []
        """Of the incident that is not over."""
        self.taken: Counter[str] = Counter()
        """How often each rung was taken, in all incidents."""
        self.first_step = 0
        """The earliest step in which the incident showed."""
        self.ends_at = 0
        """The step after which the incident is over, if no fault comes."""

    def climb(self, step: int, fault: str) -> Attempt | None:
        """The rung for a fault, in words, of `step`; None once all attempts are used up."""
        if len(self.attempts) >= self.max_attempts:
            return None
        self.first_step = min(self.first_step, step) if self.attempts else step
        self.ends_at = max(step + self.good_steps, self.ends_at if self.attempts else 0)
        number = len(self.attempts) + 1
        attempt = Attempt(number, self.rungs[min(number, len(self.rungs)) - 1], step, fault)
        self.attempts.append(attempt)
        self.taken[attempt.rung] += 1
        return attempt

    def hold_until(self, step: int) -> None:
        """Have the incident last for `good_steps` beyond `step` at least."""
        self.ends_at = max(self.ends_at, step + self.good_steps)

    def good_step(self, step: int) -> tuple[Attempt, ...]:
        """Count a step without a fault; the attempts of the incident that it ends, if it ends one."""
        if not self.attempts or step < self.ends_at:
            return ()
        over, self.attempts = tuple(self.attempts), []
        return over

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`: plain data."""
        return {
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "taken": dict(self.taken),
            "first_step": self.first_step,
            "ends_at": self.ends_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds."""
        self.attempts = [Attempt(**saved) for saved in state["attempts"]]
        self.taken = Counter(cast("Mapping[str, int]", state["taken"]))
        self.first_step, self.ends_at = state["first_step"], state["ends_at"]
