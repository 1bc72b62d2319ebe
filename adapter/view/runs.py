"""The runs below a folder as a page asks for them again and again: nothing is read twice that has not changed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ..run.artifacts_lock import LOCK_NAME
from .history import Budget, History, history_of
from .summary import RunSummary, Starts, find_runs, modified_ms, summary_of

__all__ = ["Runs"]

MOST_HISTORIES = 16
"""How many runs are kept in memory with their curves; of more, those that were asked for last."""
SIZES_FOR_S = 0.3
"""How long one listing may count files and read scores; later ones do the rest."""


@dataclass
class _Seen:
    """A run as read so far; its lock is for whoever reads on."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    history: History | None = None


class Runs:
    """The runs at and below `folder`, by their address: their path below it, ``.`` for itself. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._listed: dict[str, tuple[RunSummary, bool]] = {}
        """By address, and whether files were counted."""
        self._starts: Starts = {}
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, address: str) -> Path:
        """The folder of the run at `address`, which is compared with those that there are and never followed.

        Raises:
            KeyError: There is no such run.
        """
        if address not in self._listed:
            self.listing()
        return self._listed[address][0].path

    def listing(self) -> list[dict[str, Any]]:
        """All runs at a glance, the one that started last first."""
        with self._lock:
            listed = {}
            for path in find_runs(self.folder):
                address = path.relative_to(self.folder).as_posix()
                before = self._listed.get(address)
                is_same = before is not None and before[0].state != "running" and not _has_changed(before[0])
                seen = before if before and is_same else (summary_of(path, sizes=False, starts=self._starts), False)
                listed[address] = seen
            until = time.monotonic() + SIZES_FOR_S
            for address, (seen_summary, is_counted) in listed.items():
                if not is_counted and time.monotonic() < until:
                    listed[address] = summary_of(seen_summary.path, starts=self._starts), True
            self._listed = listed
        newest_first = sorted(listed.items(), key=lambda each: (-(each[1][0].started_at_ms or 0), each[0]))
        return [{**summary.as_json(), "address": address} for address, (summary, _) in newest_first]

    def in_full(self, addresses: Sequence[str]) -> list[dict[str, Any]]:
        """Runs as `History.as_json` has them, with addresses of pictures in place of their bytes.

        Raises:
            KeyError: There is no such run.
        """
        return [self._in_full(address, len(addresses)) for address in addresses]

    def _in_full(self, address: str, among: int) -> dict[str, Any]:
        folder = self.find(address)
        with self._lock:
            seen = self._seen.setdefault(address, _Seen())
            self._seen.move_to_end(address)
            if len(self._seen) > MOST_HISTORIES:
                self._seen.popitem(last=False)
        budget = Budget(
            points=20_000 // among, address_of=lambda path: f"file?{urlencode({'run': address, 'path': path})}"
        )
        with seen.lock:
            seen.history = history_of(folder, seen.history, self._starts)
            return {**seen.history.as_json(budget), "address": address}


def _has_changed(summary: RunSummary) -> bool:
    """Whether a run that did not run has given a sign of life since."""
    return max(modified_ms(summary.log), modified_ms(summary.path / LOCK_NAME)) > summary.alive_at_ms
