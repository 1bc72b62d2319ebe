"""Runs that are killed and started again prove in their log that they repeat their steps."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from genlight.adapter.view.history import Budget, history_of
from genlight.adapter.view.summary import summary_of
from genlight.reporters.events.validation import validate_events
from support.forked import run_forked
from support.rank_processes import run_ranks, run_ranks_to_their_ends

pytestmark = pytest.mark.promise(name="resume")

TRAINER = """
import os, signal, time
from support.trainer_class import Counts
from genlight.adapter import StepResult

class Killed(Counts):
    factor = 1 + int(os.environ.get("FACTOR", "0"))

    def train_step(self, batch, state, ctx):
        if state["steps"] == int(os.environ.get("KILL_AT", "-1")):
            while not os.path.exists("runs/r/checkpoints/step-00000004.json"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": result.metrics["loss"] * self.factor})
"""


def start(folder: Path, **variables: str) -> int:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, **variables}
    return run_forked("run", "job.json", folder=folder, environ=environ).returncode


@pytest.fixture
def job(tmp_path):
    (tmp_path / "killed.py").write_text(TRAINER)
    job = {
        "run_id": "r",
        "trainer": "killed:Killed",
        "max_steps": 12,
        "checkpoint_every": 4,
        "resume_from_latest": True,
    }
    job |= {"mock_batches": list(range(20)), "resume": {"on_difference": "stop"}}
    (tmp_path / "job.json").write_text(json.dumps({**job, "lightning": {"accelerator": "cpu"}}))
    return tmp_path


def test_a_killed_run_shows_its_proof_everywhere(job):
    assert start(job, KILL_AT="7") == -signal.SIGKILL
    assert start(job) == 0

    folder = job / "runs" / "r"
    text = "steps 5 to 7, repeated after the restart, have the same bits"
    summary = summary_of(folder)
    assert summary.proof == {"level": "ok", "step": 7, "text": text}
    assert any(text in each for each in summary.words)
    page = history_of(folder).as_json(Budget())
    assert {"level": "ok", "step": 7, "text": text, "remedy": ""} in page["findings"]
    assert "same bits" in run_forked("ls", "runs", folder=job).stdout
    assert validate_events(folder / "metrics" / "events.jsonl") == []


def test_a_job_can_repeat_the_steps_before_its_newest_checkpoint(job):
    spec = json.loads((job / "job.json").read_text())
    (job / "job.json").write_text(json.dumps({**spec, "max_steps": 10}))
    assert start(job) == 0
    folder = job / "runs" / "r"
    (folder / "checkpoints" / "final.json").unlink()
    (job / "job.json").write_text(json.dumps({**spec, "resume": {"overlap": True}}))

    assert start(job) == 0

    findings = [finding["text"] for finding in history_of(folder).as_json(Budget())["findings"]]
    assert findings == [
        "step 8, repeated after the restart, has every value of step-00000008",
        "steps 5 to 10, repeated after the restart, have the same bits",
    ]


def test_a_run_that_differs_can_end(job):
    assert start(job, KILL_AT="7") == -signal.SIGKILL
    assert start(job, FACTOR="1") == 1

    summary = summary_of(job / "runs" / "r")
    assert (summary.state, summary.proof["level"], summary.proof["step"]) == ("failed", "warn", 5)
    assert "ResumeDifferenceError" in summary.detail or "is not the same" in summary.detail


@pytest.mark.parametrize("kind", ["ddp", pytest.param("plain", marks=pytest.mark.slow)])
def test_two_ranks_compare_their_own_steps(kind, tmp_path):
    killed = [tmp_path, tmp_path / "c", kind, 7, 0]
    codes, _ = run_ranks_to_their_ends("witness_ranks.py", *killed, world_size=2, code=-signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * 2

    run_ranks("witness_ranks.py", tmp_path, tmp_path / "c", kind, 0, 0)

    text = "steps 5 to 7, repeated after the restart, have the same bits on 2 ranks"
    assert json.loads((tmp_path / "rank0.json").read_text()) == [text]


def test_ranks_compare_their_slices_with_the_newest_checkpoint(tmp_path):
    killed = [tmp_path, tmp_path / "c", "sharded", 10, 0]
    run_ranks_to_their_ends("witness_ranks.py", *killed, world_size=2, code=-signal.SIGKILL)

    run_ranks("witness_ranks.py", tmp_path, tmp_path / "c", "sharded", 0, 0, "overlap")

    assert json.loads((tmp_path / "rank0.json").read_text()) == [
        "step 8, repeated after the restart, has every value of step-00000008 on 2 ranks",
        "steps 5 to 10, repeated after the restart, have the same bits on 2 ranks",
    ]


def test_a_difference_on_another_rank_is_named_with_the_rank(tmp_path):
    killed = [tmp_path, tmp_path / "c", "ddp", 7, 1]
    run_ranks_to_their_ends("witness_ranks.py", *killed, world_size=2, code=-signal.SIGKILL)

    output = run_ranks("witness_ranks.py", tmp_path, tmp_path / "c", "ddp", 0, 2)

    (text,) = json.loads((tmp_path / "rank0.json").read_text())
    assert text.startswith("step 5, repeated after the restart, is not the same on rank 1: the same rows came")
    assert output.count("is not the same") == 1
    assert "NumPy" in text
