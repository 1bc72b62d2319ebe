"""Findings of checks, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    detail: str
    remedy: str = ""
    """Advice to the user; empty if there is nothing to do."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)
