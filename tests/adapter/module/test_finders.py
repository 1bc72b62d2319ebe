"""Lightning's finders of a learning rate and a batch size with a trainer class: what they try, and what they leave."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from genlight.adapter import (
    ArrowDataModule,
    ContractError,
    ContractModule,
    StartupContractError,
    StepResult,
    TrainingJobSpec,
)
from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks import Checkpoint, DurableCheckpointIO
from genlight.callbacks.checkpoint import read_record
from genlight.reporters import EventLogger, read_events

OUT_OF_MEMORY = "CUDA error: out of memory"


class Regression:
    """Dropout, a scheduler, a counter of its own and random numbers of python: all that a search could disturb."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.steps = 0

    def setup(self, ctx: Any) -> None:
        self.dropout = torch.nn.Dropout(0.2)

    def configure(self, ctx: Any) -> dict[str, Any]:
        assert self.steps == 0
        model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), self.dropout, torch.nn.Linear(16, 1))
        hyperparams = ctx.job.hyperparams
        rate = hyperparams["optimizer"]["lr"] if "optimizer" in hyperparams else hyperparams.get("lr", 1e-3)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> torch.Tensor:
        return torch.tensor(raw.to_pydict()["x"], dtype=torch.float32) if isinstance(raw, pa.RecordBatch) else raw

    def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
        self.seen.append(batch.tolist())
        self.steps += 1
        if len(batch) > 20:
            raise RuntimeError(OUT_OF_MEMORY)
        noise = torch.randn(len(batch), 1) * 0.01 + random.random() * 0.01
        inputs = torch.stack([batch, batch.square()], -1)
        loss = (state["model"](inputs) + noise - batch.unsqueeze(-1).sin()).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        self.steps = payload["steps"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Sixty-four rows in four row groups."""
    values = torch.linspace(-2, 2, 64).tolist()
    pq.write_table(pa.table({"x": values}), tmp_path / "rows.parquet", row_group_size=16)
    return str(tmp_path / "rows.parquet")


def fit(
    folder: Path,
    data: str,
    *callbacks: pl.Callback,
    steps: int = 12,
    ckpt_path: str | None = None,
    batch_size: int = 8,
    hyperparams: dict[str, Any] | None = None,
) -> ContractModule:
    torch.manual_seed(3)
    random.seed(3)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks, Checkpoint(folder / "made", every_n_steps=5, keep_last=None)],
        plugins=[DurableCheckpointIO()],
    )
    job = TrainingJobSpec("search", 100, hyperparams=hyperparams or {"lr": 1e-3})
    module = ContractModule(Regression(), job)
    trainer.fit(
        module,
        datamodule=ArrowDataModule(data, batch_size=batch_size, shuffle=True, columns=["x"]),
        ckpt_path=ckpt_path,
    )
    return module


def assert_same_run(one: ContractModule, other: ContractModule) -> None:
    """Weights, the data they were trained on, and the random numbers that come next."""
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    assert one.plugin.seen == other.plugin.seen  # type: ignore[attr-defined]
    rates = [module.contract_state["optimizer"].param_groups[0]["lr"] for module in (one, other)]
    assert rates[0] == rates[1]


def test_a_run_after_a_search_has_the_bits_of_one_that_was_given_the_rate(tmp_path: Path, data: str) -> None:
    """Weights, optimizer, random numbers and the place in the data are what they would be without a search."""
    finder = LearningRateFinder(num_training_steps=40, early_stop_threshold=None)
    found = fit(tmp_path / "found", data, finder)
    after = torch.rand(3), random.random()
    assert finder.optimal_lr is not None
    rate = finder.optimal_lr.suggestion()
    assert found.ctx.job.hyperparams == {"lr": rate}
    assert found.plugin.steps == 12  # type: ignore[attr-defined]
    given = fit(tmp_path / "given", data, hyperparams={"lr": rate})
    assert_same_run(found, given)
    torch.testing.assert_close(after, (torch.rand(3), random.random()), rtol=0, atol=0)
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["made"]


def test_a_search_that_changes_nothing_leaves_the_run_as_it_was(tmp_path: Path, data: str) -> None:
    """With ``update_attr=False`` the curve is all there is of it."""
    finder = LearningRateFinder(num_training_steps=30, early_stop_threshold=None, update_attr=False)
    searched = fit(tmp_path / "searched", data, finder, hyperparams={"rate": 1})
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) == 30
    assert_same_run(searched, fit(tmp_path / "plain", data, hyperparams={"rate": 1}))


def test_a_rate_within_a_group_of_hyperparameters_is_named_by_its_path(tmp_path: Path, data: str) -> None:
    """``attr_name`` is ``optimizer.lr``; the job's own dictionary stays as it was."""
    given = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}}
    finder = LearningRateFinder(num_training_steps=40, early_stop_threshold=None, attr_name="optimizer.lr")
    module = fit(tmp_path, data, finder, hyperparams=given)
    assert finder.optimal_lr is not None
    assert module.ctx.job.hyperparams["optimizer"]["lr"] == finder.optimal_lr.suggestion()
    assert given == {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}}


@pytest.mark.parametrize("finders", [["rate"], ["size"], ["size", "rate"]])
def test_a_resumed_run_goes_on_with_what_was_found(tmp_path: Path, data: str, finders: list[str]) -> None:
    """It does not search again, and has the bits of the run that was not interrupted."""

    def made() -> list[pl.Callback]:
        kinds = {
            "rate": LearningRateFinder(num_training_steps=40, early_stop_threshold=None),
            "size": BatchSizeFinder(steps_per_trial=2),
        }
        return [kinds[name] for name in finders]

    straight = fit(tmp_path / "straight", data, *made())
    fit(tmp_path, data, *made(), steps=5)
    again = made()
    resumed = fit(tmp_path, data, *again, ckpt_path=str(tmp_path / "made" / "step-00000005.json"))
    torch.testing.assert_close(dict(resumed.state_dict()), dict(straight.state_dict()), rtol=0, atol=0)
    assert resumed.plugin.seen == straight.plugin.seen[5:]  # type: ignore[attr-defined]
    assert resumed.ctx.job == straight.ctx.job
    assert all(getattr(each, "optimal_lr", None) is None for each in again)


def test_the_largest_batch_that_memory_holds_is_what_the_run_trains_with(tmp_path: Path, data: str) -> None:
    """Doubled from 2 to 16, where 32 is too large; then as if it had been given."""
    finder = BatchSizeFinder(steps_per_trial=2)
    found = fit(tmp_path / "found", data, finder)
    assert finder.optimal_batch_size == 16
    assert {len(batch) for batch in found.plugin.seen} == {16}  # type: ignore[attr-defined]
    assert_same_run(found, fit(tmp_path / "given", data, batch_size=16))


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"mode": "binsearch", "margin": 0.0}, 20),
        ({"mode": "binsearch", "margin": 0.25}, 15),
        ({"init_val": 64}, 16),
        ({"mode": "binsearch", "init_val": 50, "margin": 0.0}, 20),
        ({"max_val": 12}, 12),
        ({"max_trials": 2}, 4),
    ],
)
def test_sizes_are_searched_as_the_finder_was_told(tmp_path: Path, data: str, settings: Any, size: int) -> None:
    """By halves after the first failure, downwards from a first value that is too large, within bounds."""
    finder = BatchSizeFinder(steps_per_trial=1, **settings)
    fit(tmp_path, data, finder, steps=2)
    assert finder.optimal_batch_size == size


def test_a_batch_of_all_rows_is_the_largest_there_is(tmp_path: Path) -> None:
    """Where memory holds them all."""
    pq.write_table(pa.table({"x": [0.1] * 18}), tmp_path / "few.parquet")
    finder = BatchSizeFinder(steps_per_trial=1)
    fit(tmp_path, str(tmp_path / "few.parquet"), finder, steps=2)
    assert finder.optimal_batch_size == 18


class Sized(pl.LightningDataModule):
    """A user's own data module, with a batch size and a shuffle of its own."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(1)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.linspace(-1, 1, 64)
        return DataLoader(rows, self.batch_size, shuffle=True, generator=self.generator)  # type: ignore[arg-type]


def test_the_tuner_searches_one_after_the_other_and_fit_trains_with_both(tmp_path: Path, quiet: dict[str, Any]) -> None:
    """``scale_batch_size`` and ``lr_find`` of stock Lightning, on a data module of a user."""

    def trainer(**settings: Any) -> pl.Trainer:
        torch.manual_seed(5)
        random.seed(5)
        return pl.Trainer(**quiet, max_steps=9, default_root_dir=tmp_path, **settings)

    tuned, data = trainer(), Sized()
    module = ContractModule(Regression(), TrainingJobSpec("tuned", 9, hyperparams={"lr": 1e-3}))
    tuner = Tuner(tuned)
    assert tuner.scale_batch_size(module, datamodule=data, steps_per_trial=1) == 16
    curve = tuner.lr_find(module, datamodule=data, num_training=40, early_stop_threshold=None)
    assert curve is not None
    assert module.plugin.steps == 0  # type: ignore[attr-defined]
    assert data.batch_size == 16
    tuned.fit(module, datamodule=data)

    other = ContractModule(Regression(), TrainingJobSpec("given", 9, hyperparams={"lr": curve.suggestion()}))
    trainer().fit(other, datamodule=Sized(16))
    assert_same_run(module, other)


class Stock(pl.LightningModule):
    """What `Plain` does, as a user of Lightning alone writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.model(batch) - 3 * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


class Plain:
    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        groups = [
            {"params": [model.weight], "lr": ctx.job.hyperparams["lr"]},
            {"params": [model.bias], "lr": ctx.job.hyperparams["lr"] * ctx.job.hyperparams.get("factor", 1)},
        ]
        return {"model": model, "optimizer": torch.optim.SGD(groups)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
        loss = (state["model"](batch) - 3 * batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize("mode", ["exponential", "linear"])
@pytest.mark.parametrize("highest", [1.0, 30.0])
def test_the_search_is_that_of_stock_lightning(
    tmp_path: Path, mode: str, highest: float, quiet: dict[str, Any]
) -> None:
    """The same rates, the same smoothed losses, the same end where it diverges, the same suggestion."""
    curves = []
    for module in (Stock(), ContractModule(Plain(), TrainingJobSpec("r", 5, hyperparams={"lr": 0.1}))):
        finder = LearningRateFinder(min_lr=1e-4, max_lr=highest, num_training_steps=60, mode=mode)
        trainer = pl.Trainer(**quiet, max_steps=5, default_root_dir=tmp_path, callbacks=[finder])
        trainer.fit(module, DataLoader(torch.linspace(-1, 1, 32).unsqueeze(-1), batch_size=4))  # type: ignore[arg-type]
        curves.append(finder.optimal_lr)
    stock, ours = curves
    assert stock is not None
    assert ours is not None
    assert ours.results["lr"] == pytest.approx(stock.results["lr"], rel=1e-9)
    assert ours.results["loss"] == pytest.approx(stock.results["loss"], rel=1e-5)
    assert ours.suggestion() == pytest.approx(stock.suggestion())


def test_groups_keep_their_proportions_in_the_search(tmp_path: Path, quiet: dict[str, Any]) -> None:
    """A group with no rate is not trained by the search either."""

    class Watched(Plain):
        biases: ClassVar[list[float]] = []

        def train_step(self, batch: torch.Tensor, state: Any, ctx: Any) -> StepResult:
            result = super().train_step(batch, state, ctx)
            self.biases.append(float(state["model"].bias.detach()))
            return result

    job = TrainingJobSpec("r", 2, hyperparams={"lr": 0.1, "factor": 0})
    trainer = pl.Trainer(**quiet, max_steps=2, callbacks=[LearningRateFinder(num_training_steps=30)])
    trainer.fit(ContractModule(Watched(), job), DataLoader(torch.ones(8, 1), batch_size=4))  # type: ignore[arg-type]
    assert len(Watched.biases) == 32
    assert len(set(Watched.biases)) == 1


class AtEpochs(LearningRateFinder):
    """As in Lightning's documentation: a search at some epochs."""

    def on_fit_start(self, *_: Any) -> None: ...

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def test_a_search_in_the_middle_of_a_training_is_refused(tmp_path: Path, data: str) -> None:
    """A trainer class is configured once a run."""
    with pytest.raises(ContractError, match="AtEpochs searches before the first step only"):
        fit(tmp_path, data, AtEpochs())


@pytest.mark.parametrize(
    ("finder", "hyperparams", "said"),
    [
        (LearningRateFinder(), {"rate": 1}, "LearningRateFinder: the hyperparameters have no 'lr' or 'learning_rate'"),
        (LearningRateFinder(), {"lr": 1, "learning_rate": 1}, "have lr and learning_rate; say which by `attr_name`"),
        (LearningRateFinder(attr_name="decoder.lr"), {"lr": 1}, "have no 'decoder.lr'"),
        (BatchSizeFinder(batch_arg_name="rows"), {}, "BatchSizeFinder: there is no 'rows' in the hyperparameters or"),
    ],
)
def test_a_finder_without_a_name_for_what_it_finds_is_refused(
    tmp_path: Path, data: str, finder: pl.Callback, hyperparams: dict[str, Any], said: str
) -> None:
    """At start, with the way out."""
    with pytest.raises(StartupContractError, match=said):
        fit(tmp_path, data, finder, hyperparams=hyperparams)


def test_a_hyperparameter_may_be_the_batch_size(tmp_path: Path, quiet: dict[str, Any]) -> None:
    """Of a class that makes its own batches; it is configured anew for each size."""

    class Collects(Regression):
        def configure(self, ctx: Any) -> dict[str, Any]:
            self.size = ctx.job.hyperparams["batch_size"]
            return super().configure(ctx)

        def rollout(self, state: Any, ctx: Any) -> Any:
            return [torch.linspace(-1, 1, self.size)] * 3

    finder = BatchSizeFinder(mode="binsearch", margin=0.0)
    trainer = pl.Trainer(**quiet, max_steps=2, callbacks=[finder])
    module = ContractModule(Collects(), TrainingJobSpec("r", 2, hyperparams={"batch_size": 1}))
    trainer.fit(module)
    assert finder.optimal_batch_size == 20
    assert [len(batch) for batch in module.plugin.seen] == [20, 20]  # type: ignore[attr-defined]


def test_a_class_that_ignores_the_rate_is_told(tmp_path: Path, data: str, caplog: pytest.LogCaptureFixture) -> None:
    """A search that changes nothing is no help."""
    fit(
        tmp_path,
        data,
        LearningRateFinder(num_training_steps=40, early_stop_threshold=None, attr_name="rate"),
        hyperparams={"rate": 1e-3},
    )
    assert "check that `configure` of Regression takes it from the hyperparameter 'rate'" in caplog.text


def test_a_class_that_cannot_be_copied_is_refused(tmp_path: Path, data: str, quiet: dict[str, Any]) -> None:
    """Rather than trained with what the search left in it."""
    module = ContractModule(Regression(), TrainingJobSpec("r", 2, hyperparams={"lr": 0.1}))
    module.plugin.open = (line for line in [])  # type: ignore[attr-defined]
    trainer = pl.Trainer(**quiet, max_steps=2, callbacks=[LearningRateFinder()])
    with pytest.raises(StartupContractError, match="Regression cannot be copied before `setup`"):
        trainer.fit(module, datamodule=ArrowDataModule(data))


JOB_TRAINER = """
import torch
from gen_worker.trainer import StepResult


class Fits:
    def setup(self, ctx):
        torch.manual_seed(0)

    def configure(self, ctx):
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        rate = ctx.job.hyperparams["learning_rate"]
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=rate)}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw.to_pydict()["x"]).float().unsqueeze(-1)

    def train_step(self, batch, state, ctx):
        if len(batch) > 20:
            raise RuntimeError("CUDA error: out of memory")
        loss = (state["model"](batch) - batch.sin()).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": float(loss.detach()), "rows": len(batch)})

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...
"""


def write_job(folder: Path, **fields: Any) -> Path:
    """A job with a checkpoint every second step, and its trainer."""
    (folder / "job_of_finders.py").write_text(JOB_TRAINER)
    job = {
        "run_id": "r",
        "trainer": "job_of_finders:Fits",
        "max_steps": 6,
        "metric_every": 1,
        "checkpoint_every": 2,
        "sample_every": 3,
        "dataset": {"parquet_paths": ["rows.parquet"], "batch_size": 4, "shuffle": True},
        **fields,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def told(job: Path, out: str, *overrides: str) -> list[list[dict[str, str]]]:
    """What a run of a job says in its log, without times and the place of its folder: its steps, then its checkpoints.

    A checkpoint is reported once it is durable, at a line (and a `seq`) that depends on the disk.
    """
    unequal = {"timestamp_ms", "metadata", "seq"}
    assert run_job(RunOptions(spec_path=job, overrides=(f"artifacts_dir={job.parent / out}", *overrides))) == 0
    lines = [dict(event) for event in read_events(job.parent / out / "metrics" / "events.jsonl")]
    kept = [
        {name: str(value).replace(out, "") for name, value in line.items() if name not in unequal}
        for line in lines
        if line.get("name") != "data/wait_fraction"
    ]
    return [[line for line in kept if (line["event"] == "checkpoint") is is_one] for is_one in (False, True)]


def test_nothing_of_a_search_stands_in_the_log_of_a_job(tmp_path: Path, data: str, monkeypatch: Any) -> None:
    """Its events and its checkpoints are those of a run that was given what was found."""
    monkeypatch.chdir(tmp_path)
    finders = [
        {"class_path": "lightning.pytorch.callbacks.BatchSizeFinder"},
        {
            "class_path": "lightning.pytorch.callbacks.LearningRateFinder",
            "init_args": {"num_training_steps": 30, "early_stop_threshold": None},
        },
    ]
    settings = {
        "accelerator": "cpu",
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv"}},
    }
    job = write_job(tmp_path, hyperparams={"learning_rate": 1e-4}, lightning={**settings, "callbacks": finders})
    found = told(job, "found")
    rates = {line["value"] for line in found[0] if line.get("name") == "train/lr"}
    assert {line["value"] for line in found[0] if line.get("name") == "rows"} == {"16.0"}
    assert len(rates) == 1
    hyperparams = tmp_path / "csv" / "lightning_logs" / "version_0" / "hparams.yaml"
    assert hyperparams.read_text() == f"learning_rate: {rates.copy().pop()}\n"

    job = write_job(tmp_path, hyperparams={"learning_rate": float(rates.pop())}, lightning=settings)
    assert told(job, "given", "dataset.batch_size=16") == found
    records = [read_record(tmp_path / out / "checkpoints" / "final.json") for out in ("found", "given")]
    weights = [{file.path: file.xxh3_128 for file in record.files if "model" in file.path} for record in records]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_ranks_search_for_one_rate(tmp_path: Path, data: str) -> None:
    """Both train with it afterwards, as two ranks that were given it."""
    finder = {
        "class_path": "lightning.pytorch.callbacks.LearningRateFinder",
        "init_args": {"num_training_steps": 30, "early_stop_threshold": None},
    }
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    results = []
    for out in ("found", "given"):
        rate = 1e-4 if out == "found" else results[0][0]
        callbacks = [finder] if out == "found" else []
        job = write_job(
            tmp_path,
            hyperparams={"learning_rate": rate},
            sample_every=0,
            lightning={**settings, "callbacks": callbacks},
        )
        command = [
            sys.executable,
            "-m",
            "genlight.adapter.cli",
            "run",
            str(job),
            f"--set=artifacts_dir={tmp_path / out}",
        ]
        subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
        log = list(read_events(tmp_path / out / "metrics" / "events.jsonl"))
        results.append(
            (
                next(line["value"] for line in log if line.get("name") == "train/lr"),
                [line["value"] for line in log if line.get("name") == "train/loss"],
            )
        )
    assert results[0][0] != 1e-4
    assert results[0] == results[1]


class Small(pl.LightningModule):
    """A module of a user of Lightning alone."""

    def __init__(self, lr: float = 1e-3, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if len(batch) > 20:
            raise RuntimeError(OUT_OF_MEMORY)
        return (self.model(batch) - 2 * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.linspace(-1, 1, 64).unsqueeze(-1), self.hparams["batch_size"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [lambda: LearningRateFinder(num_training_steps=30), lambda: BatchSizeFinder(steps_per_trial=1)]
)
def test_stock_finders_leave_nothing_beside_our_checkpoints(tmp_path: Path, make: Any) -> None:
    """Of a LightningModule of its own, whose search saves and restores a checkpoint through our plugin."""
    torch.manual_seed(0)
    finder, logger = make(), EventLogger(tmp_path / "logs", run_id="r")
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[finder, Checkpoint(tmp_path / "made", every_n_steps=2)],
        log_every_n_steps=1,
    )
    module = Small()
    trainer.fit(module)
    assert module.hparams["lr"] != 1e-3 or module.hparams["batch_size"] == 16
    log = list(read_events(logger.path))
    made = [event["path"].rpartition("/")[2] for event in log if event["event"] == "checkpoint"]
    assert made == ["step-00000002.json", "step-00000004.json", "final.json"]
    assert {event["step"] for event in log if event["event"] == "metric"} <= {1, 2, 3, 4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "made"]


def test_a_stop_ends_a_search_after_its_step(tmp_path: Path, data: str, monkeypatch: Any) -> None:
    """The run ends as one that was stopped before its first step: with 75, and without having trained."""
    monkeypatch.chdir(tmp_path)
    line = "        if len(batch) > 20:\n"
    stops = """        import signal
        from pathlib import Path
        with Path("steps").open("a") as file:
            file.write("x")
        if Path("steps").stat().st_size == 3:
            signal.raise_signal(signal.SIGTERM)
"""
    monkeypatch.setitem(globals(), "JOB_TRAINER", JOB_TRAINER.replace(line, stops + line))
    finder = {
        "class_path": "lightning.pytorch.callbacks.LearningRateFinder",
        "init_args": {"early_stop_threshold": None},
    }
    job = write_job(
        tmp_path, hyperparams={"learning_rate": 1e-4}, lightning={"accelerator": "cpu", "callbacks": [finder]}
    )
    monkeypatch.delitem(sys.modules, "job_of_finders", raising=False)
    assert run_job(RunOptions(spec_path=job, overrides=(f"artifacts_dir={tmp_path / 'out'}",))) == 75
    sys.modules.pop("job_of_finders")
    last = list(read_events(tmp_path / "out" / "metrics" / "events.jsonl"))[-1]
    assert (last["event"], last["error"], last["step"]) == ("failed", "preempted", 0)
    assert (tmp_path / "steps").read_text() == "xxx"
