"""The seed of a job decides what is random in it, and is written down."""

from __future__ import annotations

import random

import numpy as np
import torch

from genlight.adapter import StepResult
from genlight.callbacks.checkpoint import read_record
from support.jobs import events_of, run, write_job
from support.trainer_class import Counts


class Draws(Counts):
    def configure(self, ctx):
        return {"drawn": [random.random(), float(np.random.rand()), torch.rand(1).item()]}

    def train_step(self, batch, state, ctx):
        return StepResult(metrics={"drawn": torch.rand(()).item()})


def test_one_seed_applies_to_every_generator_and_is_in_log_and_record(tmp_path):
    found = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        folder = tmp_path / name
        folder.mkdir()
        job = write_job(folder, trainer=f"{__name__}:Draws", metric_every=1, seed=seed)
        assert run(job) == 0
        events, record = events_of(job), read_record(folder / "out/checkpoints/final.json")
        assert events[0]["metadata"]["seed"] == record.metadata["seed"] == seed
        found[name] = (record.state["drawn"], [event["value"] for event in events if event.get("name") == "drawn"])
    assert found["a"] == found["b"]
    assert all(first != second for first, second in zip(found["a"][0], found["c"][0], strict=True))
