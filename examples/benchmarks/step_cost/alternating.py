"""Measure a host and its floor alternately, a block of steps each, in one process.

The host takes its batches from an `Alternation`. Between two blocks of batches, the `Alternation` runs as many steps of
the floor, a bare loop. Both therefore meet the same machine: its other load, clock rate and caches change more slowly
than the blocks. The figures are medians over hundreds of such pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .workload import BATCH

WARM_BLOCKS = 2


@dataclass(frozen=True)
class Pair:
    """Times of one block of the floor and the next block of the host, in seconds."""

    floor_cpu_s: float
    host_cpu_s: float
    floor_wall_s: float
    host_wall_s: float


@dataclass(frozen=True)
class _Moment:
    process_s: float
    thread_s: float
    wall_s: float


def _now() -> _Moment:
    return _Moment(time.process_time(), time.thread_time(), time.perf_counter())


class Alternation:
    """Yields batches for a host, and runs as many steps of its floor between blocks of them.

    Args:
        floor: One step of the bare loop.
        blocks: Pairs to measure; the first few are not counted.
        block: Steps in a block.
        meet: Waits for all ranks, or the device; called when a block begins and ends.
        shares_threads: Whether threads that the floor starts do part of its work, like threads of gloo. If not, the
            work of other threads always counts for the host.
        batch: The batch that the host gets.
        data_s: Seconds that the host and the floor wait for each batch.
    """

    def __init__(
        self,
        floor: Callable[[], None],
        *,
        blocks: int,
        block: int,
        meet: Callable[[], None] = lambda: None,
        shares_threads: bool = False,
        batch: Any = BATCH,
        data_s: float = 0.0,
    ) -> None:
        self._floor = floor
        self._blocks = blocks + WARM_BLOCKS
        self._block = block
        self._meet = meet
        self._shares_threads = shares_threads
        self._batch = batch
        self._data_s = data_s
        self._pairs: list[Pair] = []

    @property
    def steps(self) -> int:
        """Number of steps of the host; its request for another batch after them ends the last block."""
        return self._blocks * self._block + 1

    @property
    def pairs(self) -> list[Pair]:
        """The measurements."""
        assert len(self._pairs) == self._blocks, f"{len(self._pairs)} blocks of {self._blocks}: the host ended early"
        return self._pairs[WARM_BLOCKS:]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._blocks):
            floor = self._timed(self._run_floor)
            self._meet()
            begin = _now()
            for _ in range(self._block):
                self._await_data()
                yield self._batch
            self._meet()
            self._pairs.append(self._pair(*floor, begin, _now()))
        while True:
            yield self._batch

    def _run_floor(self) -> None:
        for _ in range(self._block):
            self._await_data()
            self._floor()

    def _await_data(self) -> None:
        if self._data_s:
            time.sleep(self._data_s)

    def _timed(self, work: Callable[[], None]) -> tuple[_Moment, _Moment]:
        self._meet()
        begin = _now()
        work()
        self._meet()
        return begin, _now()

    def _pair(self, floor_begin: _Moment, floor_end: _Moment, host_begin: _Moment, host_end: _Moment) -> Pair:
        floor_cpu_s = floor_end.process_s - floor_begin.process_s
        host_cpu_s = host_end.process_s - host_begin.process_s
        if not self._shares_threads:
            own_s = floor_end.thread_s - floor_begin.thread_s
            host_cpu_s += floor_cpu_s - own_s
            floor_cpu_s = own_s
        return Pair(floor_cpu_s, host_cpu_s, floor_end.wall_s - floor_begin.wall_s, host_end.wall_s - host_begin.wall_s)


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def figures(pairs: list[Pair], block: int) -> dict[str, Any]:
    """The cost of a step of one host, compared with the floor.

    ``total_ratio`` is the ratio of the sums: it also includes events in few blocks, such as a garbage collection.
    """
    us = 1e6 / block
    return {
        "pairs": len(pairs),
        "floor_us": spread([pair.floor_cpu_s * us for pair in pairs]),
        "added_us": spread([(pair.host_cpu_s - pair.floor_cpu_s) * us for pair in pairs]),
        "ratio": spread([pair.host_cpu_s / pair.floor_cpu_s for pair in pairs]),
        "total_ratio": round(sum(pair.host_cpu_s for pair in pairs) / sum(pair.floor_cpu_s for pair in pairs), 4),
        "floor_wall_us": spread([pair.floor_wall_s * us for pair in pairs]),
        "wall_ratio": spread([pair.host_wall_s / pair.floor_wall_s for pair in pairs]),
    }
