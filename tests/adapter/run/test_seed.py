"""The seed of a job decides what is random in it, and is written down."""

from __future__ import annotations

import json

from genlight.adapter.cli import main
from genlight.reporters import read_events

TRAINER = """
import random

import numpy as np
import torch

from genlight.adapter import StepResult


class Draws:
    def setup(self, ctx): pass
    def configure(self, ctx): return {"drawn": [random.random(), float(np.random.rand()), torch.rand(1).item()]}
    def prepare_batch(self, raw_batch, state, ctx): return raw_batch
    def train_step(self, batch, state, ctx): return StepResult(metrics={"drawn": torch.rand(()).item()})
    def state_dict(self, state): return dict(state)
    def load_state_dict(self, state, payload, ctx): pass
"""


def test_one_seed_applies_to_every_generator_and_is_in_log_and_record(tmp_path):
    (tmp_path / "draws.py").write_text(TRAINER)
    job = {"trainer": "draws:Draws", "max_steps": 2, "metric_every": 1, "mock_batches": [1, 2]}
    found = {}
    for run_id, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / "job.json").write_text(
            json.dumps({**job, "run_id": run_id, "seed": seed, "lightning": {"accelerator": "cpu"}})
        )
        assert main(["run", str(tmp_path / "job.json")]) == 0
        folder = tmp_path / "runs" / run_id
        events = list(read_events(folder / "metrics" / "events.jsonl"))
        record = json.loads((folder / "checkpoints" / "final.json").read_text())
        assert events[0]["metadata"]["seed"] == record["metadata"]["seed"] == seed
        drawn = [event["value"] for event in events if event.get("name") == "drawn"]
        found[run_id] = (record["state"]["drawn"], drawn)
    assert found["a"] == found["b"]
    assert all(first != second for first, second in zip(found["a"][0], found["c"][0], strict=True))
