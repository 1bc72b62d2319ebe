"""Errors of the monitors of Lightning's own callbacks, told from those of a trainer's code.

Apart from `genlight.callbacks.EarlyStopping`: where that is imported, a configuration can no longer name Lightning's by
its short name.
"""

from __future__ import annotations

import traceback

from ..adapter.contract.exceptions import MonitorError
from ..adapter.plumbing.redaction import text_of

__all__ = ["monitor_error"]

_MONITORS = ("lightning.pytorch.callbacks.early_stopping", "lightning.pytorch.callbacks.model_checkpoint")


def monitor_error(error: BaseException) -> MonitorError | None:
    """What Lightning's own `EarlyStopping` or `ModelCheckpoint` says of its monitor; None for any other exception."""
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1] not in _MONITORS:
        return None
    return MonitorError(text_of(error))
