"""A Hugging Face ``Trainer`` with `GenlightCallback` is killed, stopped and continued, with the real package."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events

PACKAGES = Path(sys.prefix) / "guides"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PACKAGES / "transformers").is_dir(), reason="`make` installs transformers and accelerate into .venv/guides"
    ),
]

PROGRAM = """
import os, signal, sys
import torch
from transformers import Trainer, TrainingArguments
from genlight.callbacks.hugging_face import GenlightCallback

folder, number, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x, y):
        if self.training and trainer.state.global_step + 1 == step:
            os.kill(os.getpid(), number) if number else sys.exit(torch.zeros(1).fill_(1).no_such_method())
        out = self.body(x)
        return {"loss": (out - y).pow(2).mean(), "out": out}


rows = torch.rand(64, 3, generator=torch.Generator().manual_seed(1))
data = [{"x": row[:2], "y": row[2:]} for row in rows]
arguments = TrainingArguments(
    folder, num_train_epochs=2, per_device_train_batch_size=4, save_steps=5, logging_steps=3, seed=7, use_cpu=True,
    report_to=[], disable_tqdm=True, learning_rate=0.01, save_total_limit=3,
)
callback = GenlightCallback()
trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=[callback])
callback.train(trainer)
torch.save(trainer.model.state_dict(), folder + "/end.pt")
"""


def run(folder: Path, number: int = 0, step: int = -1) -> tuple[int, str]:
    """Train to the end, or until the process gets a signal in a step (0: until the step fails)."""
    path = os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(int(number)), str(step)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


def weights(folder: Path) -> Any:
    import torch

    state = torch.load(folder / "end.pt", weights_only=True)
    return torch.cat([each.flatten() for each in state.values()])


def ends(folder: Path) -> list[tuple[str, Any]]:
    assert validate_events(folder / "events.jsonl") == []
    kinds = ("started", "completed", "failed")
    return [(e["event"], e.get("step")) for e in read_events(folder / "events.jsonl") if e["event"] in kinds]


@pytest.mark.promise(name="resume")
def test_a_killed_stopped_or_torn_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    whole, killed, stopped = (tmp_path / name for name in ("whole", "killed", "stopped"))
    assert run(whole)[0] == 0

    assert run(killed, signal.SIGKILL, 13)[0] == -signal.SIGKILL
    newest = max(killed.glob("checkpoint-*"), key=lambda each: int(each.name[11:]))
    largest = max(newest.iterdir(), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])  # as a crash of the machine leaves it
    code, said = run(killed)
    assert code == 0, said
    assert "checkpoint-10 is skipped" in said
    assert (weights(killed) == weights(whole)).all()
    assert ends(killed) == [("started", None), ("started", None), ("completed", 32)]

    code, said = run(stopped, signal.SIGTERM, 8)
    assert code == 75, said
    assert (stopped / "checkpoint-8" / "genlight.json").is_file(), "saved after the step in which the signal came"
    assert run(stopped)[0] == 0
    assert (weights(stopped) == weights(whole)).all()
    assert ends(stopped) == [("started", None), ("failed", 8), ("started", None), ("completed", 32)]

    metrics = [e for e in read_events(stopped / "events.jsonl") if e["event"] == "metric"]
    steps = [e["step"] for e in metrics if e["name"] == "train/loss"]
    assert steps == sorted(set(steps)), "no step twice"
    assert {e["step"] for e in metrics if e["name"] == "trainer/resumed_from_step"} == {8}


def test_a_failing_run_has_its_end_in_the_log_and_its_exit_code(tmp_path: Path) -> None:
    code, said = run(tmp_path, 0, 7)
    assert code == 1
    assert "no_such_method" in said
    assert ends(tmp_path) == [("started", None), ("failed", 6)]
