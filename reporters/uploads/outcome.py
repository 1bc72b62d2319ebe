"""The outcome of a run's uploads, in words for the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...adapter.contract.exceptions import UploadError
from .payloads import Kind
from .queue import Entry

__all__ = ["REQUIRED_KINDS", "SettleResult", "Undelivered", "undelivered"]

REQUIRED_KINDS: tuple[Kind, ...] = ("checkpoint", "sample", "terminal")
"""Kinds without whose delivery a run is not complete; metrics are best effort."""


@dataclass(frozen=True)
class Undelivered:
    """One thing that did not arrive."""

    kind: Kind
    step: int
    name: str
    reason: str
    """Safe text."""
    auth: bool
    """Whether the server refused our credentials."""
    permanent: bool
    """Whether a repetition within this attempt is pointless."""

    def __str__(self) -> str:
        return f"{self.kind} of step {self.step} ({self.name}): {self.reason}"


def undelivered(entry: Entry, reason: str) -> Undelivered:
    """The outcome of an entry that still waits; `reason` is why it was not sent, where it was not refused."""
    name = Path(str(entry.body.get("local_path", entry.kind))).name
    why = entry.failure or reason or "not sent before the deadline"
    return Undelivered(entry.kind, entry.step, name, why, entry.auth, entry.failure is not None)


@dataclass(frozen=True)
class SettleResult:
    """The entries that are left after waiting for uploads.

    `lost_metrics` counts metric entries that were refused, or dropped because too many waited.
    """

    undelivered: Sequence[Undelivered] = ()
    """Required uploads that did not arrive, oldest first."""
    pending_metrics: int = 0
    lost_metrics: int = 0
    disk_refusal: str = ""
    """Why what is left could not all be kept for the next start; empty where it was."""

    @property
    def ok(self) -> bool:
        """Whether every required upload was acknowledged."""
        return not self.undelivered

    @property
    def auth(self) -> bool:
        """Whether credentials were refused."""
        return any(item.auth for item in self.undelivered)

    def error(self) -> UploadError | None:
        """The exception that a run ends with, or None. Its text is safe."""
        if self.ok:
            return None
        first = next((item for item in self.undelivered if item.auth), self.undelivered[0])
        count = len(self.undelivered)
        others = f" and {count - 1} more" if count > 1 else ""
        kept = "; kept for the next start"
        if self.disk_refusal:
            kept = f", nor kept for the next start, since the queue cannot be written: {self.disk_refusal}"
        return UploadError(f"{first}{others} not delivered{kept}", auth=self.auth)
