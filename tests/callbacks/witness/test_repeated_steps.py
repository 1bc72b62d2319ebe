"""A restarted run compares the steps that it repeats: equal ones are proven, and of others the cause is named."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.contract.exceptions import ResumeDifferenceError
from genlight.callbacks import WriteSamples
from genlight.callbacks.witness.entry import FOLDER, read_witness
from support.witnessed import Hosted, Plain, Rows, attempt, attempts, rows

pytestmark = pytest.mark.promise(name="resume")


@pytest.mark.parametrize("make", [Hosted, Plain])
@pytest.mark.parametrize("until", [11, 17, 20])
def test_repeated_steps_have_the_same_bits(make, until, tmp_path, caplog):
    caplog.set_level("INFO")
    found = attempts(tmp_path, make, until=until)

    if until % 10 == 0:
        assert found == []
        return
    (proof,) = found
    assert proof.difference is None
    assert proof.steps == tuple(range(11, until + 1))
    assert proof.text in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [{"generator": torch.Generator()}, {"shuffle": False}, {"batch_size": 3}],
    ids=["own generator", "in order", "uneven"],
)
def test_no_false_alarm_with_any_loader(options, workers, tmp_path):
    def data() -> DataLoader[Any]:
        if "generator" in options:
            options["generator"].manual_seed(3)
        return DataLoader(Rows(), **{"batch_size": 4, "shuffle": True, **options}, num_workers=workers)

    (proof,) = attempts(tmp_path, Plain, data)

    assert proof.difference is None, proof.text


def test_steps_between_those_of_the_cadence_count_as_a_range(tmp_path):
    (proof,) = attempts(tmp_path, Plain, until=58, steps=60, every_n_steps=30)

    assert proof.steps == (*range(31, 41), 50)
    assert "steps 31 to 50" in proof.text
    assert "11 of them" in proof.text


def test_entries_at_another_cadence_are_compared_and_the_result_comes_at_once(tmp_path):
    options = {"steps": 60, "every_n_steps": 30}
    attempt(tmp_path, Plain(), rows(), until=48, trainer={"log_every_n_steps": 15}, **options)

    (proof,) = attempt(tmp_path, Plain(), rows(), until=45, trainer={"log_every_n_steps": 10}, **options)

    assert proof.steps == (*range(31, 41), 45)


def test_entries_become_rarer_the_farther_the_checkpoint_is_behind(tmp_path):
    attempt(tmp_path, Hosted(), rows(), steps=700, every_n_steps=400, trainer={"log_every_n_steps": 10})

    recorded = read_witness(tmp_path / FOLDER / "rank-00000")
    assert recorded is not None
    before = [*range(1, 11), *range(20, 321, 10), *range(340, 400, 20), 400]
    assert [entry.step for entry in recorded.entries.values()] == [*before, *range(401, 411), *range(420, 701, 10)]


def test_accumulated_batches_of_one_step_are_compared_one_by_one(tmp_path):
    (proof,) = attempts(tmp_path, Plain, until=17, trainer={"accumulate_grad_batches": 3})

    assert proof.difference is None
    assert proof.steps == tuple(range(10, 18))


class Counts(Hosted):
    count = 0

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.count += 1
        return super().loss(batch, state) * (1 + self.count / 100)


class Energy(Counts):
    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        return StepResult({"energy": super().train_step(batch, state, ctx).metrics["loss"], "seconds": 1.0})


class Manual(Plain):
    """Optimizes by itself, logs a loss that depends on a counter, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.count = False, 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.count += 1
        loss = self.body(batch).square().mean() * (1 + self.count / 100)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        self.log("d_loss", loss)


class ChangesAfterStep(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for weight in module.parameters():
                weight += 0.01 * torch.rand(weight.shape)


@pytest.mark.parametrize("make", [Hosted, Plain])
def test_a_checkpoint_holds_what_other_callbacks_change_after_the_step(make, tmp_path):
    # `WriteSamples` reads what `Checkpoint` writes, and is registered before it.
    callbacks = (WriteSamples(tmp_path / "samples", 10**6), ChangesAfterStep())

    (proof,) = attempts(tmp_path / "checkpoints", make, callbacks=callbacks)

    assert proof.difference is None, proof.text


class Slower(Hosted):
    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        state["optimizer"].param_groups[0]["lr"] = 0.05
        return state


def test_a_rate_that_was_changed_on_purpose_is_no_difference(tmp_path):
    def slower() -> ContractModule:
        return ContractModule(Slower(), TrainingJobSpec("witnessed", 30), keep_on_resume=["lr"])

    attempt(tmp_path, Hosted(), rows(), until=17)
    (changed,) = attempt(tmp_path, slower(), rows(), until=27, steps=30, seed=8)
    (proof,) = attempt(tmp_path, slower(), rows(), steps=30, seed=9)

    assert changed.difference is None
    expected = "steps 11 to 17, repeated after the restart, have the same rows and random numbers; losses and learning"
    assert changed.text.startswith(expected)
    assert "lr 0.05 (0.1 in the checkpoint) on purpose" in changed.text
    assert proof.text == "steps 21 to 27, repeated after the restart, have the same bits"


@pytest.mark.parametrize("make", [Energy, Manual], ids=["of another name", "logged"])
def test_a_loss_that_the_resume_changes_is_named(make, tmp_path, caplog):
    """Causes of every kind are planted in `tests/faults/test_resume_faults.py`."""
    (proof,) = attempts(tmp_path, make)

    assert proof.difference is not None
    assert (proof.difference.kind, proof.difference.step) == ("loss", 11)
    assert proof.text in caplog.text


def test_a_difference_can_end_the_run_before_it_saves(tmp_path):
    attempt(tmp_path, Counts(), rows(), until=17)

    with pytest.raises(ResumeDifferenceError):
        attempt(tmp_path, Counts(), rows(), on_difference="stop")

    assert not (tmp_path / "step-00000020.json").exists()
    recorded = read_witness(tmp_path / FOLDER / "rank-00000")
    assert recorded is not None
    assert [entry.step for entry in recorded.entries.values() if entry.attempt == 2] == [11]


def test_a_new_training_in_the_same_folder_is_compared_with_nothing(tmp_path):
    attempt(tmp_path, Hosted(), rows(), until=7)

    assert attempt(tmp_path, Counts(), rows()) == []
    recorded = read_witness(tmp_path / FOLDER / "rank-00000")
    assert recorded is not None
    assert {entry.attempt for entry in recorded.entries.values()} == {1}


@pytest.mark.parametrize(("keep_last", "first"), [(2, 31), (None, 1)])
def test_the_file_keeps_entries_after_the_last_two_checkpoints_or_all(keep_last, first, tmp_path):
    attempt(tmp_path, Hosted(), rows(), steps=44, keep_last=keep_last)

    recorded = read_witness(tmp_path / FOLDER / "rank-00000")
    assert recorded is not None
    assert min(entry.step for entry in recorded.entries.values()) == first
