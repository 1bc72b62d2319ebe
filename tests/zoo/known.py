"""Cells of the zoo that are wrong today, each with its cause; an entry whose cell has become right fails the test."""

from __future__ import annotations

SLOW_WEIGHTS = "slow weights that a wrapper keeps by parameter do not come back from a checkpoint of sharded ones"
KEYED_BY_ADDRESS = "slow weights under the address of their parameter end in one rank's error while the other one waits"

WRONG: dict[str, dict[str, str]] = {
    "Lookahead": {"fsdp": SLOW_WEIGHTS},
    "LookaheadKeyedByAddress": {"fsdp": KEYED_BY_ADDRESS},
}
"""By class, then by the beginning of a mode (``ddp``, ``fsdp 16-mixed``)."""

ENDS_THE_PROCESS = {"LookaheadKeyedByAddress": "fsdp"}
"""Classes that, under this strategy, may take the process with them or wait for a timeout; not run in CI there."""


def cause(name: str, mode: str) -> str | None:
    """Why a cell is wrong, where that is known."""
    return next((why for start, why in WRONG.get(name, {}).items() if mode.startswith(start)), None)
