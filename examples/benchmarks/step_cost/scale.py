"""The cost of a million steps compared with the first ones, and the cost of many callbacks."""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Hook, LogMetrics
from genlight.reporters import EventLogger

from .hosts import NoOp, fit, standard_set

PARTS = 10
CALLBACKS = (0, 10, 50, 100, 200)


class Idle:
    """A trainer whose steps do nothing, so that only the host is left."""

    def __init__(self) -> None:
        self.result = StepResult(metrics={"loss": 1.0})

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        return self.result

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Milestones:
    """Batches that record CPU time and memory at the beginning of each part."""

    def __init__(self, part: int) -> None:
        self.part = part
        self.notes: list[tuple[int, float, float]] = []

    def __iter__(self) -> Iterator[int]:
        step = 0
        while True:
            if step % self.part == 0:
                self.notes.append((step, time.process_time(), memory_mb()))
            yield step
            step += 1


def memory_mb() -> float:
    """Return the resident memory of this process, or its peak if the system does not report the current value."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def many_steps(steps: int, *, metric_every: int = 100) -> list[dict[str, float]]:
    """Return the CPU time of a step and the memory in each tenth of a run with the callbacks of a job."""
    batches = Milestones(steps // PARTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logger = EventLogger(folder / "events.jsonl", run_id="scale")
        _fit(batches, folder, steps + 1, callbacks=standard_set(folder, every=metric_every), logger=logger)
    return [
        {"step": end[0], "step_us": round((end[1] - begin[1]) / batches.part * 1e6, 3), "memory_mb": round(end[2], 1)}
        for begin, end in zip(batches.notes, batches.notes[1:], strict=False)
    ]


def many_callbacks(steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the CPU time of a step with more and more callbacks, with an empty hook and without hooks.

    Args:
        steps: Steps that count in each run, after as many that do not.
        rounds: Runs of each kind, for the median.
    """
    measured: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for kind, make in (("no-op", NoOp), ("idle", Hook)):
            for count in CALLBACKS:
                step_us = _step_us(steps, [LogMetrics(0), *[make() for _ in range(count)]])
                if number:
                    measured.setdefault((kind, count), []).append(step_us)
    return {
        kind: {
            **{str(count): round(statistics.median(measured[kind, count]), 3) for count in CALLBACKS},
            "each_us": round(_slope(measured, kind), 4),
        }
        for kind in ("no-op", "idle")
    }


def _slope(measured: dict[tuple[str, int], list[float]], kind: str) -> float:
    """Cost of one callback, as the median over the rounds."""
    few, most = CALLBACKS[0], CALLBACKS[-1]
    pairs = zip(measured[kind, few], measured[kind, most], strict=True)
    return statistics.median((many - none) / (most - few) for none, many in pairs)


def _step_us(steps: int, callbacks: list[pl.Callback]) -> float:
    batches = Milestones(steps)
    with tempfile.TemporaryDirectory() as folder:
        _fit(batches, Path(folder), 2 * steps + 1, callbacks=callbacks)
    (_, begin, _), (_, end, _) = batches.notes[1:3]
    return (end - begin) / steps * 1e6


def _fit(batches: Milestones, folder: Path, steps: int, **settings: Any) -> None:
    fit(ContractModule(Idle(), TrainingJobSpec("scale", steps)), batches, folder, steps=steps, **settings)


def show_steps(parts: list[dict[str, float]]) -> None:
    """Print one line for each tenth."""
    sys.stdout.write(f"\nmany steps that do nothing\n  {'until step':>12}{'us a step':>12}{'memory MB':>12}\n")
    for part in parts:
        sys.stdout.write(f"  {part['step']:>12,}{part['step_us']:>12.2f}{part['memory_mb']:>12.1f}\n")


def show_callbacks(kinds: dict[str, dict[str, float]]) -> None:
    """Print one line for each kind of callback."""
    counts = "".join(f"{count:>9}" for count in CALLBACKS)
    sys.stdout.write(f"\nus of a step that does nothing, by number of callbacks\n  {'':<10}{counts}{'us each':>10}\n")
    for kind, line in kinds.items():
        figures = "".join(f"{line[str(count)]:>9.2f}" for count in CALLBACKS)
        sys.stdout.write(f"  {kind:<10}{figures}{line['each_us']:>10.4f}\n")
