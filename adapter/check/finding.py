"""Findings of checks, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    detail: str
    remedy: str = ""
    """Advice to the user; empty if there is nothing to do."""
