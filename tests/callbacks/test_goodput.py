"""`Goodput` measures how a training spent its time; a killed run accounts for all of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.callbacks import Checkpoint, Evaluate, Goodput, LogMetrics, WriteSamples
from genlight.reporters import EventLogger
from genlight.reporters.events.goodput import account_of
from genlight.reporters.events.reader import read_events
from support.trainer_class import Counts
from support.trainers import quiet_trainer


class Slow(Counts):
    """Sleeps in each hook, so that the parts can be distinguished."""

    def configure(self, ctx):
        return {**super().configure(ctx), "generate_sample": lambda: time.sleep(0.1)}

    def train_step(self, batch, state, ctx):
        time.sleep(0.002)
        return super().train_step(batch, state, ctx)

    def evaluate(self, state, ctx):
        time.sleep(0.05)
        return {"score": 1.0}

    def state_dict(self, state):
        return {}


def fit(folder: Path, *callbacks: pl.Callback, steps: int = 40) -> Path:
    module = ContractModule(Slow(), TrainingJobSpec(run_id="r", max_steps=steps))
    logger = EventLogger(folder / "events.jsonl", run_id="r")
    quiet_trainer(*callbacks, logger=logger, max_steps=steps, max_epochs=-1).fit(module, [0] * steps)
    return folder / "events.jsonl"


def test_each_part_is_what_held_training_up_and_all_of_them_are_the_whole(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=20)
    samples = WriteSamples(tmp_path / "samples", 30)
    log = fit(tmp_path, Goodput(every_s=1e-6), LogMetrics(5), Evaluate(10), samples, checkpoint)

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


@pytest.mark.parametrize(("every_s", "steps"), [(3600.0, []), (3.0, [4, 24, 40])])
def test_the_last_step_reports_too_unless_training_is_shorter_than_the_cadence(tmp_path, monkeypatch, every_s, steps):
    seconds = itertools.count()  # one passes from look to look, at steps 1, 2, 4, 8, 16 and so on
    monkeypatch.setattr("genlight.callbacks.telemetry.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    log = fit(tmp_path, Goodput(every_s))

    assert [event["step"] for event in read_events(log) if event.get("name") == "time/steps"] == steps
