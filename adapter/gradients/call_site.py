"""Finds the line of a trainer's code for a message."""

from __future__ import annotations

import sys
import types

_NOT_THE_USERS = ("genlight.", "torch.", "contextlib", "functools", "lightning.")


def users_line() -> str:
    """Return the innermost line of the call stack outside of genlight, Lightning and torch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
