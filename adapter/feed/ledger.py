"""A record of which rows each step saw, for audits.

One folder for each attempt of a run, one file for each rank in it, one JSON line for each step. A line tells the rows
(file, and ranges of row numbers in it) and the places of these rows in the order of their epoch. `trained_rows` puts
the attempts of a run together: what a killed attempt handed out after the checkpoint from which the next one went on
does not count.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .position import Layout, Position
from .row_plan import cut
from .sources import Numbers, Part

__all__ = ["Ledger", "trained_rows"]

Row: TypeAlias = tuple[int, str, int]
"""Epoch, file and number of the row within the file."""


class Ledger:
    """Writes what one rank hands out.

    Args:
        folder: Where this attempt of the run keeps its record; made when it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._layout: Layout | None = None
        self._rank = 0

    def begin(self, layout: Layout, position: Position, rank: int) -> None:
        """Note where the attempt goes on; what earlier attempts handed out beyond it is void."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._layout, self._rank = layout, rank
        left = cut(position.spans, layout.share(position.rows).rest(position.step))
        self._write({"epoch": position.epoch, "left": left})

    def record(self, position: Position, step: int, parts: Sequence[Part]) -> None:
        """Note the rows of one step before it trains them: a crash can leave a line too many, but none too few."""
        assert self._layout is not None
        places = cut(position.spans, [self._layout.share(position.rows).interval(step, self._rank)])
        rows = [[file, _ranges(numbers)] for file, numbers in parts]
        self._write({"epoch": position.epoch, "step": step, "places": places, "rows": rows})

    def _write(self, entry: dict[str, Any]) -> None:
        # Opened for each line: a feed has no moment of its own at which it would have to close the file.
        with (self._folder / f"rank-{self._rank:05d}.jsonl").open("ab") as file:
            file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")


def _ranges(numbers: Numbers) -> list[list[int]]:
    if isinstance(numbers, range):
        return [[numbers.start, numbers.stop]]
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(numbers, breaks) if len(run)]


def trained_rows(attempts: Iterable[str | os.PathLike[str]]) -> Counter[Row]:
    """How often each row was trained in each epoch.

    Args:
        attempts: The ledger folders of a run, the earliest attempt first.

    Returns:
        Counts by epoch, file and row number; a run that lost and repeated nothing has 1 everywhere.
    """
    trained: list[tuple[tuple[int, int], Row]] = []
    for folder in attempts:
        entries = [list(_lines(path)) for path in sorted(Path(folder).glob("rank-*.jsonl"))]
        if entries and entries[0]:
            begin = entries[0][0]
            trained = [item for item in trained if not _void(item[0], begin)]
        trained += [item for lines in entries for entry in lines if "step" in entry for item in _rows(entry)]
    return Counter(row for _, row in trained)


def _void(place: tuple[int, int], begin: dict[str, Any]) -> bool:
    epoch, number = place
    return epoch > begin["epoch"] or any(epoch == e and first <= number < end for e, first, end in begin["left"])


def _rows(entry: dict[str, Any]) -> Iterator[tuple[tuple[int, int], Row]]:
    places = ((epoch, place) for epoch, first, end in entry["places"] for place in range(first, end))
    numbers = ((file, n) for file, ranges in entry["rows"] for first, end in ranges for n in range(first, end))
    for place, (file, number) in zip(places, numbers, strict=True):
        yield place, (place[0], file, number)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # a killed process may leave half a line
            yield json.loads(line)
