"""A loader continues in the middle of an epoch, whatever sampler chooses its rows, or says that it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from support.resumed_fit import rows_seen

pytestmark = pytest.mark.promise(name="resume")

ROWS = 20


class Rows(Dataset[Any]):
    """Row i is i; a size that comes with the index is its second column."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: Any) -> torch.Tensor:
        row, size = index if isinstance(index, tuple) else (index, 1)
        return torch.tensor([int(row), size])


class Draws(Sampler[Any]):
    def __init__(self, draw: Callable[[Any], Any], **attributes: Any) -> None:
        self.draw, self.epoch = draw, 0
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter(self.draw(self))

    def __len__(self) -> int:
        return ROWS


def shuffled_in_place(sampler: Any) -> Any:
    random.shuffle(sampler.rows)
    return sampler.rows


def shuffled_buckets(sampler: Any) -> Any:
    """Batches of rows of the same length, as language models use them."""
    for bucket in sampler.buckets.values():
        sampler.generator.shuffle(bucket)
    return [bucket[start : start + 3] for bucket in sampler.buckets.values() for start in range(0, len(bucket), 3)]


def batches_of_random_sizes(sampler: Any) -> Iterator[Any]:
    rows = torch.randperm(ROWS).tolist()
    while rows:
        size = random.randint(1, 4)
        yield [(row, size) for row in rows[:size]]
        rows = rows[size:]


def sampler(kind: str) -> dict[str, Any]:
    as_sampler: dict[str, Callable[[], Any]] = {
        "python": lambda: Draws(lambda _: random.sample(range(ROWS), ROWS)),
        "numpy": lambda: Draws(lambda _: np.random.permutation(ROWS)),
        "own generator": lambda: Draws(lambda own: own.rng.permutation(ROWS), rng=np.random.default_rng(1)),
        "counts epochs": lambda: Draws(lambda own: np.random.default_rng(own.epoch).permutation(ROWS)),
        "shuffles in place": lambda: Draws(shuffled_in_place, rows=list(range(ROWS))),
        "shuffles an array": lambda: Draws(
            lambda own: (np.random.shuffle(own.rows), own.rows)[1], rows=np.arange(ROWS)
        ),
        "row by row": lambda: Draws(lambda _: (random.randrange(ROWS) for _ in range(ROWS))),
        "around another": lambda: Draws(
            lambda own: own.inner, inner=RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(2))
        ),
    }
    if kind in as_sampler:
        return {"sampler": as_sampler[kind](), "batch_size": 3}
    if kind == "buckets":
        buckets = {length: list(range(length, ROWS, 3)) for length in range(3)}
        return {"batch_sampler": Draws(shuffled_buckets, buckets=buckets, generator=random.Random(4))}
    return {"batch_sampler": Draws(batches_of_random_sizes)}


KINDS = [
    *("python", "numpy", "own generator", "counts epochs", "shuffles in place", "shuffles an array", "row by row"),
    *("around another", "buckets", "random sizes"),
]


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
SLOW = [(WORKERS[1], 2), (WORKERS[2], 10)] * 5


@pytest.mark.parametrize(
    ("kind", "workers", "cut"),
    [
        *((kind, {}, 9) for kind in KINDS),
        ("buckets", WORKERS[1], 3),
        ("row by row", WORKERS[2], 9),
        *(
            pytest.param(kind, workers, cut, marks=pytest.mark.slow)
            for kind, (workers, cut) in zip(KINDS, SLOW, strict=True)
        ),
    ],
)
def test_a_resume_sees_what_an_unbroken_run_sees(kind, workers, cut, tmp_path, caplog):
    def loader() -> Any:
        return DataLoader(Rows(), **sampler(kind), **workers)

    whole = rows_seen(tmp_path / "whole", 16, loader())
    for steps in (cut, cut + 1):
        rows_seen(tmp_path / "cut", steps, loader())
    assert rows_seen(tmp_path / "cut", 16, loader()) == whole
    assert not [record for record in caplog.records if "continues within an epoch" in record.message]


def test_a_setting_of_a_sampler_that_was_changed_for_a_resume_is_not_put_back(tmp_path):
    samplers = [Draws(lambda own: range(0, own.stride * ROWS // 2, own.stride), stride=stride) for stride in (1, 2)]
    for steps, sampler_of_run in zip((4, 6), samplers, strict=True):
        rows_seen(tmp_path / "c", steps, DataLoader(Rows(), 5, sampler=sampler_of_run))
    assert [(each.stride, each.epoch) for each in samplers] == [(1, 2), (2, 3)]


@pytest.mark.parametrize("workers", WORKERS[:2], ids=repr)
def test_an_epoch_that_ends_early_leaves_the_sampler_as_in_an_unbroken_run(workers, tmp_path):
    def loader() -> Any:
        return DataLoader(Rows(), **sampler("own generator"), **workers)

    whole = rows_seen(tmp_path / "whole", 9, loader(), limit_train_batches=3)
    rows_seen(tmp_path / "cut", 3, loader(), limit_train_batches=3)
    assert rows_seen(tmp_path / "cut", 9, loader(), limit_train_batches=3) == whole


class Batches(DataLoader[Any]):
    """A subclass that changes only how rows become a batch, as those of graph libraries do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Rows(), 3, shuffle=True, collate_fn=torch.stack, **options)


@pytest.mark.parametrize("workers", WORKERS[::2], ids=repr)
def test_a_subclass_of_a_loader_keeps_its_position(workers, tmp_path):
    whole = rows_seen(tmp_path / "whole", 12, Batches(**workers))
    rows_seen(tmp_path / "cut", 9, Batches(**workers))
    assert rows_seen(tmp_path / "cut", 12, Batches(**workers)) == whole


numbers = count()


class Serial:
    def __init__(self) -> None:
        self.value = next(numbers)


@pytest.mark.parametrize(
    ("draw", "workers"),
    [
        (lambda _: np.random.default_rng(next(numbers)).permutation(ROWS), {}),
        (lambda own: np.random.default_rng(own.secret.value).permutation(ROWS), {"num_workers": 1}),
        (lambda _: [f"{row}" for row in np.random.default_rng(next(numbers)).permutation(ROWS)], {}),
    ],
    ids=["global counter", "object", "texts"],
)
def test_an_order_that_cannot_be_repeated_is_said_and_begins_again(draw, workers, tmp_path, caplog):
    def loader() -> Any:
        return DataLoader(Rows(), 3, sampler=Draws(draw, secret=Serial()), **workers)

    rows_seen(tmp_path / "c", 3, loader())
    rows_seen(tmp_path / "c", 5, loader())
    warnings = [record.message for record in caplog.records if "does not repeat the order" in record.message]
    assert len(warnings) == 1
