"""The cost of a start: CPU seconds of complete processes, and until the first step."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .alternating import spread

BASE = "import torch, make an optimizer"

_TRAINER = """
import json, time

class OneStep:
    def setup(self, ctx): ...
    def configure(self, ctx):
        import torch
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        with open("seconds", "w") as file:
            file.write(str(time.process_time()))
        from genlight.adapter import StepResult
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""
_JOB = {"trainer": "one_step:OneStep", "max_steps": 1, "mock_batches": [1], "resume_from_latest": True}
_NOTE = "import time; open('seconds', 'w').write(str(time.process_time()))"
_OPTIMIZER = f"import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1); {_NOTE}"
_LIGHTNING_HELP = "from lightning.pytorch.cli import LightningCLI; LightningCLI(args=['--help'])"
_LIGHTNING = f"""
import lightning.pytorch as pl
import torch

class OneStep(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        {_NOTE}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

pl.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
).fit(OneStep(), [1])
"""


@dataclass(frozen=True)
class Start:
    """CPU seconds of one process."""

    whole_s: float
    first_step_s: float | None
    """Seconds until its first step, or until it had its optimizer; None for a process that trains nothing."""


def start_up(rounds: int) -> dict[str, dict[str, Any]]:
    """Return seconds and ratios to the base, for processes that are started alternately."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "one_step.py").write_text(_TRAINER)
        _start(_genlight("run", _job(root, "finished")), root)
        starts: dict[str, list[Start]] = {}
        for number in range(rounds + 1):
            for name, command in _commands(root, f"fresh-{number}").items():
                starts.setdefault(name, []).append(_start(command, root))
    return {name: _figures(each[1:], starts[BASE][1:]) for name, each in starts.items()}


def show(started: dict[str, dict[str, Any]]) -> None:
    """Print one line for each command."""
    sys.stdout.write(f"\nstart-up, CPU s\n  {'':<40}{'whole':>9}{'to step':>9}{'ratio':>8}\n")
    for name, line in started.items():
        first, ratio = line["first_step_s"], line["first_step_ratio"]
        tail = f"{first['median']:>9.3f}{ratio['median']:>8.3f}" if first else ""
        sys.stdout.write(f"  {name:<40}{line['whole_s']['median']:>9.3f}{tail}\n")


def _commands(root: Path, fresh: str) -> dict[str, list[str]]:
    return {
        "genlight --help": _genlight("--help"),
        "genlight run, finished before": _genlight("run", _job(root, "finished")),
        BASE: [sys.executable, "-c", _OPTIMIZER],
        "genlight run, one step": _genlight("run", _job(root, fresh)),
        "Lightning, one step": [sys.executable, "-c", _LIGHTNING],
        "LightningCLI --help": [sys.executable, "-c", _LIGHTNING_HELP],
    }


def _genlight(*arguments: str) -> list[str]:
    code = "import sys; from genlight.adapter.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]


def _job(root: Path, run_id: str) -> str:
    path = root / f"{run_id}.json"
    path.write_text(json.dumps({**_JOB, "run_id": run_id, "lightning": {"accelerator": "cpu"}}))
    return str(path)


def _start(command: list[str], folder: Path) -> Start:
    before = _children_s()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # keep compiled modules from the first round on, as an installation has
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    note = folder / "seconds"
    first_step_s = float(note.read_text()) if note.exists() else None
    note.unlink(missing_ok=True)
    return Start(_children_s() - before, first_step_s)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _figures(starts: list[Start], base: list[Start]) -> dict[str, Any]:
    firsts = [start.first_step_s for start in starts if start.first_step_s is not None]
    ratios = [
        start.first_step_s / other.first_step_s
        for start, other in zip(starts, base, strict=True)
        if start.first_step_s and other.first_step_s
    ]
    return {
        "whole_s": spread([start.whole_s for start in starts]),
        "first_step_s": spread(firsts) if firsts else None,
        "first_step_ratio": spread(ratios) if ratios else None,
    }
