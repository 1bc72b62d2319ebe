"""A stop ends a wait for a batch that data workers do not deliver."""

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from genlight.adapter import ContractModule, TrainingCanceled, TrainingJobSpec
from genlight.adapter.feed.data_module import FunctionDataModule
from genlight.callbacks import Checkpoint, StopRequests
from genlight.callbacks.checkpoint import newest_valid
from genlight.callbacks.stop import data_workers, stop_requests
from support.resumed_fit import PlainSees, Sees, seed
from support.trainers import quiet_trainer

BATCHES = 5
"""Batches of an epoch."""


class Blocks(Dataset[Any]):
    """Rows with noise. Before the `at`-th row that it reads, it asks the training to stop and blocks, once.

    It asks when the steps before it have ended and the training cannot but wait.
    """

    def __init__(self, folder: Path, at: int, *, by_signal: bool = False) -> None:
        self.folder, self.at, self.left, self.by_signal = folder, at, at, by_signal

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.left == 0 and not (self.folder / "blocked").exists():
            self.block()
        self.left -= 1
        return torch.tensor([index, torch.rand(())])

    def block(self) -> None:
        (self.folder / "blocked").touch()
        while not (self.folder / f"ended-{self.at // 2}").exists():
            time.sleep(0.02)
        if self.by_signal:
            os.kill(os.getppid(), signal.SIGTERM)
        else:
            (self.folder / "cancel").touch()
        time.sleep(3600)


class NotingStops(StopRequests):
    def __init__(self, folder: Path, *, ahead: int = 0) -> None:
        super().__init__(folder / "cancel")
        self.folder, self.ahead = folder, ahead

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        (self.folder / "ended-0").touch()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        (self.folder / f"ended-{trainer.global_step + self.ahead}").touch()


@pytest.fixture(autouse=True)
def workers_end_soon(monkeypatch):
    monkeypatch.setattr(data_workers, "PATIENCE_S", 0.1)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()  # a failed fit keeps its iterators in a circle
    for worker in multiprocessing.active_children():
        worker.join(60)


def loader_of(rows: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(rows, **{"batch_size": 2, "shuffle": True, "num_workers": 1, "prefetch_factor": 1, **options})


def feed_of(rows: Dataset[Any]) -> FunctionDataModule:
    return FunctionDataModule(lambda: rows, batch_size=2, shuffle=True, workers=1, readahead=1)


def fit(folder: Path, data: Any, *, own: bool, **options: Any) -> list[list[float]]:
    (folder / "cancel").unlink(missing_ok=True)
    seed(5)
    saves = Checkpoint(folder / "checkpoints", asynchronous=False, save_final=False)
    trainer = quiet_trainer(saves, NotingStops(folder), max_steps=12, max_epochs=-1, default_root_dir=folder, **options)
    module: Any = ContractModule(Sees(), TrainingJobSpec("r", 12)) if own else PlainSees()
    newest = newest_valid(folder / "checkpoints")[0] if (folder / "checkpoints").exists() else None
    as_data = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **as_data, ckpt_path=None if newest is None else newest.path)
    seen: list[list[float]] = module.contract_state["seen"] if own else module.seen
    return seen


def stopped_step(folder: Path) -> int:
    newest = newest_valid(folder / "checkpoints")[0] if (folder / "checkpoints").exists() else None
    return 0 if newest is None else newest.step


PERSISTENT = {"persistent_workers": True}


@pytest.mark.parametrize(
    ("own", "make", "batch"),
    [
        (True, loader_of, 3),
        (True, loader_of, 0),
        pytest.param(True, lambda rows: loader_of(rows, **PERSISTENT), BATCHES, marks=pytest.mark.slow),
        (True, feed_of, 4),
        (False, loader_of, 3),
        pytest.param(False, lambda rows: loader_of(rows, **PERSISTENT), BATCHES, marks=pytest.mark.slow),
        pytest.param(False, lambda rows: loader_of(rows, **PERSISTENT), BATCHES + 1, marks=pytest.mark.slow),
    ],
)
def test_a_stop_while_workers_block_saves_the_last_step_and_a_resume_is_exact(own, make, batch, tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / "blocked").touch()
    whole = fit(tmp_path / "whole", make(Blocks(tmp_path / "whole", -1)), own=own)

    with pytest.raises(TrainingCanceled):
        fit(tmp_path / "cut", make(Blocks(tmp_path / "cut", 2 * batch)), own=own)

    assert stopped_step(tmp_path / "cut") == batch
    assert fit(tmp_path / "cut", make(Blocks(tmp_path / "cut", -1)), own=own) == whole


def test_a_signal_ends_the_wait_too(tmp_path):
    with pytest.raises(TrainingCanceled):
        fit(tmp_path, loader_of(Blocks(tmp_path, 4, by_signal=True)), own=True)

    assert stopped_step(tmp_path) == 2


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Blocks) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        yield from (self.rows[index] for index in range(10))


class Evaluates(PlainSees):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("what", ["a stream that Lightning fetches ahead", "validation data"])
def test_a_wait_in_which_nothing_can_be_saved_ends_a_while_after_the_request(what, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stop_requests, "WAIT_PATIENCE_S", 0.5)
    ahead = 0 if what == "validation data" else 1
    trainer = quiet_trainer(
        NotingStops(tmp_path, ahead=ahead),
        max_steps=12,
        max_epochs=-1,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )
    rows = Blocks(tmp_path, 4)
    loaders = {"train_dataloaders": DataLoader(Stream(rows), batch_size=2, num_workers=1)}
    if what == "validation data":
        loaders = {
            "train_dataloaders": loader_of(Blocks(tmp_path, -1)),
            "val_dataloaders": loader_of(rows, shuffle=False),
        }
    with pytest.raises(TrainingCanceled):
        trainer.fit(Evaluates() if "val_dataloaders" in loaders else PlainSees(), **loaders)
    assert sum("data workers" in record.message for record in caplog.records) == 1
