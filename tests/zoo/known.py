"""Cells of the zoo that are wrong today, each with its cause; an entry whose cell has become right fails the test."""

from __future__ import annotations

UPDATED_BY_HAND = "a parameter that the trainer updates beside an optimizer is not averaged"
WRITTEN_GRADIENTS = "gradients that a clone got, written to `.grad`, are not averaged"
BODY_OUTSIDE = "gradients of parameters in no optimizer are not averaged, so the norm differs by rank"
ALONE_IN_A_COLLECTIVE = "a rank calls a sharded module that the other does not, which ends in a connection error"

WRONG: dict[str, dict[str, str]] = {}
"""By class, then by the beginning of a mode (``ddp``, ``fsdp 16-mixed``)."""

ENDS_THE_PROCESS: dict[str, str] = {}
"""Classes whose wrong cells under this strategy take the process with them or wait for a timeout; not run in CI."""


def cause(name: str, mode: str) -> str | None:
    """Why a cell is wrong, where that is known."""
    return next((why for start, why in WRONG.get(name, {}).items() if mode.startswith(start)), None)
