"""A feed that writes down which rows each of its steps has, and the rows that all attempts of a run trained.

One folder for each attempt, one file for each rank in it, one JSON line for each step, with the values of the column
``id`` and the places of these rows in the order of their epoch.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from genlight.adapter import ArrowFeed
from genlight.adapter.feed.position import Position
from genlight.adapter.feed.row_plan import cut


class AuditedFeed(ArrowFeed):
    """A feed of files with a column ``id``; `audit` is the folder of this attempt."""

    def __init__(self, source: Any, *, audit: str | os.PathLike[str], rank: int = 0, **options: Any) -> None:
        super().__init__(source, rank=rank, **options)
        self._file, self._rank = Path(audit) / f"rank-{rank:05d}.jsonl", rank

    def _pass(self, position: Position | None = None) -> Iterator[Any]:
        position = position or self._upcoming()
        share = self._layout.share(position.rows)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Rows of earlier attempts beyond this are void.
        self._write({"epoch": position.epoch, "left": cut(position.spans, share.rest(position.step))})
        with contextlib.closing(super()._pass(position)) as batches:  # type: ignore[type-var]
            for step, batch in enumerate(batches, position.step):
                places = cut(position.spans, [share.interval(step, self._rank)])
                # Before it is trained: a crash can leave a line too many, but none too few.
                self._write({"places": places, "ids": batch.column("id").to_pylist()})
                yield batch

    def _write(self, entry: dict[str, Any]) -> None:
        with self._file.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")


def trained_rows(attempts: Iterable[str | os.PathLike[str]]) -> Counter[tuple[int, int]]:
    """How often each row was trained in each epoch: counts by epoch and id; 1 everywhere if nothing went wrong.

    Rows of a killed attempt after the checkpoint that the next attempt resumed from do not count.

    Args:
        attempts: The folders of a run, the earliest attempt first.
    """
    trained: list[tuple[tuple[int, int], int]] = []
    for folder in attempts:
        entries = [list(_lines(path)) for path in sorted(Path(folder).glob("rank-*.jsonl"))]
        if entries and entries[0]:
            begin = entries[0][0]
            trained = [(place, row) for place, row in trained if not _is_void(place, begin)]
        trained += [item for lines in entries for entry in lines if "ids" in entry for item in _rows(entry)]
    return Counter((place[0], row) for place, row in trained)


def _is_void(place: tuple[int, int], begin: dict[str, Any]) -> bool:
    epoch, number = place
    return epoch > begin["epoch"] or any(epoch == e and first <= number < end for e, first, end in begin["left"])


def _rows(entry: dict[str, Any]) -> Iterator[tuple[tuple[int, int], int]]:
    places = ((epoch, place) for epoch, first, end in entry["places"] for place in range(first, end))
    return zip(places, entry["ids"], strict=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # a killed process may leave half a line
            yield json.loads(line)
