"""Every hook of callbacks and modules comes as under Lightning's own loop: in its order, with its counters."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule
from support.trainer_class import Counts, Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="equal")

CALLS = "calls"
"""Attribute in which a module keeps its records."""

OF_CALLBACKS = [name for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction) if name.startswith("on_")]
OF_MODULES = [name for name, _ in inspect.getmembers(ModelHooks, inspect.isfunction) if name.startswith("on_")]
"""A module also has hooks that transfer batches; in genlight's loop the trainer class does that."""


class Updating(Trains):
    """A trainer whose step is one update, in the order of Lightning's automatic optimization."""

    prepare_batch = Counts.prepare_batch  # several loaders make batches of several kinds

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return state["model"](torch.ones(2)).sum()  # type: ignore[no-any-return]


class Stock(pl.LightningModule):
    """The same under Lightning's own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(1)).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def what_is_visible(trainer: pl.Trainer) -> tuple[Any, ...]:
    """Counters and flags that a hook may read."""
    loop = trainer.fit_loop.epoch_loop
    progress = (loop.batch_progress, trainer.fit_loop.epoch_progress, loop.val_loop.batch_progress)
    counters = [sorted(vars(tracker).items()) for each in progress for tracker in (each.current, each.total)]
    flags = (trainer.is_last_batch, trainer.should_stop, trainer.validating, trainer.sanity_checking)
    numbers = (trainer.global_step, trainer.current_epoch, loop.batch_idx, loop.total_batch_idx)
    return (*numbers, loop._batches_that_stepped, *flags, counters)


def _record(calls: list[Any], trainer: pl.Trainer | None, who: str, name: str, args: tuple[Any, ...]) -> None:
    numbers = [arg for arg in args if isinstance(arg, int)]  # the index of the batch, and of its loader
    calls.append((who, name, numbers, what_is_visible(trainer) if trainer is not None else ()))


class Recorder(pl.Callback):
    """Records every hook in a list."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls


def _callback_hook(name: str) -> Callable[..., None]:
    def hook(self: Recorder, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        _record(self.calls, trainer, "callback", name, args)

    return hook


for _name in OF_CALLBACKS:
    setattr(Recorder, _name, _callback_hook(_name))


def recorded(base: type[pl.LightningModule], *, validates: bool) -> type[pl.LightningModule]:
    """A subclass that records every hook in the list ``calls`` of the instance."""

    def module_hook(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any) -> Any:
            _record(vars(self).setdefault(CALLS, []), self._trainer, "module", name, args)
            return getattr(super(cls, self), name)(*args)

        return hook

    body: dict[str, Any] = {name: module_hook(name) for name in OF_MODULES}
    if validates:
        body["validation_step"] = lambda self, batch, batch_idx: None
    cls = type(f"Recorded{base.__name__}", (base,), body)
    return cls


def numbers(count: int) -> DataLoader[Any]:
    """Batches of one number."""
    return DataLoader([torch.tensor(float(i)) for i in range(count)], batch_size=None)  # type: ignore[arg-type]


class Unsized:
    """A loader without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0))


def calls_of(
    folder: Path, module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, validates: bool, **settings: Any
) -> list[Any]:
    """The calls of a fit."""
    calls: list[Any] = vars(module).setdefault(CALLS, [])
    trainer = quiet_trainer(Recorder(calls), *callbacks, default_root_dir=folder, **settings)
    trainer.fit(module, loader(), val_dataloaders=numbers(2) if validates else None)
    return calls


def compare(folder: Path, loader: Any, make: Callable[[], Any] = list, *, validates: bool, **settings: Any) -> None:
    """Fail if the calls of both loops differ; `make` makes further callbacks."""
    stock = recorded(Stock, validates=validates)()
    ours = recorded(ContractModule, validates=validates)(Updating())
    expected = calls_of(folder, stock, loader, *make(), validates=validates, **settings)
    found = calls_of(folder, ours, loader, *make(), validates=validates, **settings)
    for number, (here, there) in enumerate(zip(found, expected, strict=False)):
        assert here == there, f"call {number}"
    assert len(found) == len(expected) > 0


@pytest.mark.parametrize("validates", [False, True], ids=["", "validation"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 7},
        {"max_steps": 5},
        {"max_epochs": 2},
        {"max_epochs": 3, "limit_train_batches": 2},
        {"max_epochs": 2, "limit_train_batches": 0.5},
        {"max_epochs": 2, "overfit_batches": 2},
        {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
        {"fast_dev_run": 2},
        {"max_epochs": 2, "val_check_interval": 2},
        {"max_epochs": 2, "val_check_interval": 0.4},
        {"max_steps": 13, "val_check_interval": 3, "check_val_every_n_epoch": None},
        {"max_epochs": 4, "check_val_every_n_epoch": 2},
        {"max_epochs": 2, "num_sanity_val_steps": 0, "profiler": "simple"},
    ],
    ids=str,
)
def test_every_hook_comes_when_and_as_it_does_in_lightning(
    tmp_path: Path, settings: dict[str, Any], validates: bool
) -> None:
    """The hooks of callbacks and of the module are in one list, in their order."""
    compare(tmp_path, lambda: numbers(5), validates=validates, **settings)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: {"a": numbers(3), "b": numbers(5)},
        lambda: [numbers(3), [numbers(4), numbers(2)]],
        lambda: CombinedLoader({"a": numbers(3), "b": numbers(5)}, "min_size"),
        lambda: CombinedLoader([numbers(3), numbers(5)], "max_size"),
    ],
    ids=["dict", "nested", "min_size", "max_size"],
)
def test_every_hook_comes_as_in_lightning_with_several_loaders(tmp_path: Path, loader: Callable[[], Any]) -> None:
    compare(tmp_path, loader, validates=True, max_epochs=2)


def test_every_hook_comes_as_in_lightning_if_a_loader_without_length_is_limited(tmp_path: Path) -> None:
    compare(tmp_path, Unsized, validates=True, max_epochs=2, limit_train_batches=3)


class Stops(pl.Callback):
    """Sets ``should_stop`` in one hook from the second step on."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._stop)

    @staticmethod
    def _stop(trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= 2 and not trainer.sanity_checking:
            trainer.should_stop = True


@pytest.mark.parametrize("least", [{}, {"min_epochs": 2}, {"min_steps": 8}], ids=str)
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_end"]
)
def test_every_hook_comes_as_in_lightning_if_a_callback_stops_the_run(
    tmp_path: Path, hook: str, least: dict[str, int]
) -> None:
    compare(tmp_path, lambda: numbers(5), lambda: [Stops(hook)], validates=True, max_epochs=3, **least)
