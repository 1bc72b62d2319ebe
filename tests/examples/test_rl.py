"""The reinforcement learning examples: they learn, and go on in the middle of a rollout and of episodes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from genlight.callbacks.checkpoint import load
from genlight.reporters import read_events
from support.snippets import blocks

RL = Path(__file__).parents[2] / "examples" / "rl"
PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gymnasium") is None and not (PACKAGES / "gymnasium").is_dir(),
        reason="`make` installs gymnasium into .venv/guides",
    ),
]

KILLED = """
import os, signal
from {module} import {name}


class Killed({name}):
    steps = 0

    def train_step(self, batch, state, ctx):
        self.steps += 1
        if self.steps == {after} and not os.path.exists("was-killed"):
            open("was-killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch, state, ctx)
"""


def run(folder: Path, *settings: str) -> int:
    """Run the job of `folder`; the exit code."""
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGES), str(RL), str(folder)]))
    command = [sys.executable, "-m", "genlight.adapter.cli", "run", "job.json", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, timeout=280).returncode


@pytest.mark.parametrize(("module", "name", "after"), [("ppo", "PPO", 34), ("dqn", "DQN", 134)])
def test_a_run_killed_in_the_middle_of_a_rollout_ends_with_the_same_bits(tmp_path, module, name, after):
    """Weights, optimizer and whatever the environments and the buffer lead to in the rollouts that follow."""
    job = json.loads((RL / f"{module}.json").read_text())
    job |= {"max_steps": 3 * after // 2 + 128, "checkpoint_every": 7, "metric_every": 1, "validate": None}
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "killed.py").write_text(KILLED.format(module=module, name=name, after=after))

    assert run(tmp_path, "artifacts_dir=whole") == 0
    assert run(tmp_path, "artifacts_dir=again", "trainer=killed:Killed") == -signal.SIGKILL
    assert run(tmp_path, "artifacts_dir=again", "trainer=killed:Killed", "resume_from_latest=true") == 0

    whole, again = (load(tmp_path / run / "checkpoints" / "final.json") for run in ("whole", "again"))
    assert whole["state_dict"].keys() == again["state_dict"].keys()
    for key, value in whole["state_dict"].items():
        assert value.equal(again["state_dict"][key]), key
    events = list(read_events(tmp_path / "again" / "metrics" / "events.jsonl"))
    (resumed,) = [event["step"] for event in events if event.get("name") == "trainer/resumed_from_step"]
    period = {"ppo": 20, "dqn": 128}[module]
    assert 0 < resumed < after
    assert resumed % period, "the newest checkpoint was to lie within a phase"
    expected = losses(tmp_path / "whole")
    assert {step: loss for step, loss in losses(tmp_path / "again").items() if step > resumed} == {
        step: loss for step, loss in expected.items() if step > resumed
    }


def losses(run: Path) -> dict[int, float]:
    """By step; of a step that was trained twice the later."""
    events = read_events(run / "metrics" / "events.jsonl")
    return {event["step"]: event["value"] for event in events if event.get("name") == "train/loss"}


def test_ppo_learns_and_its_curve_is_drawn(tmp_path):
    """A sixth of the run of the page, which is enough for what no untrained policy reaches."""
    job = json.loads((RL / "ppo.json").read_text())
    job |= {"max_steps": 1000, "validate": {"every_n_steps": 1000}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert run(tmp_path, "artifacts_dir=run") == 0
    events = list(read_events(tmp_path / "run" / "metrics" / "events.jsonl"))
    (score,) = [event["value"] for event in events if event.get("name") == "eval/return"]
    assert score > 60  # a policy that was not trained reaches some 10 to 25

    subprocess.run([sys.executable, RL / "plot.py", "run", "curve.svg"], cwd=tmp_path, check=True)
    assert "12,800 environment steps" in (tmp_path / "curve.svg").read_text()


def test_the_page_names_files_and_commands_that_are_there():
    """Its commands are those of the tests, with the jobs as they are."""
    shell = "".join(text for language, _, text in blocks(RL / "README.md") if language == "sh")
    for name in ("ppo.json", "dqn.json", "plot.py", "requirements.txt"):
        assert name in shell
        assert (RL / name).is_file()
