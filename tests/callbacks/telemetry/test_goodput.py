"""`Goodput` measures how a training spent its time; a killed run accounts for all of it."""

from __future__ import annotations

import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Evaluate, Goodput, LogMetrics, WriteSamples
from genlight.callbacks.hook.events import timed
from genlight.callbacks.hook.hook import Hook
from genlight.reporters import EventLogger
from genlight.reporters.events.goodput import account_of
from genlight.reporters.events.reader import read_events
from support.messages import refusal


class Slow:
    """Sleeps in each hook, so that the parts can be distinguished."""

    def setup(self, ctx): ...

    def configure(self, ctx):
        return {"weight": torch.zeros(1)}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        time.sleep(0.002)
        return StepResult(metrics={"loss": 0.5})

    def evaluate(self, state, ctx):
        time.sleep(0.05)
        return {"score": 1.0}

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...


class Samples(Hook):
    """Holds training up under a name."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 7:
            with timed(trainer, "samples"):
                time.sleep(0.1)


def fit(folder: Path, *callbacks: pl.Callback, steps: int = 40) -> Path:
    from genlight.adapter import ContractModule

    module = ContractModule(Slow(), TrainingJobSpec(run_id="r", max_steps=steps))
    pl.Trainer(
        accelerator="cpu",
        logger=EventLogger(folder / "events.jsonl", run_id="r"),
        callbacks=list(callbacks),
        max_steps=steps,
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        default_root_dir=folder,
    ).fit(module, [0] * steps)
    return next(folder.rglob("events.jsonl"))


def test_each_part_is_what_held_training_up_and_all_of_them_are_the_whole(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=20)
    log = fit(tmp_path, Goodput(every_s=1e-6), LogMetrics(5), Evaluate(10), Samples(), checkpoint)

    account = account_of(log)

    assert account is not None
    seconds = account.seconds
    assert sum(seconds.values()) == pytest.approx(account.wall_s, rel=0.01)
    assert seconds["evaluation"] >= 4 * 0.05 - 0.002
    assert 0.1 - 0.002 <= seconds["samples"] < account.wall_s
    assert seconds["checkpoint"] > 0
    assert seconds["steps"] >= 40 * 0.002
    assert seconds["start_up"] > 0
    assert seconds["lost"] == seconds["idle"] == 0


def test_the_samples_of_a_job_are_counted(tmp_path):
    log = fit(tmp_path, Goodput(every_s=1e-6), WriteSamples(tmp_path / "samples", 10))

    names = {event["name"] for event in read_events(log) if event["event"] == "metric"}
    assert {"time/steps", "time/samples", "time/start_up"} <= names


def test_a_training_that_is_shorter_than_its_cadence_says_nothing(tmp_path):
    log = fit(tmp_path, Goodput(every_s=3600.0))

    assert not [e for e in read_events(log) if str(e.get("name", "")).startswith("time/")]


@pytest.mark.parametrize("every_s", [0, -1.0])
def test_a_cadence_that_is_not_positive_is_refused(every_s):
    with refusal(ValueError):
        Goodput(every_s)
