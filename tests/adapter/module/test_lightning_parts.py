"""Lightning's own callbacks, loggers, profilers and Trainer flags with a trainer of the contract, one by one."""

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StartupContractError, StepResult, TrainingJobSpec
from support.trainer_class import Trains
from support.trainers import quiet_trainer


class Regression(Trains):
    """A linear regression with its own AdamW and scheduler, as a user would write it."""

    def __init__(self, reported: float | None = None) -> None:
        self.reported = reported
        self.seen: list[int] = []

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        return {**state, "scheduler": torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, gamma=0.5)}

    def prepare_batch(self, raw: torch.Tensor, state: Any, ctx: Any) -> torch.Tensor:
        self.seen.append(int(raw[0, 0]))
        return raw / 100

    def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        state["scheduler"].step()
        return result if self.reported is None else StepResult({"loss": self.reported})


def batches(number: int = 10) -> DataLoader[Any]:
    """Batches of two rows that carry their number."""
    return DataLoader([torch.full((2, 2), float(i)) for i in range(number)], batch_size=None)


def fit(
    tmp_path: Path, *callbacks: pl.Callback, steps: int = 6, plugin: Regression | None = None, **settings: Any
) -> tuple[pl.Trainer, ContractModule]:
    """Train a regression with one stock part."""
    module = ContractModule(plugin or Regression(), TrainingJobSpec("parts", steps, metric_every=2))
    trainer = quiet_trainer(
        *callbacks, **{"max_steps": steps, "default_root_dir": tmp_path, "log_every_n_steps": 1, **settings}
    )
    trainer.fit(module, batches())
    return trainer, module


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
def test_model_checkpoint_monitors_the_loss_of_any_step(tmp_path: Path) -> None:
    """A monitor sees the metrics of the current step, also between metric cadences."""
    checkpoint = ModelCheckpoint(tmp_path, monitor="train/loss", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]
    assert Path(checkpoint.best_model_path).exists()
    assert checkpoint.best_model_score is not None


@pytest.mark.parametrize(
    ("stopping", "step"),
    [(EarlyStopping("train/loss", patience=1, check_on_train_epoch_end=True), 20), (Timer(timedelta(0)), 0)],
    ids=["early stopping", "timer"],
)
def test_a_stop_of_a_callback_ends_the_run_as_completed(tmp_path: Path, stopping: pl.Callback, step: int) -> None:
    """A loss that never falls stops at the end of the second epoch, a timer without time before the first step."""
    trainer, module = fit(tmp_path, stopping, steps=100, plugin=Regression(reported=1.0))
    assert (trainer.global_step, module.stopped) == (step, "should_stop")


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`:UserWarning")
def test_monitors_and_loggers_get_their_values(tmp_path: Path) -> None:
    """Metrics arrive at the cadence of two steps, the values of the monitors in each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitors = (LearningRateMonitor("step"), ThroughputMonitor(len, window_size=2), DeviceStatsMonitor(cpu_stats=True))
    fit(tmp_path, *monitors, logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)])
    (path,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))

    assert [int(row["step"]) for row in rows if row["train/loss"] and row["train/lr"]] == [2, 4, 6]
    rates = [float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]]
    assert rates == pytest.approx([0.1 * 0.5**k for k in range(6)]), "the rate of the trainer's own scheduler"
    assert [float(row["train/samples"]) for row in rows if row["train/samples"]] == [2.0 * k for k in range(1, 7)]
    assert any("cpu_percent" in name for row in rows for name, value in row.items() if value)
    accumulator = EventAccumulator(str(next(tmp_path.rglob("events.out.*")).parent))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == [2, 4, 6]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_loss(tmp_path: Path, bar: type[pl.Callback], capfd: pytest.CaptureFixture[str]) -> None:
    """Stock bars draw, and find the metrics of the cadence."""
    trainer, _ = fit(tmp_path, bar(), enable_progress_bar=True)
    assert "train/loss" in trainer.progress_bar_metrics
    out, err = capfd.readouterr()
    assert "train/loss" in out + err


def test_torchs_profiler_traces_steps_and_the_run_ends_well(tmp_path: Path) -> None:
    """It starts at Lightning's name for a training step, and fails at the end if that name never came."""
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="trace", emit_nvtx=False)
    trainer, _ = fit(tmp_path, profiler=profiler)
    assert trainer.state.finished
    assert list(tmp_path.glob("*trace*"))


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({"fast_dev_run": 2}, [0, 1]),
        ({"limit_train_batches": 3}, [0, 1, 2, 0, 1, 2, 0]),
        ({"overfit_batches": 2}, [0, 1, 0, 1, 0, 1, 0]),
    ],
    ids=str,
)
def test_settings_that_limit_batches_hold(tmp_path: Path, settings: dict[str, Any], seen: list[int]) -> None:
    _, module = fit(tmp_path, steps=7, **settings)
    assert module.plugin.seen == seen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("setting", "word"), [({"accumulate_grad_batches": 4}, "accumulation"), ({"gradient_clip_val": 1.0}, "clipping")]
)
def test_what_the_trainer_owns_is_refused(tmp_path: Path, setting: dict[str, Any], word: str) -> None:
    with pytest.raises(StartupContractError, match=f"the trainer class owns .*{word}"):
        fit(tmp_path, **setting)


def test_a_module_hook_that_returns_minus_one_ends_the_epoch(tmp_path: Path) -> None:
    class SkipsAfterTwo(ContractModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    plugin = Regression()
    module = SkipsAfterTwo(plugin, TrainingJobSpec("skip", 5))
    trainer = quiet_trainer(max_steps=5, default_root_dir=tmp_path)
    trainer.fit(module, batches())
    assert plugin.seen == [0, 1, 0, 1, 0]


def test_hyperparameters_of_a_job_reach_every_logger(tmp_path: Path) -> None:
    """The hyperparameters arrive like a LightningModule's; a checkpoint does not hold them, since a job names them."""
    told: list[Any] = []

    class Told(CSVLogger):
        def log_hyperparams(self, params: Any = None, *_: Any) -> None:
            told.append(dict(params))

    job = TrainingJobSpec("parts", 2, hyperparams={"lr": 0.1, "model": {"depth": 2}})
    trainer = quiet_trainer(
        max_steps=2, logger=[CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b"), Told(tmp_path / "c")]
    )
    module = ContractModule(Regression(), job)
    trainer.fit(module, batches())
    assert told == [{"lr": 0.1, "model": {"depth": 2}}]
    for path in (*tmp_path.glob("a/**/hparams.yaml"), *tmp_path.glob("b/**/hparams.yaml")):
        assert "depth: 2" in path.read_text()
    assert dict(module.hparams) == {}


def test_hyperparameters_of_a_subclass_are_logged_with_those_of_the_job(tmp_path: Path) -> None:
    """`save_hyperparameters` of a subclass keeps its meaning."""

    class Saves(ContractModule):
        def __init__(self, job: TrainingJobSpec, depth: int) -> None:
            super().__init__(Regression(), job)
            self.save_hyperparameters("depth")

    module = Saves(TrainingJobSpec("parts", 1, hyperparams={"lr": 0.1}), depth=3)
    assert dict(module.hparams_initial) == {"lr": 0.1, "depth": 3}
    assert dict(module.hparams) == {"depth": 3}
