"""When a periodic action is due."""

from __future__ import annotations

import math
import numbers
import sys
import time
from typing import Any

__all__ = [
    "NEVER",
    "Boundaries",
    "Pace",
    "crossed",
    "next_multiple",
    "rewind",
    "step_cadence",
    "steps_within",
    "suppressed",
]

NEVER = sys.maxsize
"""The `next_due_step` of a hook that waits for something else than a step."""


def step_cadence(name: str, every: Any) -> int:
    """The argument `name` of a hook, after how many steps it acts again; 0 turns that off.

    Raises:
        ValueError: It is something else than a whole number from 0 on.
    """
    is_whole = isinstance(every, numbers.Integral) and not isinstance(every, bool)
    if not (is_whole and every >= 0):
        expected = "a number" if is_whole else "a whole number"
        raise ValueError(f"Invalid `{name}`. Expected {expected} >= 0, but received {every!r}.")
    return int(every)


class Boundaries:
    """Which boundaries of a cadence a hook has seen, so that it acts once for each; a roll-back rewinds them.

    Args:
        hook: Gets the step it waits for, as ``next_due_step``.
        step: The step that was completed last; boundaries before it are over.
        every: The cadence; None is the ``every_n_steps`` of the hook.
    """

    def __init__(self, hook: Any, step: int = 0, *, every: int | None = None) -> None:
        self._hook, self._step, self._every = hook, step, every

    def rewind(self, step: int) -> None:
        """Wait for the boundaries after `step` again."""
        self._step = step

    def crosses(self, step: int) -> bool:
        """Whether there is a boundary after the step of the last call, and not after `step`."""
        is_due = self.will_cross(step)
        self._hook.next_due_step = next_multiple(step, self._cadence)
        self._step = step
        return is_due

    def will_cross(self, step: int) -> bool:
        """The answer that `crosses` will give."""
        return crossed(self._step, step, self._cadence)

    @property
    def _cadence(self) -> int:
        every: int = self._hook.every_n_steps if self._every is None else self._every
        return every


class Pace:
    """After which step something that goes by the clock is looked at again, without a look at the clock in each step.

    A pace that slows down from one step to the next is noticed after `MOST_UNSEEN` steps.

    Args:
        every_s: About how far apart looks are, in seconds.
    """

    MOST_UNSEEN = 8

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._seen: tuple[int, float] | None = None

    def next_look(self, step: int) -> int:
        """The step at whose end to look again, where `step` has just ended."""
        seen, self._seen = self._seen, (step, time.monotonic())
        if seen is None or step <= seen[0]:
            return step + 1
        took_s = self._seen[1] - seen[1]
        return step + steps_within(self._every_s, steps=step - seen[0], took_s=took_s, most=self.MOST_UNSEEN)


def steps_within(seconds: float, *, steps: int, took_s: float, most: int) -> int:
    """How many steps fit into so many seconds at the pace of the last `steps`: 1 to `most`, and to twice `steps`."""
    most = max(1, min(2 * steps, most))
    return most if took_s * most <= seconds * steps else max(1, math.ceil(seconds * steps / took_s))


def crossed(previous: int, current: int, every: int) -> bool:
    """Whether a multiple of `every` lies in ``(previous, current]``; an `every` of 0 never is.

    A bare modulo misses its boundary when a counter advances by more than one (several environment steps, a resume
    between boundaries); crossing does not.
    """
    return every > 0 and current // every > previous // every


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`; of an `every` of 0 it is a step that never comes."""
    return (step // every + 1) * every if every > 0 else NEVER


def rewind(hook: Any, step: int) -> None:
    """Have `hook` wait for what comes after `step` again, by all its attributes that have a method of this name."""
    hook.next_due_step = 0
    for value in vars(hook).values():
        if hasattr(value, "rewind"):
            value.rewind(step)


def suppressed(pl_module: object) -> bool:
    """Whether the last step of a hosted trainer asked that no metrics, checkpoint or samples be emitted for it."""
    control = getattr(getattr(pl_module, "step_result", None), "control", None)
    return bool(getattr(control, "skip_cadence_emit", False))
