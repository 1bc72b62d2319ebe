"""CSVLogger and TensorBoardLogger have each step of a resumed run once, in one folder."""

from __future__ import annotations

import csv
import os
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter
from torch.utils.data import DataLoader

from genlight.adapter import StepResult
from genlight.callbacks.logged_steps import keep_logged_steps, log_each_step_once
from support.jobs import run, write_job
from support.messages import refusal
from support.trainer_class import Counts
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="resume")

STEPS = 12


class Fails(Counts):
    """Fails in the step that the environment names; has another metric from step 9 on."""

    def train_step(self, batch, state, ctx):
        if state["steps"] + 1 == int(os.environ["FAILS_AT"]):
            raise RuntimeError("at that step")
        state["steps"] += 1
        more = {"late": 1.0} if state["steps"] > 8 else {}
        return StepResult(metrics={"loss": float(state["steps"]), **more})


def logged(kind, folder):
    """Step and loss of each row that a logger has, in its order."""
    if kind is CSVLogger:
        with (folder / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), float(row["train/loss"])) for row in csv.DictReader(file) if row["train/loss"]]
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Runs the job once: with loggers of a version, a step at which it fails, and a cadence of checkpoints."""
    monkeypatch.chdir(tmp_path)
    # TensorBoard reads files of one second and process in the order of this number as text: 9 would come after 10.
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(10))

    def start(version, *, fails_at=0, checkpoint_every=4):
        monkeypatch.setenv("FAILS_AT", str(fails_at))
        where = {"save_dir": "logs", "name": "n", "version": version}
        loggers = [
            {"class_path": f"lightning.pytorch.loggers.{kind.__name__}", "init_args": where}
            for kind in (CSVLogger, TensorBoardLogger)
        ]
        job = write_job(
            tmp_path,
            trainer=f"{__name__}:Fails",
            max_steps=STEPS,
            metric_every=1,
            checkpoint_every=checkpoint_every,
            resume_from_latest=True,
            mock_batches=list(range(STEPS)),
            lightning={"accelerator": "cpu", "logger": loggers},
        )
        folder = {"v": "v", 3: "version_3", None: "version_0"}[version]
        return run(job), tmp_path / "logs" / "n" / folder

    return start


@pytest.mark.parametrize(("version", "fails_at"), [("v", (7,)), (3, (7, 10)), (None, (5, 6, 7))], ids=str)
def test_a_resumed_run_keeps_each_step_once(attempt, version, fails_at):
    for step in fails_at:
        assert attempt(version, fails_at=step)[0] == 1
    code, folder = attempt(version)

    assert code == 0
    expected = [(step, float(step)) for step in range(1, STEPS + 1)]
    assert logged(CSVLogger, folder) == expected
    assert logged(TensorBoardLogger, folder) == expected


def test_a_torn_row_and_a_kill_while_the_file_is_aside_lose_nothing(attempt):
    _, folder = attempt("v", fails_at=7)
    with (folder / "metrics.csv").open("a") as file:
        file.write("0.5,")
    (folder / "metrics.csv").rename(folder / ".metrics-before.csv")
    assert attempt("v")[0] == 0
    assert [step for step, _ in logged(CSVLogger, folder)] == list(range(1, STEPS + 1))


def test_a_run_that_starts_over_drops_earlier_rows_and_reports_it(attempt, caplog):
    attempt("v", fails_at=7, checkpoint_every=0)
    caplog.clear()
    code, folder = attempt("v", checkpoint_every=0)
    assert code == 0
    assert [step for step, _ in logged(CSVLogger, folder)] == list(range(1, STEPS + 1))
    assert "deleting its 6 rows of an earlier attempt" in caplog.text


class Line(pl.LightningModule):
    """Fits a line with Lightning's own loop; fails at a step."""

    def __init__(self, fails_at=-1):
        super().__init__()
        self.layer, self.fails_at = torch.nn.Linear(1, 1), fails_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise RuntimeError("at that step")
        self.log("train/loss", float(batch_idx))
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(STEPS, 1), batch_size=1)


class TwoUpdates(Line):
    """Makes two updates in a batch by itself, so that Lightning counts twice as many steps as it logs."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("module_class", [Line, TwoUpdates])
def test_a_resumed_fit_of_a_lightning_module_keeps_each_step_once(tmp_path, kind, module_class):
    updates = 2 if module_class is TwoUpdates else 1

    def fit(module, ckpt_path=None):
        saves = ModelCheckpoint(tmp_path / "c", every_n_train_steps=4 * updates, filename="last")
        logger = kind(tmp_path / "logs", name="n", version="v")
        trainer = quiet_trainer(saves, logger=logger, max_steps=STEPS * updates, log_every_n_steps=1)
        keep_logged_steps(trainer)
        trainer.fit(module, ckpt_path=ckpt_path)

    with refusal(RuntimeError):
        fit(module_class(fails_at=7))
    fit(module_class(), tmp_path / "c" / "last.ckpt")

    assert logged(kind, tmp_path / "logs/n/v") == [(step, float(step)) for step in range(STEPS)]


class Rows(Logger):
    """A logger that can only append, like the ones of W&B and MLflow."""

    name = version = "rows"

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows += [(step, name) for name in metrics]

    def log_hyperparams(self, params, *args, **kwargs): ...


def log_again(path, run="a", resumes=True):
    """Begin an attempt; returns its logger."""
    logger = Rows()
    log_each_step_once(logger, path, run, resumes=resumes)
    return pickle.loads(pickle.dumps(logger))  # as for the copies of a process in which Lightning trains


def test_a_logger_that_appends_gets_each_metric_of_a_step_once(tmp_path):
    path = tmp_path / "logged.json"
    first = log_again(path)
    for step in (1, 2, 1, 2, 3):  # a roll-back within the attempt is logged: its values are new
        first.log_metrics({"loss": 0.5}, step)
    assert len(first.rows) == 5

    second = log_again(path)  # the kill came before the scores of step 3
    for step in (2, 3, 4):
        second.log_metrics({"loss": 0.5}, step)
        second.log_metrics({"score": 1.0}, step) if step == 3 else None
    second.log_metrics({"loss": 0.5})
    assert second.rows == [(3, "score"), (4, "loss"), (None, "loss")]

    for again in (log_again(path, run="b"), log_again(path, resumes=False)):
        again.log_metrics({"loss": 0.5}, 1)
        assert again.rows == [(1, "loss")]
    path.write_text("{")
    torn = log_again(path)
    torn.log_metrics({"loss": 0.5}, 1)
    assert torn.rows == [(1, "loss")]


def test_a_roll_back_before_a_kill_hides_no_step_of_the_next_attempt(tmp_path):
    path = tmp_path / "logged.json"
    first = log_again(path)
    for step in (8, 9, 10, 6):
        first.log_metrics({"loss": 0.5}, step)
    second = log_again(path)
    for step in (6, 7, 8):
        second.log_metrics({"loss": 0.5}, step)
    assert second.rows == [(7, "loss"), (8, "loss")]
