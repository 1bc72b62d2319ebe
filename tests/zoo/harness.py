"""Run classes of the zoo in every mode; each rank is one process that runs all its jobs."""

import functools
import importlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.rank_processes import run_ranks_to_their_ends

STRATEGIES = ("one", "ddp", "fsdp")
PRECISIONS = ("fp32", "bf16-mixed", "16-mixed")
THEMES = (
    "accumulation",
    "diffusion",
    "distillation",
    "ema",
    "gan",
    "language",
    "meta_learning",
    "moe",
    "optimizers",
    "recipes",
    "rl",
    "self_supervised",
    "updates",
    "vision",
)
"""Modules whose classes are in the table; the other modules have separate tests."""
MODES = [(strategy, precision) for strategy in STRATEGIES for precision in PRECISIONS]


@dataclass(frozen=True)
class Cell:
    """Result of a class in one mode, on the rank with the worst result."""

    name: str
    strategy: str
    precision: str
    verdict: str
    """``equal``, ``off``, ``drift``, ``refused``, ``error``, ``hang``, or ``no plain`` if the plain loop fails."""
    detail: str = ""
    resume: str = ""
    """``exact``, ``not tried``, or the first difference."""

    @property
    def mode(self) -> str:
        return f"{self.strategy} {self.precision}"


_SEVERITY = ("no plain", "equal", "off", "drift", "error", "hang", "refused")


Job = tuple[str, str, str]
"""Name, strategy and precision."""


def run_cells(
    folder: Path, jobs: Sequence[Job], *, without_resume: Collection[Job] = (), device: str = "cpu"
) -> list[Cell]:
    """Run `jobs`, those with one process in one worker, the others in a pair; return their cells."""
    cells = []
    for world_size in (1, 2):
        mine = [job for job in jobs if (job[1] == "one") == (world_size == 1)]
        if mine:
            (folder / str(world_size)).mkdir()
            cells += _run_workers(folder / str(world_size), mine, world_size, without_resume, device)
    return cells


def _run_workers(
    folder: Path, jobs: Sequence[Job], world_size: int, without_resume: Collection[Job], device: str
) -> list[Cell]:
    """Run `jobs`; if a process dies, that is the result of its job, and new processes continue after it."""
    cells: list[Cell] = []
    while len(cells) < len(jobs):
        attempt = folder / f"from{len(cells)}"
        attempt.mkdir()
        rest = [(*job, job not in without_resume) for job in jobs[len(cells) :]]
        outputs = _run_attempt(attempt, rest, world_size, device)
        by_rank = [_results(attempt / f"rank{rank}.jsonl") for rank in range(world_size)]
        done = min(len(results) for results in by_rank)
        cells += [_worst([results[i] for results in by_rank]) for i in range(done)]
        if len(cells) < len(jobs):
            finished = [results[done] for results in by_rank if len(results) > done]
            died = Cell(*jobs[len(cells)], "error", f"a process died: {outputs[-300:]}")
            cells.append(_worst([*finished, died]))
    return cells


def _results(file: Path) -> list[Cell]:
    return [Cell(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _run_attempt(folder: Path, jobs: Sequence[tuple[str, str, str, bool]], world_size: int, device: str) -> str:
    """Run until all jobs are done or a process has died; return the last output of a dead process."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    codes, outputs = run_ranks_to_their_ends("zoo.worker", folder, device, world_size=world_size)
    died = [text for code, text in zip(codes, outputs, strict=True) if code not in (0, -9)]
    return " ".join(died[0].split()) if died else ""


def _worst(cells: Sequence[Cell]) -> Cell:
    chosen = max(cells, key=lambda cell: _SEVERITY.index(cell.verdict))
    # A rank that lost its partner reports only that; the other rank has the cause.
    causes = [cell for cell in cells if cell.verdict == "error" and "gloo" not in cell.detail]
    if chosen.verdict == "error" and causes:
        chosen = causes[0]
    inexact = [cell.resume for cell in cells if cell.resume not in ("", "exact", "not tried")]
    return Cell(**{**asdict(chosen), "resume": inexact[0] if inexact else chosen.resume})


@functools.cache
def zoo() -> dict[str, Any]:
    for theme in THEMES:
        importlib.import_module(f"zoo.{theme}")
    from zoo.base import ZOO

    return ZOO
