"""The loop: limits, the end of data, pauses, and a resume from any step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import (
    ArrowFeed,
    ContractModule,
    InputError,
    MockDataModule,
    StepControlHints,
    StepResult,
    TrainingJobSpec,
)
from genlight.callbacks import Checkpoint
from support.messages import refusal
from support.trainer_class import Counts
from support.trainers import quiet_trainer

from .test_loop_ends import Lazy, LazyUnsized

pytestmark = pytest.mark.promise(name="equal")


class Counting(Counts):
    """A trainer without torch whose state is a number."""

    def __init__(self, control: StepControlHints | None = None) -> None:
        self.control = control
        self.seen: list[Any] = []

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {"total": 0}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.seen.append(batch["x"][0].as_py() if isinstance(batch, pa.RecordBatch) else batch)
        batch = self.seen[-1]
        state["total"] += int(batch)
        return StepResult(metrics={"loss": 1.0}, control=self.control)


def numbers(count: int = 5) -> DataLoader[Any]:
    """One number per batch."""
    return DataLoader([torch.tensor(i) for i in range(count)], batch_size=None)


def trainer_of(tmp_path: Path, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A quiet trainer on one CPU."""
    return quiet_trainer(*callbacks, default_root_dir=tmp_path, **settings)


def test_the_jobs_step_limit_applies_if_the_trainer_has_none(tmp_path: Path) -> None:
    """A Trainer that limits only epochs stops at the job's steps, and the trainer class sees this limit."""
    module = ContractModule(Counting(), TrainingJobSpec("limit", 7))
    trainer = trainer_of(tmp_path, max_epochs=9)
    trainer.fit(module, numbers())
    assert (trainer.global_step, module.ctx.job.max_steps) == (7, 7)


def test_a_second_fit_has_a_new_context(tmp_path: Path) -> None:
    """Limits and run state come from the current trainer; the trainer class is set up once."""
    module = ContractModule(Counting())
    trainer_of(tmp_path, max_steps=3).fit(module, numbers())
    first = module.ctx
    trainer_of(tmp_path, max_steps=6).fit(module, numbers())
    assert (first.job.max_steps, module.ctx.job.max_steps) == (3, 6)
    assert module.ctx.run_state is not first.run_state
    assert len(module.plugin.seen) == 9  # type: ignore[attr-defined]
    assert not module.hosted_trainer.is_canceled()


class Counted:
    """An iterable without length that counts the batches taken from it."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.taken += 1
            yield number


def test_no_batch_is_fetched_after_the_last_step(tmp_path: Path) -> None:
    source = Counted(10)
    trainer_of(tmp_path, max_steps=4).fit(ContractModule(Counting()), source)
    assert source.taken == 4


def test_a_source_that_ends_early_completes_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = ContractModule(Counting(), TrainingJobSpec("early", 10))
    trainer_of(tmp_path, max_steps=10, max_epochs=1).fit(module, Counted(3))
    assert (module.completed_steps, module.stopped) == (3, "data_exhausted")
    assert "ended at step 3 of 10" in caplog.text


@pytest.mark.parametrize("source", [Counted(0), DataLoader([], batch_size=None)], ids=["unsized", "sized"])
@pytest.mark.filterwarnings("ignore:Total length of:UserWarning")
def test_an_empty_source_is_an_input_error(tmp_path: Path, source: Any) -> None:
    with refusal(InputError):
        trainer_of(tmp_path, max_steps=10).fit(ContractModule(Counting()), source)


def test_a_pause_ends_at_once_on_a_stop_request(tmp_path: Path) -> None:
    module = ContractModule(Counting(StepControlHints(backoff_seconds=3600.0)))
    asked: list[int] = []

    def canceled() -> bool:
        asked.append(1)
        return len(asked) > 2

    module.hosted_trainer.add_cancel_check(canceled)
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.fit(module, numbers())
    assert trainer.global_step == 2
    assert len(asked) == 3, "no pause comes after the last step"


def a_table() -> ArrowFeed:
    """Five numbers as an Arrow feed, one pass per iteration."""
    return ArrowFeed(pa.table({"x": list(range(5))}), batch_size=1, shuffle=True)


@pytest.mark.parametrize(
    "source",
    [lambda: LazyUnsized(5), lambda: MockDataModule(range(5)).feed, lambda: Lazy(5), a_table],
    ids=["unsized", "mock", "sized", "arrow"],
)
@pytest.mark.parametrize("saved_at", range(1, 12))
def test_a_run_resumed_after_any_step_is_the_run_that_was_not_interrupted(
    tmp_path: Path, saved_at: int, source: Callable[[], Any]
) -> None:
    """Batches and counters continue exactly, within and at the ends of epochs, for every kind of loader."""
    whole = Counting()
    trainer_of(tmp_path / "whole", max_steps=12).fit(ContractModule(whole), source())

    first = Checkpoint(tmp_path / "ck", every_n_steps=saved_at, keep_last=None, save_final=False, asynchronous=False)
    trainer_of(tmp_path, first, max_steps=saved_at).fit(ContractModule(Counting()), source())

    second = Counting()
    trainer = trainer_of(tmp_path, Checkpoint(tmp_path / "ck", save_final=False), max_steps=12)
    trainer.fit(ContractModule(second), source(), ckpt_path=str(tmp_path / "ck" / f"step-{saved_at:08d}.json"))
    assert second.seen == whole.seen[saved_at:]
    assert trainer.global_step == 12


@pytest.mark.parametrize(
    "batches",
    [
        pa.table({"x": [1.0, 2.0, 3.0]}).to_batches(max_chunksize=1),
        pa.table({"x": [1.0]}).to_batches(),
        (torch.ones(1), torch.ones(1)),
        [{"x": torch.ones(1)}, {"x": torch.ones(1)}],
    ],
)
def test_a_list_of_batches_that_lightning_would_take_for_loaders_is_refused(batches):
    """Lightning would pass a list of columns, or of rows of all batches, and a class could train on it unnoticed."""
    trainer = quiet_trainer(max_steps=1)
    with refusal(InputError):
        trainer.fit(ContractModule(Counting(), TrainingJobSpec("r", 1)), batches)
