"""The ends of epochs: due validations, and a resume from there as from any other step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, MockDataModule, StepResult, TrainingCanceled, TrainingJobSpec
from genlight.callbacks import Checkpoint
from support.messages import refusal
from support.stopping import StopsAt
from support.trainer_class import Stateless
from support.trainers import quiet_trainer

BATCHES = 2
"""Number of batches in an epoch."""


class Drawing(Stateless):
    """A trainer without torch whose loss is a random number."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        return StepResult(metrics={"loss": float(torch.rand(()))})


class Validated(ContractModule):
    """A module with a validation that draws random numbers, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", torch.rand(()))


class Unsized:
    """A loader without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(BATCHES)))


class Positioned:
    """A loader with a length and a position that starts again after it raised StopIteration.

    torchdata's StatefulDataLoader does the same; the loop of an epoch stops when it has all batches.
    """

    def __init__(self, count: int = BATCHES) -> None:
        self.count, self.next = count, 0
        self.loaded: int | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.next, self.loaded = self.loaded or 0, None
        return self

    def __next__(self) -> torch.Tensor:
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        return torch.tensor(self.next - 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["next"]


class Lazy(Positioned):
    """A loader that reads its position when the first batch is fetched."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        super().__iter__()
        while self.next < self.count:
            self.next += 1
            yield torch.tensor(self.next - 1.0)
        self.next = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = self.loaded = state["next"]


class LazyUnsized(Lazy):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]


def numbers(count: int = BATCHES) -> DataLoader[Any]:
    """Torch's own loader; it has no position and is at the beginning after a resume."""
    return DataLoader(list(torch.arange(float(count))), batch_size=None)  # type: ignore[arg-type]


class Story(pl.Callback):
    """A record of each event, and a checkpoint at one of them."""

    def __init__(self, save_at: tuple[str, int] | None = None, path: Path | None = None) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.save_at, self.path = save_at, path
        self.saved_behind = 0

    def _note(self, trainer: pl.Trainer, *event: Any) -> None:
        self.events.append((*event, trainer.current_epoch, trainer.global_step))
        if (event[0], trainer.global_step) == self.save_at:
            assert self.path is not None
            trainer.save_checkpoint(self.path)
            self.saved_behind = len(self.events)

    def hooks(self) -> list[tuple[str, int, int]]:
        """The events without random numbers: name, epoch, completed steps."""
        return [(name, epoch, step) for name, *_, epoch, step in self.events]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "epoch")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note(trainer, "step", batch_idx, repr(batch), outputs["loss"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "validation", float(trainer.callback_metrics.get("val/score", 0.0)))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, "epoch end", float(trainer.callback_metrics["train/loss"]))


def fit(
    folder: Path,
    loader: Any,
    *callbacks: pl.Callback,
    module: ContractModule | None = None,
    ckpt: Path | None = None,
    validation: Any = None,
    **settings: Any,
) -> pl.Trainer:
    """Train three epochs with a validation after each, or as `settings` say."""
    torch.manual_seed(5)
    defaults: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0, "default_root_dir": folder}
    trainer = quiet_trainer(*callbacks, **{**defaults, **settings})
    module = module or Validated(Drawing())
    validation = validation or (numbers() if isinstance(module, Validated) else None)
    trainer.fit(module, loader, val_dataloaders=validation, ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


def saving(folder: Path) -> Checkpoint:
    """Durable checkpoints without a cadence."""
    return Checkpoint(folder / "c", save_final=False)


def test_a_loader_without_length_is_validated_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    """Lightning fetches one batch ahead to know the end; this loop learns it when no batch is left."""
    unsized, sized = Story(), Story()
    fit(tmp_path, Unsized(), saving(tmp_path), unsized)
    fit(tmp_path, numbers(), saving(tmp_path), sized)
    assert ("validation", 0, BATCHES) in unsized.hooks()
    assert unsized.hooks() == sized.hooks()


@pytest.mark.parametrize("settings", [{"max_epochs": 3}, {"max_steps": 3 * BATCHES}], ids=["epochs", "steps"])
@pytest.mark.parametrize("point", ["step", "validation", "epoch end", "epoch"])
@pytest.mark.parametrize("loader", [Positioned, Lazy, LazyUnsized, numbers])
def test_a_run_resumed_from_the_end_of_an_epoch_continues_exactly(
    tmp_path: Path, loader: Callable[[], Any], point: str, settings: dict[str, Any]
) -> None:
    """No batch is repeated or skipped, and a validation that was due after the checkpoint runs first."""
    whole = Story((point, BATCHES), tmp_path / "saved.json")
    fit(tmp_path, loader(), saving(tmp_path), whole, **settings)
    rest = Story()
    fit(tmp_path, loader(), saving(tmp_path), rest, ckpt=tmp_path / "saved.json", **settings)
    assert whole.saved_behind
    # The beginning of an epoch is repeated if none of its batches was trained.
    assert rest.events == whole.events[whole.saved_behind - (point == "epoch") :]


@pytest.mark.parametrize("point", ["step", "epoch end"])
@pytest.mark.parametrize(
    ("loader", "limits"),
    [
        (lambda: Positioned(3), {"limit_train_batches": BATCHES}),
        (lambda: Lazy(3), {"limit_train_batches": BATCHES}),
        (lambda: LazyUnsized(3), {"limit_train_batches": BATCHES}),
        (lambda: MockDataModule(range(3)).feed, {"limit_train_batches": BATCHES}),
        (lambda: Positioned(3), {"overfit_batches": BATCHES}),
        (lambda: CombinedLoader({"a": Positioned(BATCHES), "b": Lazy(3)}, "min_size"), {}),
    ],
    ids=["positioned", "lazy", "unsized", "mock", "overfit", "combined"],
)
def test_a_resume_from_the_end_of_an_epoch_that_was_cut_leaves_the_rest_of_the_loader(
    tmp_path: Path, loader: Callable[[], Any], limits: dict[str, Any], point: str
) -> None:
    """The loop begins each epoch with a new pass, also after a resume."""
    whole, rest = Story((point, BATCHES), tmp_path / "saved.json"), Story()
    fit(tmp_path, loader(), saving(tmp_path), whole, **limits)
    fit(tmp_path, loader(), saving(tmp_path), rest, ckpt=tmp_path / "saved.json", **limits)
    assert rest.events == whole.events[whole.saved_behind :]


def test_a_run_may_be_resumed_twice_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """The first resume is at its validation; the second at its end, which the second attempt reached without a step."""
    whole, first, second = (
        Story(),
        Story(("validation", BATCHES), tmp_path / "1.json"),
        Story(("epoch end", BATCHES), tmp_path / "2.json"),
    )
    fit(tmp_path, LazyUnsized(), saving(tmp_path), whole)
    fit(tmp_path, LazyUnsized(), saving(tmp_path), first)
    fit(tmp_path, LazyUnsized(), saving(tmp_path), second, ckpt=tmp_path / "1.json")
    third = Story()
    fit(tmp_path, LazyUnsized(), saving(tmp_path), third, ckpt=tmp_path / "2.json")
    assert [*first.events[: first.saved_behind], *second.events[: second.saved_behind], *third.events] == whole.events


def test_the_first_validation_after_a_resume_within_an_epoch_sees_the_whole_set(tmp_path: Path) -> None:
    """The counters of the validation before the checkpoint do not affect the next validation."""
    seen: list[int] = []

    class Counted(ContractModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    settings = {"val_check_interval": 2, "validation": numbers(4)}
    saved = tmp_path / "saved.json"
    story = Story(("step", 3), saved)
    fit(tmp_path, numbers(4), saving(tmp_path), story, module=Counted(Drawing()), max_epochs=1, **settings)
    seen.clear()
    fit(tmp_path, numbers(4), saving(tmp_path), module=Counted(Drawing()), ckpt=saved, max_epochs=1, **settings)
    assert seen == [0, 1, 2, 3]


class Trainers(pl.Callback):
    """Keeps the trainer of a fit that fails."""

    trainer: pl.Trainer

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer


def test_a_stop_does_not_wait_for_a_validation_and_the_next_attempt_runs_it(tmp_path: Path) -> None:
    """A preempted machine has seconds; a validation may take an hour."""
    whole, first, second = Story(), Story(), Story()
    fit(tmp_path, Positioned(), saving(tmp_path), whole)
    with pytest.raises(TrainingCanceled):
        fit(tmp_path, Positioned(), StopsAt(BATCHES), saving(tmp_path), first)
    saved = tmp_path / "c" / f"step-{BATCHES:08d}.json"
    fit(tmp_path, Positioned(), saving(tmp_path), second, ckpt=saved)
    assert first.events[-1][0] == "step"
    assert first.events + second.events == whole.events


@pytest.mark.parametrize("module", [ContractModule, Validated])
@pytest.mark.parametrize(
    "monitor",
    [EarlyStopping("train/loss", check_on_train_epoch_end=True), ModelCheckpoint(monitor="train/loss")],
    ids=["early stopping", "model checkpoint"],
)
def test_a_monitor_at_the_end_of_an_epoch_finds_the_metrics_of_the_last_step_after_a_resume_from_it(
    tmp_path: Path, module: type[ContractModule], monitor: pl.Callback
) -> None:
    """The run was killed after the checkpoint of that step, and the monitor reads its value before any step."""
    every_epoch = Checkpoint(tmp_path / "c", every_n_steps=BATCHES, save_final=False)
    fit(tmp_path, Positioned(), every_epoch, module=module(Drawing()), max_epochs=1)
    saved = tmp_path / "c" / f"step-{BATCHES:08d}.json"
    trainer = fit(tmp_path, Positioned(), saving(tmp_path), monitor, module=module(Drawing()), ckpt=saved, max_epochs=2)
    assert trainer.global_step == 2 * BATCHES


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_train_batch_end"])
def test_a_stop_iteration_from_a_hook_is_an_error(tmp_path: Path, event: str) -> None:
    """Otherwise the run would end there as if it were complete."""

    class Stops(pl.Callback):
        pass

    def stop(*_: Any) -> None:
        next(iter(()))

    setattr(Stops, event, stop)
    with refusal(RuntimeError):
        fit(tmp_path, numbers(), saving(tmp_path), Stops())


def test_a_second_fit_trains_with_its_own_loader_after_the_first_ones_had_ended(tmp_path: Path) -> None:
    module = ContractModule(Drawing(), TrainingJobSpec("twice", 6))
    batches = iter([0.0, 1.0])

    class OnePass:
        def __iter__(self) -> Iterator[float]:
            return batches

    trainer = fit(tmp_path, OnePass(), saving(tmp_path), module=module, max_epochs=None, max_steps=6)
    assert (trainer.global_step, module.stopped) == (2, "data_exhausted")
    trainer.fit(module, numbers())
    assert (trainer.global_step, module.stopped) == (6, None)


def test_a_second_fit_of_a_stopped_trainer_continues_training(tmp_path: Path) -> None:
    module = Validated(Drawing())
    stopped = Trainers()
    with pytest.raises(TrainingCanceled):
        fit(tmp_path, numbers(), StopsAt(BATCHES), stopped, saving(tmp_path), module=module)
    stopped.trainer.fit(module, numbers(), val_dataloaders=numbers())
    assert stopped.trainer.global_step > BATCHES


def test_a_module_that_refuses_every_batch_has_no_empty_source(tmp_path: Path) -> None:
    """`on_train_batch_start` returning -1 at the first batch of an epoch skips that epoch, as in Lightning."""

    class Refuses(ContractModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 else None

    trainer = fit(tmp_path, numbers(), saving(tmp_path), module=Refuses(Drawing()))
    assert trainer.global_step == 2 * BATCHES
