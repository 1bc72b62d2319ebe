"""Saves by the clock and at improvements: when, on all ranks alike, and over a resume."""

from __future__ import annotations

import json
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from genlight.adapter import ContractModule, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Checkpoint, Evaluate, Hook, LogMetrics
from genlight.callbacks.checkpoint import list_checkpoints, save_triggers
from support.rank_processes import run_ranks


class Scored:
    """Its score after each step is the one of a list."""

    def __init__(self, scores: list[float]) -> None:
        self.scores, self.step = scores, 0

    def setup(self, ctx): ...

    def configure(self, ctx):
        return {}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        self.step += 1
        return StepResult(metrics={"loss": self.scores[self.step - 1]})

    def evaluate(self, state, ctx):
        return {"val/loss": self.scores[self.step - 1]}

    def state_dict(self, state):
        return {"step": self.step}

    def load_state_dict(self, state, payload, ctx):
        self.step = payload["step"]


def saved(directory) -> list[int]:
    return [listed.record.step for listed in list_checkpoints(directory)]


def improving(directory, **arguments) -> Checkpoint:
    options = {"monitor": "val/loss", "save_on_improvement": True, "keep_last": None, "save_final": False}
    return Checkpoint(directory, **{**options, **arguments})


def test_each_improvement_is_saved_and_a_resumed_run_knows_the_best(fit, quiet, tmp_path) -> None:
    scores = [5.0, 6.0, 4.0, float("nan"), 4.0, 3.0, 9.0, 3.5, 3.0, 2.0]
    fit(Scored(scores), [improving(tmp_path), Evaluate(1)], steps=7, enable_checkpointing=True)
    assert saved(tmp_path) == [1, 3, 6]

    callbacks = [improving(tmp_path), Evaluate(1)]
    options = {**quiet, "max_steps": 10, "max_epochs": 1, "callbacks": callbacks, "enable_checkpointing": True}
    trainer = pl.Trainer(**options)
    newest = str(tmp_path / "step-00000006.json")
    trainer.fit(ContractModule(Scored(scores)), BatchStream(range(1000)), ckpt_path=newest)
    assert saved(tmp_path) == [1, 3, 6, 10]


def test_metrics_count_at_their_cadence_and_max_is_the_other_way(fit, tmp_path) -> None:
    checkpoint = improving(tmp_path, monitor="train/loss", mode="max")
    fit(Scored([1.0, 2.0, 9.0, 3.0, 1.0, 0.0]), [checkpoint, LogMetrics(2)], steps=6, enable_checkpointing=True)
    assert saved(tmp_path) == [2, 4]


def test_a_module_that_logs_by_itself_is_looked_at_after_each_step(
    tmp_path, make_trainer, make_net, make_loader
) -> None:
    seen = []

    class Notes(Hook):
        def on_train_batch_end(self, trainer, *_):
            seen.append(float(trainer.callback_metrics["loss"]))

    trainer = make_trainer(improving(tmp_path, monitor="loss"), Notes(), max_epochs=1)
    trainer.fit(make_net(), make_loader(8))
    assert saved(tmp_path) == [step for step in range(1, 9) if seen[step - 1] < min(seen[: step - 1], default=1e9)]


@pytest.fixture
def clock(monkeypatch):
    """The clock of the triggers, which runs as a test says."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(save_triggers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Takes(Hook):
    """Lets each step take so many seconds."""

    def __init__(self, clock, seconds) -> None:
        self.clock, self.seconds = clock, seconds

    def on_train_batch_start(self, trainer, *_):
        self.clock.now += self.seconds(trainer.global_step + 1)


@pytest.mark.parametrize(
    ("every_n_steps", "expected"),
    [(0, [12, 24, 36]), (10, [10, 20, 30, 40])],  # the minutes count from the last save, whatever asked for it
)
def test_minutes_count_from_the_last_save(fit, tmp_path, clock, every_n_steps, expected) -> None:
    checkpoint = Checkpoint(tmp_path, every_minutes=2, every_n_steps=every_n_steps, keep_last=None, save_final=False)
    callbacks = [checkpoint, Takes(clock, lambda step: 10.0)]
    fit(Scored([1.0] * 40), callbacks, steps=40, enable_checkpointing=True)
    assert saved(tmp_path) == expected


def test_the_clock_is_looked_at_seldom_and_slow_steps_are_noticed(
    fit, counting_trainer, tmp_path, clock, monkeypatch
) -> None:
    looks = []
    due = save_triggers.SaveTriggers._is_due

    def noted(self, trainer):
        looks.append(trainer.global_step)
        return due(self, trainer)

    monkeypatch.setattr(save_triggers.SaveTriggers, "_is_due", noted)
    checkpoint = Checkpoint(tmp_path, every_minutes=1, keep_last=None, save_final=False)
    callbacks = [checkpoint, Takes(clock, lambda step: 0.01 if step <= 700 else 0.5)]
    fit(counting_trainer(), callbacks, steps=1000, batches=range(1000), enable_checkpointing=True)
    assert looks[:5] == [1, 101, 201, 301, 401]
    # Seven seconds of fast steps, 150 of slow ones; the change of pace may cost up to 100 slow steps once.
    assert [step for step in saved(tmp_path) if step > 700]
    assert len(looks) < 150


def test_ranks_save_together_what_the_first_one_decides(tmp_path) -> None:
    run_ranks("save_triggers_ranks.py", tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["minutes"] == [12, 24]  # rank 1's clock stands still
    assert ranks[0]["improvement"] == [1, 11, 21]


def test_arguments_that_make_no_sense_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"`every_n_epochs`.*-1.*`every_minutes`.*nan.*`save_on_improvement` needs a `m"
    ):
        Checkpoint(every_n_epochs=-1, every_minutes=float("nan"), save_on_improvement=True)
