"""Lightning's own callbacks, loggers, profilers and Trainer flags with a trainer of the contract, one by one."""

from __future__ import annotations

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
from support.trainer_class import Stateless
from support.trainers import quiet_trainer


class Regression(Stateless):
    """A linear regression with its own AdamW and scheduler, as a user would write it."""

    def __init__(self, loss: Any = None) -> None:
        self.loss = loss
        self.seen: list[int] = []

    def configure(self, ctx: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }

    def prepare_batch(self, raw: torch.Tensor, state: Any, ctx: Any) -> torch.Tensor:
        self.seen.append(int(raw[0, 0]))
        return raw

    def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
        loss = state["model"](batch / 100).pow(2).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult(metrics={"loss": loss.detach() if self.loss is None else self.loss})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"model": state["model"].state_dict()}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["model"].load_state_dict(payload["model"])


def batches(number: int = 10) -> DataLoader[Any]:
    """Batches of two rows that carry their number."""
    return DataLoader([torch.full((2, 4), float(i)) for i in range(number)], batch_size=None)


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


def rows(root: Path) -> list[dict[str, str]]:
    """The lines of the CSV logger below `root`."""
    (path,) = root.rglob("metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning")
def test_model_checkpoint_monitors_the_loss_of_any_step(tmp_path: Path) -> None:
    """A monitor sees the metrics of the current step, also between metric cadences."""
    checkpoint = ModelCheckpoint(tmp_path, monitor="train/loss", every_n_train_steps=3, save_top_k=-1)
    fit(tmp_path, checkpoint)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]
    assert Path(checkpoint.best_model_path).exists()
    assert checkpoint.best_model_score is not None


def test_early_stopping_ends_the_run_as_completed(tmp_path: Path) -> None:
    """A loss that never falls stops the run at the end of the second epoch, with its reason."""
    stopping = EarlyStopping("train/loss", patience=1, check_on_train_epoch_end=True)
    trainer, module = fit(tmp_path, stopping, steps=100, plugin=Regression(loss=1.0))
    assert trainer.global_step == 20
    assert module.stopped == "should_stop"


def test_learning_rate_monitor_logs_the_trainers_own_scheduler(tmp_path: Path) -> None:
    """The trainer's scheduler halves the rate at every step."""
    fit(tmp_path, LearningRateMonitor("step"), logger=CSVLogger(tmp_path))
    rates = [float(row["lr-AdamW"]) for row in rows(tmp_path) if row.get("lr-AdamW")]
    assert rates == pytest.approx([0.1 * 0.5**k for k in range(6)])


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`:UserWarning")
def test_throughput_monitor_counts_the_rows_of_raw_batches(tmp_path: Path) -> None:
    """The monitor logs samples that grow by the batch size at every step."""
    fit(tmp_path, ThroughputMonitor(batch_size_fn=len, window_size=2), logger=CSVLogger(tmp_path))
    samples = [float(row["train/samples"]) for row in rows(tmp_path) if row.get("train/samples")]
    assert samples == [2.0 * k for k in range(1, 7)]


def test_device_stats_monitor_logs_cpu_figures(tmp_path: Path) -> None:
    """The monitor logs around every step."""
    fit(tmp_path, DeviceStatsMonitor(cpu_stats=True), logger=CSVLogger(tmp_path))
    assert any("cpu_percent" in name for row in rows(tmp_path) for name, value in row.items() if value)


def test_timer_ends_the_run_as_completed(tmp_path: Path) -> None:
    """A timer that has run out before the first step stops after it."""
    timer = Timer(timedelta(0))
    trainer, module = fit(tmp_path, timer, steps=50)
    assert trainer.global_step < 50
    assert module.stopped == "should_stop"
    assert timer.time_elapsed() > 0


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_the_loss(tmp_path: Path, bar: type[pl.Callback], capfd: pytest.CaptureFixture[str]) -> None:
    """Stock bars draw, and find the metrics of the cadence."""
    trainer, _ = fit(tmp_path, bar(), enable_progress_bar=True)
    assert "train/loss" in trainer.progress_bar_metrics
    out, err = capfd.readouterr()
    assert "train/loss" in out + err


def test_csv_logger_gets_metrics_at_the_cadence_only(tmp_path: Path) -> None:
    """Six steps with a cadence of two give three lines, with loss and learning rate."""
    fit(tmp_path, logger=CSVLogger(tmp_path))
    lines = rows(tmp_path)
    assert [int(line["step"]) for line in lines] == [2, 4, 6]
    assert all(line["train/loss"] and line["train/lr"] for line in lines)


def test_tensorboard_logger_writes_scalars(tmp_path: Path) -> None:
    """The event file holds the loss at the steps of the cadence."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(tmp_path, logger=TensorBoardLogger(tmp_path))
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.*")}
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == [2, 4, 6]


def test_torchs_profiler_traces_steps_and_the_run_ends_well(tmp_path: Path) -> None:
    """It starts at Lightning's name for a training step, and fails at the end if that name never came."""
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="trace", emit_nvtx=False)
    trainer, _ = fit(tmp_path, profiler=profiler)
    assert trainer.state.finished
    assert list(tmp_path.glob("*trace*"))


def test_simple_profiler_measures_the_steps(tmp_path: Path) -> None:
    """Every hook goes through the profiler, and training is the same."""
    trainer, profiled = fit(tmp_path, profiler="simple")
    durations = trainer.profiler.recorded_durations  # type: ignore[attr-defined]
    assert len(durations["run_training_batch"]) == 6
    _, plain = fit(tmp_path)
    assert torch.equal(profiled.contract_state["model"].weight, plain.contract_state["model"].weight)


def test_fast_dev_run_trains_so_many_batches(tmp_path: Path) -> None:
    """fast_dev_run=2 trains two batches and writes nothing."""
    trainer, module = fit(tmp_path, steps=50, fast_dev_run=2)
    assert trainer.global_step == 2
    assert module.plugin.seen == [0, 1]  # type: ignore[attr-defined]


def test_limit_train_batches_cuts_every_epoch(tmp_path: Path) -> None:
    """Every epoch has three batches."""
    _, module = fit(tmp_path, steps=7, limit_train_batches=3)
    assert module.plugin.seen == [0, 1, 2, 0, 1, 2, 0]  # type: ignore[attr-defined]


def test_overfit_batches_repeats_the_first_ones(tmp_path: Path) -> None:
    """All epochs have the same two batches."""
    _, module = fit(tmp_path, steps=5, overfit_batches=2)
    assert module.plugin.seen == [0, 1, 0, 1, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("setting", "word"), [({"accumulate_grad_batches": 4}, "accumulation"), ({"gradient_clip_val": 1.0}, "clipping")]
)
def test_what_the_trainer_owns_is_refused(tmp_path: Path, setting: dict[str, Any], word: str) -> None:
    """Settings that the trainer class decides are refused with the reason."""
    with pytest.raises(StartupContractError, match=f"the trainer class owns .*{word}"):
        fit(tmp_path, **setting)


def test_a_module_hook_that_returns_minus_one_ends_the_epoch(tmp_path: Path) -> None:
    """`on_train_batch_start` returning -1 skips the rest of the epoch."""

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
