"""Rare garbage collection while modules are imported.

Importing torch and Lightning makes a million objects that stay. With Python's usual thresholds the collector goes
through all of them a few dozen times, which takes a quarter of the time from the start to the first step.
"""

from __future__ import annotations

import gc

_RARELY = (1_000_000, 50, 1000)
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Collect garbage rarely until `collect_as_usual` is called. Thresholds that somebody has changed stay."""
    if gc.get_threshold() == _usual:
        gc.set_threshold(*_RARELY)


def collect_as_usual() -> None:
    """Collect garbage as before `collect_rarely`, without the objects that were made meanwhile.

    Thresholds that an imported module has set stay.
    """
    if gc.get_threshold() == _RARELY:
        gc.freeze()
        gc.set_threshold(*_usual)
