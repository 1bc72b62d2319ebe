"""Trainers that collect their own batches, and trainers that evaluate themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from genlight.adapter import ContractError, ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks import Checkpoint, Evaluate, Hook
from genlight.callbacks.hook.events import run_state_of
from genlight.reporters import read_events


class Agent:
    """Collects two batches a rollout; its score is the number of steps."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.seen: list[Any] = []

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {}

    def rollout(self, state: Any, ctx: Any) -> Any:
        self.rollouts += 1
        return [f"{self.rollouts}a", f"{self.rollouts}b"], {"reward": [float(self.rollouts)]}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.seen.append(batch)
        return StepResult(metrics={"loss": 1.0})

    def evaluate(self, state: Any, ctx: Any) -> Any:
        random.random()
        return {"score": len(self.seen)}

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Phases(Hook):
    """Writes down the events of section training phases."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("rollout_start")

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append(("rollout_end", run_state_of(trainer).rollout_stats))

    def on_mb_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append(("mb_end", run_state_of(trainer).minibatch_index))

    def on_train_phase_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("train_phase_end")

    def on_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append(("epoch_end", run_state_of(trainer).epoch))

    def on_new_training_run(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("new_training_run")

    def on_training_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls.append("training_end")


def fit(tmp_path: Path, plugin: Any, *callbacks: pl.Callback, steps: int = 4, **options: Any) -> pl.Trainer:
    """Train without any data but the trainer's own."""
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(ContractModule(plugin, TrainingJobSpec("agent", steps, metric_every=0)), **options)
    return trainer


def test_each_training_phase_begins_with_a_rollout_and_tells_its_hooks(tmp_path: Path) -> None:
    """Two phases of two minibatches, with every event in its place."""
    agent, phases = Agent(), Phases()
    fit(tmp_path, agent, phases)
    assert agent.seen == ["1a", "1b", "2a", "2b"]
    assert phases.calls == [
        "new_training_run",
        "rollout_start",
        ("rollout_end", {"reward": [1.0]}),
        ("mb_end", 0),
        ("mb_end", 1),
        "train_phase_end",
        ("epoch_end", 1),
        "rollout_start",
        ("rollout_end", {"reward": [2.0]}),
        ("mb_end", 0),
        ("mb_end", 1),
        "train_phase_end",
        ("epoch_end", 2),
        "training_end",
    ]


@pytest.mark.parametrize("returned", [7, {"reward": 1.0}])
def test_a_rollout_that_returns_no_batches_is_told_so(tmp_path: Path, returned: Any) -> None:
    """A number or a mapping is no iterable of batches."""
    agent = Agent()
    agent.rollout = lambda state, ctx: returned  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=r"rollout returned a .*; it must be an iterable of raw batches"):
        fit(tmp_path, agent)


def test_a_run_resumed_within_a_phase_trains_what_is_left_of_its_rollout(tmp_path: Path, caplog: Any) -> None:
    """And nothing is said of a loader without a position."""
    fit(tmp_path, Agent(), Checkpoint(tmp_path), steps=3)
    resumed = Agent()
    fit(tmp_path, resumed, Checkpoint(tmp_path), steps=6, ckpt_path=tmp_path / "final.json")
    assert resumed.seen == ["2b", "1a", "1b"]
    assert "keeps no position" not in caplog.text
    assert "begins anew" not in caplog.text


def test_a_run_resumed_between_phases_says_nothing_of_rollouts(tmp_path: Path, caplog: Any) -> None:
    """Nothing of a phase is lost there."""
    fit(tmp_path, Agent(), Checkpoint(tmp_path, every_n_epochs=1, save_final=False), steps=3)
    caplog.clear()
    fit(tmp_path, Agent(), Checkpoint(tmp_path), steps=6, ckpt_path=tmp_path / "step-00000002.json")
    assert "rollout" not in caplog.text


def test_a_rollout_may_return_batches_alone(tmp_path: Path) -> None:
    """A generator of batches, and a tuple of two mappings that are batches."""
    for batches in (iter(["x", "y"]), ({"x": 1}, {"x": 2})):
        agent = Agent()
        agent.rollout = lambda state, ctx, batches=batches: batches  # type: ignore[method-assign,misc]
        trainer = fit(tmp_path, agent, steps=2)
        assert len(agent.seen) == 2
        assert run_state_of(trainer).rollout_stats is None


def test_evaluation_scores_reach_the_run_state_and_leave_random_numbers_alone(tmp_path: Path) -> None:
    """At its cadence, with the scores of that step."""
    random.seed(3)
    expected = random.random()
    random.seed(3)
    trainer = fit(tmp_path, Agent(), Evaluate(2), steps=5)
    assert run_state_of(trainer).eval_scores == {"score": 4.0}
    assert random.random() == expected


def test_a_checkpoint_may_be_kept_by_an_evaluation_score(tmp_path: Path) -> None:
    """The monitor finds the score of the very step."""
    checkpoint = Checkpoint(
        tmp_path / "c", every_n_steps=2, monitor="score", mode="max", keep_last=1, save_final=False, asynchronous=False
    )
    fit(tmp_path, Agent(), checkpoint, Evaluate(2), steps=6)
    assert checkpoint.best_model_path.endswith("step-00000006.json")


@pytest.mark.parametrize("critical", [True, False])
def test_evaluation_of_a_trainer_without_one_is_refused(tmp_path: Path, critical: bool) -> None:
    """At the start, and named; also where an evaluation that fails would be forgiven."""
    agent = Agent()
    agent.evaluate = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ContractError, match="Agent has no evaluate"):
        fit(tmp_path, agent, Evaluate(2, critical=critical))


def test_a_job_needs_no_dataset_where_the_trainer_has_a_rollout(tmp_path: Path) -> None:
    """`validate` in the job sets the cadence of the evaluation, whose scores are metrics of their step."""
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {
                "run_id": "agent",
                "trainer": f"{Path(__file__).stem}:Agent",
                "max_steps": 5,
                "metric_every": 4,
                "validate": {"every_n_steps": 3},
                "lightning": {"accelerator": "cpu"},
            }
        )
    )
    (tmp_path / f"{Path(__file__).stem}.py").write_text(Path(__file__).read_text())
    assert run_job(RunOptions(spec_path=job, overrides=[f"artifacts_dir={tmp_path}/out"])) == 0
    metrics = [
        (event["step"], event["name"])
        for event in read_events(tmp_path / "out" / "metrics" / "events.jsonl")
        if event["event"] == "metric"
    ]
    times = ["trainer/rollout_seconds", "trainer/update_seconds"]
    assert metrics == [(3, "score"), (4, "train/loss"), *((4, name) for name in times), (4, "rollout/reward")]
