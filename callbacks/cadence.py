"""When a periodic action is due."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

__all__ = ["Boundaries", "Pace", "StepCadence", "crossed", "next_multiple", "steps_within", "suppressed"]

MOST_STEPS = 8
"""How many steps a look at the clock is apart from the next at most, should steps become slow from one to the next."""


class StepCadence:
    """An attribute of a hook: after how many steps it acts again; 0 turns that off.

    It may be changed while training: the hook is then called after the next step, whatever it waited for.

    Raises:
        ValueError: A negative number is assigned.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    if TYPE_CHECKING:
        # Not a method when running: Python then takes the value from the hook itself, without a call.
        def __get__(self, hook: Any, owner: type | None = None) -> int: ...

    def __set__(self, hook: Any, every: int) -> None:
        if every < 0:
            raise ValueError(f"Invalid `{self._name}`. Expected a number >= 0, but received {every}.")
        vars(hook)[self._name] = every
        hook.next_due_step = 0


class Boundaries:
    """Which boundaries of its ``every_n_steps`` a hook has seen, so that it acts once for each.

    Args:
        hook: Is told of the step it waits for, as ``next_due_step``.
        step: The step that was completed last; boundaries before it are over.
    """

    def __init__(self, hook: Any, step: int = 0) -> None:
        self._hook, self._step, self._every = hook, step, hook.every_n_steps

    def crosses(self, step: int) -> bool:
        """Whether a boundary lies behind the last step that was given here and not behind `step`."""
        hook = self._hook
        every: int = hook.every_n_steps
        hook.next_due_step = next_multiple(step, every)
        if hook.every_n_steps != every:
            hook.next_due_step = 0  # another thread has changed it meanwhile
        # Steps that were skipped before a change had no boundary; those of the new cadence begin with this one.
        previous = self._step if every == self._every else max(self._step, step - 1)
        self._step, self._every = step, every
        return crossed(previous, step, every)


def crossed(previous: int, current: int, every: int) -> bool:
    """Whether a multiple of `every` lies in ``(previous, current]``; an `every` of 0 never is.

    A bare modulo misses its boundary when a counter advances by more than one (several environment steps, a resume
    between boundaries); crossing does not.
    """
    return every > 0 and current // every > previous // every


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`; of an `every` of 0 it is a step that never comes."""
    return (step // every + 1) * every if every > 0 else sys.maxsize


def steps_within(seconds: float, *, steps: int, took_s: float, most: int) -> int:
    """How many steps fit into so many seconds at the pace of the last `steps`: from 1 to `most`, and to twice `steps`.

    What is done by the clock is so done by the step, without a look at the clock in each. A pace that slows down is
    noticed after that many steps.
    """
    most = max(1, min(2 * steps, most))
    return most if took_s * most <= seconds * steps else max(1, math.ceil(seconds * steps / took_s))


class Pace:
    """When to look at the clock next, for a callback that acts by the clock and is not to be called after each step.

    Args:
        step: The step that was completed last.
    """

    def __init__(self, step: int) -> None:
        self._step, self._at = step, time.monotonic()

    def next_look(self, step: int, seconds: float) -> int:
        """The step after which so many seconds will be about over, at the pace since the last call."""
        now = time.monotonic()
        steps, took_s = max(1, step - self._step), now - self._at
        self._step, self._at = step, now
        return step + steps_within(seconds, steps=steps, took_s=took_s, most=MOST_STEPS)


def suppressed(pl_module: object) -> bool:
    """Whether the last step of a hosted trainer asked that no metrics, checkpoint or samples be emitted for it."""
    control = getattr(getattr(pl_module, "step_result", None), "control", None)
    return bool(getattr(control, "skip_cadence_emit", False))
