"""`ProfileSteps` traces exactly the steps that it names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule
from genlight.callbacks import Checkpoint, ProfileSteps
from support.messages import refusal
from support.trainer_class import Trains
from support.trainers import quiet_trainer

BATCHES = list(torch.rand(8, 4, 2))


def fit(*callbacks: Any, steps: int = 6, plugin: Any = None, **arguments: Any) -> None:
    data: Any = DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]
    quiet_trainer(*callbacks, max_steps=steps).fit(ContractModule(plugin or Trains()), data, **arguments)


def traced(path: Path) -> int:
    """Number of forward passes of the layer in a trace."""
    with gzip.open(path) as file:
        return sum(event.get("name") == "aten::linear" for event in json.load(file)["traceEvents"])


def test_the_trace_has_these_steps_and_no_other(tmp_path: Path) -> None:
    profile = ProfileSteps(2, 4, tmp_path / "p")
    fit(profile, Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None))
    (path,) = (tmp_path / "p").iterdir()
    assert path.name == "steps-2-4.json.gz"
    assert traced(path) == 3

    fit(ProfileSteps(1, 4, tmp_path / "r"), Checkpoint(tmp_path / "d"), ckpt_path=tmp_path / "c" / "step-00000002.json")
    assert traced(next((tmp_path / "r").iterdir())) == 2, "a resumed run profiles what is left"

    fit(ProfileSteps(5, 99, tmp_path / "e"))
    assert traced(next((tmp_path / "e").iterdir())) == 2, "the run ended first"

    fit(ProfileSteps(7, 9, tmp_path / "n"))
    assert not (tmp_path / "n").exists()


def test_a_failing_step_leaves_its_trace_and_no_profiler_running(tmp_path: Path) -> None:
    class Fails(Trains):
        def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
            if ctx.step == 2:
                raise ValueError("broken")
            return super().train_step(batch, state, ctx)

    with pytest.raises(ValueError, match="broken"):
        fit(ProfileSteps(1, 5, tmp_path), plugin=Fails())
    assert traced(tmp_path / "steps-1-5.json.gz") == 2


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 2)])
def test_steps_in_the_wrong_order_are_refused(first: int, last: int) -> None:
    with refusal(ValueError):
        ProfileSteps(first, last)
