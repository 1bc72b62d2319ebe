"""The reinforcement learning examples: they learn, and resume in the middle of a rollout and of episodes."""

from __future__ import annotations

import importlib
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
from support.forked import Forked

RL = Path(__file__).parents[2] / "examples" / "rl"
BENCHMARKS = RL.parent / "benchmarks"
PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.promise(name="resume"),
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
    environ, log = {**os.environ, "PYTHONPATH": path}, folder / "log"
    process = Forked("genlight.adapter.cli", "run", "job.json", *arguments, environ=environ, folder=folder, log=log)
    try:
        return process.wait(280)
    finally:
        process.kill_session()


@pytest.mark.parametrize(
    ("module", "name", "after"), [("ppo", "PPO", 34), ("dqn", "DQN", 134), ("composed", "Composed", 34)]
)
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
    period = {"ppo": 20, "dqn": 128, "composed": 20}[module]
    assert 0 < resumed < after
    assert resumed % period, "the newest checkpoint was to lie within a phase"
    expected = losses(tmp_path / "whole")
    assert {step: loss for step, loss in losses(tmp_path / "again").items() if step > resumed} == {
        step: loss for step, loss in expected.items() if step > resumed
    }


def losses(run: Path) -> dict[int, float]:
    """Values by step; the later one if a step was trained twice."""
    events = read_events(run / "metrics" / "events.jsonl")
    return {event["step"]: event["value"] for event in events if event.get("name") == "train/loss"}


def test_ppo_learns_and_its_curve_is_drawn(tmp_path):
    """A sixth of the page's run: enough for a return that no untrained policy reaches."""
    job = json.loads((RL / "ppo.json").read_text())
    job |= {"max_steps": 1000, "validate": {"every_n_steps": 1000}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert run(tmp_path, "artifacts_dir=run") == 0
    events = list(read_events(tmp_path / "run" / "metrics" / "events.jsonl"))
    (score,) = [event["value"] for event in events if event.get("name") == "eval/return"]
    assert score > 60  # a policy that was not trained reaches some 10 to 25

    subprocess.run([sys.executable, RL / "plot.py", "run", "curve.svg"], cwd=tmp_path, check=True)
    assert "12,800 environment steps" in (tmp_path / "curve.svg").read_text()


def test_losses_hooks_and_callbacks_observe_the_same_training(tmp_path):
    """The losses' reports are in the metrics, and hooks of the project find them in any order of registration."""
    job = json.loads((RL / "composed.json").read_text())
    job |= {"max_steps": 60, "metric_every": 1}
    job["hyperparams"]["kl_limit"] = 0.002
    (job["lightning"]["callbacks"][1]["init_args"]["hook"])["init_args"] = {"every_n_epochs": 2}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert run(tmp_path, "artifacts_dir=run") == 0

    events = list(read_events(tmp_path / "run" / "metrics" / "events.jsonl"))
    last = {event["name"]: event["value"] for event in events if event.get("step") == 60 and event["event"] == "metric"}
    reported = {"ppo/approx_kl", "ppo/clip_fraction", "ppo/stopped_updates", "value/error", "entropy/entropy"}
    assert reported | {"dynamics/error", "train/loss", "trainer/agent_step"} <= last.keys()
    phases = [json.loads(line) for line in (tmp_path / "phases.jsonl").read_text().splitlines()]
    assert [phase["epoch"] for phase in phases] == list(range(1, len(phases) + 1))
    assert [phase["agent_step"] for phase in phases] == [256 * phase["epoch"] for phase in phases]
    assert last["ppo/stopped_updates"] >= 1, "the limit was to end an update early"
    assert len(phases) > 3
    assert [phase["eval_scores"] is not None for phase in phases[:3]] == [False, True, True]
    assert reported <= phases[-1]["loss_stats"].keys()


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_the_plain_loops_of_the_benchmark_reach_the_same_bits(algorithm, monkeypatch):
    """So that its ratio compares the same algorithm; no figure is judged."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGES)]))
    monkeypatch.setenv("PYTHONPATH", path)
    (found,) = importlib.import_module("rl_overhead").main(["--algorithm", algorithm, "--phases", "1"])
    assert found["same_bits"]
    assert found["phases"] == 1
    assert min(found["cpu_ratio"], found["wall_ratio"]) > 0
