"""When a periodic action is due."""

from __future__ import annotations

import sys

__all__ = ["crossed", "next_multiple", "suppressed"]


def crossed(previous: int, current: int, every: int) -> bool:
    """Whether a multiple of `every` lies in ``(previous, current]``; an `every` of 0 never is.

    A bare modulo misses its boundary when a counter advances by more than one (several environment steps, a resume
    between boundaries); crossing does not.
    """
    return every > 0 and current // every > previous // every


def next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` after `step`; of an `every` of 0 it is a step that never comes."""
    return (step // every + 1) * every if every > 0 else sys.maxsize


def suppressed(pl_module: object) -> bool:
    """Whether the last step of a hosted trainer asked that no metrics, checkpoint or samples be emitted for it."""
    control = getattr(getattr(pl_module, "step_result", None), "control", None)
    return bool(getattr(control, "skip_cadence_emit", False))
