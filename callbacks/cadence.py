"""When a periodic action is due."""

from __future__ import annotations

__all__ = ["crossed"]


def crossed(previous: int, current: int, every: int) -> bool:
    """Whether a multiple of `every` lies in ``(previous, current]``; an `every` of 0 never is.

    A bare modulo misses its boundary when a counter advances by more than one (several environment steps, a resume
    between boundaries); crossing does not.
    """
    return every > 0 and current // every > previous // every
