"""When a periodic action is due."""

from __future__ import annotations

import math
import numbers
import sys
import time
from typing import Any

from ...adapter.plumbing.text import require

NEVER = sys.maxsize
"""Value of `next_due_step` for a hook that need not be called after any step."""


def step_cadence(name: str, every: Any) -> int:
    """Return the argument `name` of a hook, the number of steps between its actions; 0 turns it off.

    Raises:
        ValueError: It is not a whole number >= 0.
    """
    is_whole = isinstance(every, numbers.Integral) and not isinstance(every, bool)
    if not (is_whole and every >= 0):
        expected = "a number" if is_whole else "a whole number"
        raise ValueError(f"Invalid `{name}`. Expected {expected} >= 0, but received {every!r}.")
    return int(every)


def positive(name: str, value: float) -> float:
    """Return the argument `name` of a hook, a time or a factor.

    Raises:
        ValueError: It is not a finite number > 0.
    """
    require((0 < value < math.inf, name, "a number > 0", value))
    return value


class Boundaries:
    """Tells a hook when training passes a boundary, a multiple of the hook's cadence, so that it acts once at each.

    Args:
        hook: `crosses` sets its ``next_due_step`` to the next boundary.
        step: The step that was completed last; boundaries up to it do not count.
        every: The cadence in steps; None means the hook's own ``every_n_steps``.
    """

    def __init__(self, hook: Any, step: int = 0, *, every: int | None = None) -> None:
        self._hook, self._step, self._every = hook, step, every

    def rewind(self, step: int) -> None:
        """Count the boundaries after `step` again, because the run was rolled back to it."""
        self._step = step

    def crosses(self, step: int) -> bool:
        """Whether there is a boundary after the step of the last call, up to and including `step`."""
        is_due = self.will_cross(step)
        self._hook.next_due_step = next_multiple(step, self._cadence)
        self._step = step
        return is_due

    def will_cross(self, step: int) -> bool:
        """Return the answer that `crosses` will give, without passing the boundary."""
        return crossed(self._step, step, self._cadence)

    @property
    def _cadence(self) -> int:
        every: int = self._hook.every_n_steps if self._every is None else self._every
        return every


class Pace:
    """Converts a period in seconds into steps, so that a hook need not read the clock in each step.

    If steps become slower, it notices that after at most `MOST_UNSEEN` steps.

    Args:
        every_s: The approximate period in seconds.
    """

    MOST_UNSEEN = 8

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._seen: tuple[int, float] | None = None

    def next_look(self, step: int) -> int:
        """Return the step after which to read the clock again; `step` has just ended."""
        seen, self._seen = self._seen, (step, time.monotonic())
        if seen is None or step <= seen[0]:
            return step + 1
        took_s = self._seen[1] - seen[1]
        return step + steps_within(self._every_s, steps=step - seen[0], took_s=took_s, most=self.MOST_UNSEEN)


def steps_within(seconds: float, *, steps: int, took_s: float, most: int) -> int:
    """Return how many steps fit into `seconds` if the last `steps` took `took_s` seconds.

    The result is at least 1 and at most `most`. It is also at most ``2 * steps``: a measurement over few steps says
    little about many.
    """
    most = max(1, min(2 * steps, most))
    return most if took_s * most <= seconds * steps else max(1, math.ceil(seconds * steps / took_s))


def crossed(previous: int, current: int, every: int) -> bool:
    """Whether a multiple of `every` lies in ``(previous, current]``; never if `every` is 0.

    ``current % every == 0`` would miss a boundary if a counter advances by more than one (several environment steps, a
    resume between boundaries).
    """
    return every > 0 and current // every > previous // every


def next_multiple(step: int, every: int) -> int:
    """Return the first multiple of `every` after `step`; `NEVER` if `every` is 0."""
    return (step // every + 1) * every if every > 0 else NEVER


def rewind(hook: Any, step: int) -> None:
    """Rewind `hook` to `step`: call ``rewind`` of each of its attributes that has this method."""
    hook.next_due_step = 0
    for value in vars(hook).values():
        if hasattr(value, "rewind"):
            value.rewind(step)


def suppressed(pl_module: object) -> bool:
    """Whether the last step of a hosted trainer asked for no metrics, checkpoint or samples at this step."""
    hosted = getattr(pl_module, "hosted_trainer", None)
    control = getattr(getattr(hosted, "step_result", None), "control", None)
    return bool(getattr(control, "skip_cadence_emit", False))
