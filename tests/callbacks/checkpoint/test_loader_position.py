"""A plain shuffled ``DataLoader`` gives what a plain loop gets from it, and goes on in the middle of an epoch."""

from __future__ import annotations

import random
import threading
from itertools import islice, product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from genlight.adapter import ContractModule, TrainingJobSpec
from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.feed.arrow_feed import ArrowFeed
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import newest_valid
from genlight.callbacks.checkpoint.positioned_loader import with_position
from support.messages import refusal
from support.resumed_fit import PlainSees, Sees, rows_seen, seed
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")


class Rows(Dataset[Any]):
    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(())])


def loader(kind: str, batch_size: int = 3) -> DataLoader[Any]:
    rows = Rows()
    if kind == "own generator":
        return DataLoader(rows, batch_size, shuffle=True, generator=torch.Generator().manual_seed(3))
    if kind == "weighted":
        return DataLoader(rows, batch_size, sampler=WeightedRandomSampler([1.0] * 10, 10))
    if kind == "one rank":
        return DataLoader(rows, batch_size, sampler=DistributedSampler(rows, num_replicas=1, rank=0, seed=4))
    if kind == "distributed":
        return DataLoader(rows, batch_size, sampler=DistributedSampler(rows, num_replicas=2, rank=1, seed=4))
    return DataLoader(rows, batch_size, shuffle=kind == "shuffled")


KINDS = ["shuffled", "own generator", "weighted", "in order", "distributed"]
CUTS = [("shuffled", 3), ("own generator", 4), ("weighted", 1), ("distributed", 6)]


@pytest.mark.parametrize(
    ("kind", "cut"), [*CUTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in product(KINDS, (2, 5, 8)))]
)
def test_a_resume_from_each_step_sees_what_an_unbroken_run_sees(kind, cut, tmp_path, caplog):
    whole = rows_seen(tmp_path / "whole", 9, loader(kind))
    rows_seen(tmp_path / "cut", cut, loader(kind))

    assert rows_seen(tmp_path / "cut", 9, loader(kind)) == whole
    assert "keeps no position" not in caplog.text


def arrow_feed() -> ArrowFeed:
    rows = pa.table({"row": [float(row) for row in range(10)], "zero": [0.0] * 10})
    return ArrowFeed(
        rows,
        batch_size=3,
        shuffle=True,
        epochs=None,
        collate=lambda b: torch.tensor([*map(list, zip(*b.to_pydict().values(), strict=True))]),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader("shuffled"),
        lambda: loader("one rank"),
        arrow_feed,
        pytest.param(lambda: loader("own generator"), marks=pytest.mark.slow),
        pytest.param(lambda: loader("in order"), marks=pytest.mark.slow),
    ],
)
def test_a_plain_module_in_lightnings_own_loop_continues_too(make, tmp_path, caplog):
    whole = rows_seen(tmp_path / "whole", 10, make(), PlainSees)
    for cut in (3, 4, 5, 8):  # an epoch has 4 batches
        rows_seen(tmp_path / f"cut{cut}", cut, make(), PlainSees)
        assert rows_seen(tmp_path / f"cut{cut}", 10, make(), PlainSees) == whole, cut
    for steps in (2, 3, 7, 10):
        seen = rows_seen(tmp_path / "often", steps, make(), PlainSees)
    assert seen == whole
    assert "keeps no position" not in caplog.text


@pytest.mark.parametrize("batch_size", [3, 5, None])
def test_a_resume_takes_another_number_of_workers_and_draws_no_more_than_a_loader_that_was_not_left(batch_size):
    def made(workers=0):
        generator = torch.Generator().manual_seed(7)
        return with_position(DataLoader(Rows(), batch_size, shuffle=True, generator=generator, num_workers=workers))

    first, whole = made(), made(workers=1)
    batches = iter(first)
    taken = [next(batches), next(batches)] if batch_size != 5 else [next(batches)]
    again = made(workers=1)
    again.load_state_dict(first.state_dict())

    left, every = (
        list(islice(iter(each), count)) for each, count in ((again, len(whole) - len(taken)), (whole, len(whole)))
    )
    rows, expected = ([batch[..., 0].flatten().tolist() for batch in found] for found in (taken + left, every))
    assert rows == expected
    assert torch.equal(again.generator.get_state(), whole.generator.get_state())


def test_other_rows_are_refused_within_an_epoch_alone():
    first = with_position(loader("shuffled"))
    between = first.state_dict()
    next(iter(first))
    other = with_position(DataLoader(Rows(11), 3, shuffle=True))

    with refusal(InputError):
        with_position(loader("shuffled", 2)).load_state_dict(first.state_dict())
    with refusal(InputError):
        other.load_state_dict(first.state_dict())
    other.load_state_dict(between)


class Noisy(Rows):
    """Row i is i, with noise from every kind of generator; one of its own is made by `init`."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.own = np.random.default_rng(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(()).item(), random.random(), np.random.rand(), self.own.random()]
        return torch.tensor([index, *noise, get_worker_info().id if get_worker_info() else -1], dtype=torch.float64)


def init(worker: int) -> None:
    get_worker_info().dataset.own = random.Random(worker)


def noisy(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) + random.random() / 1e3


WORKERS: dict[str, dict[str, Any]] = {
    "none": {"batch_size": 3, "shuffle": True},
    "two": {"batch_size": 3, "shuffle": True, "num_workers": 2},
    "persistent": {"batch_size": 3, "shuffle": True, "num_workers": 3, "persistent_workers": True},
    "one by one": {"batch_size": None, "num_workers": 2, "persistent_workers": True},
    "own functions": {"batch_size": 2, "num_workers": 2, "worker_init_fn": init, "collate_fn": noisy},
    "own generator": {"batch_size": 2, "shuffle": True, "num_workers": 2, "generator": 5},
    "kept generator": {"batch_size": 3, "shuffle": True, "num_workers": 1, "persistent_workers": True, "generator": 5},
}


def with_workers(kind: str, **options: Any) -> DataLoader[Any]:
    chosen = {**WORKERS[kind], **options}
    if "generator" in chosen:
        chosen["generator"] = torch.Generator().manual_seed(chosen["generator"])
    return DataLoader(Noisy(), **chosen)


FAST = {Sees: ("none", "two", "own functions"), PlainSees: ("persistent",)}


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        pytest.param(kind, module, marks=[] if kind in FAST[module] else pytest.mark.slow)
        for kind in WORKERS
        for module in FAST
    ],
)
def test_random_numbers_drawn_in_workers_and_datasets_continue_after_a_resume(kind, module, tmp_path):
    whole = rows_seen(tmp_path / "whole", 13, with_workers(kind), module)
    for steps in (2, 8, 13):  # an epoch has 4, 5 or 10 batches
        seen = rows_seen(tmp_path / "cut", steps, with_workers(kind), module)
    assert seen == whole
    assert len({number for row in seen for number in row[1:5]}) > 4


@pytest.mark.parametrize(
    ("before", "after", "is_warned"),
    [
        ({"num_workers": 2}, {"num_workers": 1}, True),
        ({"num_workers": 0}, {"num_workers": 2}, True),
        ({"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}, True),
        ({"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 4}, False),
    ],
)
def test_other_workers_are_warned_of_once_at_the_resume(before, after, is_warned, tmp_path, caplog):
    rows_seen(tmp_path, 2, with_workers("none", **before))
    seen = rows_seen(tmp_path, 4, with_workers("none", **after))
    rows = [row for batch in seen for row in batch[:-1:6]]
    assert sorted(rows) == list(range(10))
    assert sum("random numbers drawn" in record.message for record in caplog.records) == is_warned


def test_workers_that_draw_nothing_may_change_without_a_warning(tmp_path, caplog):
    def of_rows(workers: int) -> DataLoader[Any]:
        return DataLoader(torch.utils.data.TensorDataset(torch.arange(10.0)), 3, shuffle=True, num_workers=workers)

    for workers, steps in ((2, 2), (1, 4)):
        rows_seen(tmp_path, steps, of_rows(workers), TakesLists)
    assert "random numbers drawn" not in caplog.text


class Asks(pl.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, *_, **__: trainer.estimated_stepping_batches)


class SchedulesByLength(PlainSees):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


MODULES: list[tuple[Any, str | None]] = [
    (lambda: SchedulesByLength(), None),
    (lambda: PlainSees(), "setup"),
    (lambda: PlainSees(), "on_fit_start"),
    (lambda: ContractModule(Sees(), TrainingJobSpec("r", 12)), "setup"),
    (lambda: ContractModule(Sees(), TrainingJobSpec("r", 12)), "on_fit_start"),
]


@pytest.mark.parametrize(
    ("make", "hook", "given"),
    [
        *((*module, lambda: loader("shuffled")) for module in MODULES),
        *(pytest.param(*module, lambda: with_workers("persistent"), marks=pytest.mark.slow) for module in MODULES),
    ],
)
def test_loaders_keep_their_place_if_the_length_is_asked_for_before_it_is_restored(make, hook, given, tmp_path):
    def run(folder: Path, stop: int | None = None) -> list[list[float]]:
        seed(7)
        module = make()
        callbacks: list[pl.Callback] = [] if hook is None else [Asks(hook)]
        callbacks.append(Checkpoint(folder, every_n_steps=1, keep_last=None, save_final=False))
        if stop is not None:
            callbacks.append(StopsAfter(stop))
        trainer = quiet_trainer(*callbacks, max_steps=-1, max_epochs=3, default_root_dir=folder)
        records = newest_valid(folder)[0] if folder.exists() else None
        trainer.fit(module, given(), ckpt_path=records and records.path)
        seen: list[list[float]] = getattr(module, "seen", None) or module.contract_state["seen"]
        return seen

    whole = run(tmp_path / "whole")
    with pytest.raises(TimeoutError):
        run(tmp_path / "cut", 6)
    assert run(tmp_path / "cut") == whole
    assert len(whole) == 12


class Stream:
    def __init__(self, rows: int = 5, made: Any = torch.tensor) -> None:
        self.at, self.rows, self.made = 0, rows, made

    def __iter__(self) -> Any:
        while self.at < self.rows:
            self.at += 1
            yield self.made([float(self.at), torch.rand(()).item()])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class TakesStreams(PlainSees):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, Odd):
            batch = torch.tensor(batch.row)
        return super().training_step(
            torch.cat([part.flatten() for part in batch.values()]) if isinstance(batch, dict) else batch, batch_idx
        )


class Odd:
    def __init__(self, row: list[float]) -> None:
        self.row, self.lock = row, threading.Lock()


@pytest.mark.parametrize(
    "given",
    [
        Stream,
        lambda: {"a": Stream(), "b": Stream()},
        lambda: {"a": Stream(), "b": with_workers("none", batch_size=2)},
        lambda: {"a": Stream(2), "b": Stream(4), "c": Stream(3)},
    ],
)
def test_a_batch_that_lightning_fetched_ahead_of_the_checkpoint_is_not_lost(given, tmp_path, caplog):
    whole = rows_seen(tmp_path / "whole", 9, given(), TakesStreams)
    for steps in (1, 3, 4, 7, 8, 9):
        seen = rows_seen(tmp_path / "cut", steps, given(), TakesStreams)
    assert seen == whole
    assert "is lost" not in caplog.text


def test_a_batch_fetched_ahead_that_cannot_be_stored_is_warned_of(tmp_path, caplog):
    for steps in (2, 3):
        seen = rows_seen(tmp_path, steps, Stream(made=Odd), TakesStreams)
    assert [row[0] for row in seen] == [1, 2, 4]
    assert sum("is lost" in record.message for record in caplog.records) == 1


class StopsAfter(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise TimeoutError


class TakesLists(Sees):
    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw[0]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from iter(int, 1)


class IteratesItself(DataLoader[Any]):
    """A subclass that decides by itself what it delivers."""

    def __iter__(self) -> Any:
        return map(torch.neg, super().__iter__())


@pytest.mark.parametrize(
    "given",
    [DataLoader(Endless()), IteratesItself(Rows()), DataLoader(Rows(), num_workers=2, in_order=False), [1, 2]],
    ids=["stream", "own iteration", "any order", "list"],
)
def test_a_loader_that_torch_does_not_drive_row_by_row_stays_as_it_is(given):
    assert with_position(given) is given


@pytest.mark.parametrize("cut", [4, 5, 9])
def test_a_resume_knows_which_of_several_streams_had_already_ended(cut, tmp_path):
    def streams() -> dict[str, Any]:
        return {"a": Stream(3), "b": Stream(5)}

    whole = rows_seen(tmp_path / "whole", 12, streams(), TakesDicts)
    rows_seen(tmp_path / "cut", cut, streams(), TakesDicts)
    assert rows_seen(tmp_path / "cut", 12, streams(), TakesDicts) == whole


class TakesDicts(Sees):
    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return torch.cat([part.flatten() for part in raw.values()])
