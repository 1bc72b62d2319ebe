"""A run that stops after any step and is resumed ends with the same bits.

The run has every kind of state: dropout, a scheduler, bf16-mixed precision, an accumulation window of four steps whose
gradients live in the parameters, shuffled data that crosses epochs, decoding workers, every source of random numbers.
"""

import contextlib
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.adapter import ArrowDataModule, ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks.checkpoint import Checkpoint
from support.stopping import StopsAt
from support.trainer_class import Counts
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")

STEPS = 100
WINDOW = 4


class Accumulating(Counts):
    """A trainer class that updates its weights every fourth step."""

    def configure(self, ctx):
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS // WINDOW)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "steps": 0, "seen": []}

    def train_step(self, batch, state, ctx):
        x, ids = batch
        noise = random.random() + np.random.random() + torch.rand(())
        loss = (state["model"](x) * noise).pow(2).mean() / WINDOW
        loss.backward()
        state["steps"] += 1
        state["seen"].append(sum(ids))
        if state["steps"] % WINDOW == 0:
            torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
            state["optimizer"].step()
            state["scheduler"].step()
            state["optimizer"].zero_grad()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"steps": state["steps"], "seen": state["seen"]}


def augment(raw):
    """Draw from every source of random numbers, in the workers if there are any."""
    x = torch.tensor(raw["x"].to_pylist())
    return x + 0.1 * torch.randn_like(x) + random.random() + np.random.random(), raw["id"].to_pylist()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    rows = np.random.default_rng(0).normal(size=(300, 6)).astype(np.float32)
    pq.write_table(pa.table({"id": range(300), "x": rows.tolist()}), path, row_group_size=60)
    return path


def run(table, directory, *, steps=STEPS, stop_after=STEPS, workers=0, resume_from=None, seed=1):
    """Train up to `steps`, or until the stop; return everything that has to be equal in the end."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module = ContractModule(Accumulating(), TrainingJobSpec(run_id="exact", max_steps=steps))
    trainer = quiet_trainer(
        StopsAt(stop_after),
        Checkpoint(directory, save_final=steps < STEPS),
        precision="bf16-mixed",
        max_steps=steps,
        max_epochs=-1,
    )
    data = ArrowDataModule(str(table), batch_size=8, shuffle=True, seed=3, collate=augment, workers=workers)
    with contextlib.suppress(TrainingCanceled):
        trainer.fit(module, datamodule=data, ckpt_path=resume_from)
    assert trainer.global_step == min(steps, stop_after)
    state = module.contract_state
    optimizer = state["optimizer"].state_dict()["state"]
    moments = [tensor for index in sorted(optimizer) for tensor in optimizer[index].values()]
    return [*state["model"].state_dict().values(), *moments], state["seen"]


def assert_equal(actual, expected):
    assert actual[1] == expected[1], "different rows"
    assert len(actual[0]) == len(expected[0])
    for one, other in zip(actual[0], expected[0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # The long run stops after each of 100 steps.
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_stopped_after_any_step_and_resumed_ends_with_the_same_bits(table, tmp_path, workers, is_long):
    """Stops are at every place of an accumulation window and in each epoch; in the long run, after every step."""
    expected = run(table, tmp_path / "reference", workers=workers)
    steps = range(1, STEPS) if is_long else (11, 13, 38, 40, 90)
    for step in steps:
        directory = tmp_path / f"stopped-{step}"
        run(table, directory, stop_after=step, workers=workers)
        saved = directory / f"step-{step:08d}.json"
        assert_equal(run(table, directory, resume_from=saved, workers=workers, seed=step + 50), expected)


@pytest.mark.parametrize("end", [38, 50])
def test_a_run_continued_from_its_end_equals_a_longer_run(table, tmp_path, end):
    expected = run(table, tmp_path / "reference")
    run(table, tmp_path / "c", steps=end)
    resumed = run(table, tmp_path / "unused", resume_from=tmp_path / "c" / "final.json", seed=9)
    assert_equal(resumed, expected)
