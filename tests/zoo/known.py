"""Cells of the zoo that are wrong today, each with its cause; an entry whose cell has become right fails the test."""

from __future__ import annotations

WRONG: dict[str, dict[str, str]] = {}
"""By class, then by the beginning of a mode (``ddp``, ``fsdp 16-mixed``)."""


def cause(name: str, mode: str) -> str | None:
    """Why a cell is wrong, where that is known."""
    return next((why for start, why in WRONG.get(name, {}).items() if mode.startswith(start)), None)
