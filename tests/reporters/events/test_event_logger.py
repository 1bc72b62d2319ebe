"""`EventLogger` in plain Lightning runs."""

import logging
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from genlight.adapter.contract.exceptions import EventLogError, InputError, TrainingCanceled
from genlight.adapter.view.history import history_of
from genlight.adapter.view.summary import summary_of
from genlight.callbacks import Checkpoint
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.event_logger import EventLogger
from genlight.reporters.events.goodput import account_of
from genlight.reporters.events.reader import read_events, read_metrics
from genlight.reporters.events.validation import validate_events
from support.messages import refusal
from support.trainers import quiet_trainer


class Line(pl.LightningModule):
    def __init__(self, raises: BaseException | None = None, at: int = 3) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.raises, self.at = raises, at

    def training_step(self, batch, batch_idx):
        if self.raises and self.global_step == self.at:
            raise self.raises
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(16, 1), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


class SlowInEvaluation(Line):
    def on_test_epoch_end(self):
        time.sleep(0.01)

    on_validation_epoch_end = on_test_epoch_end


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def make_trainer(tmp_path: Path, *callbacks: Callback, **options) -> pl.Trainer:
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    settings = {"max_steps": 6, "max_epochs": -1, "limit_val_batches": 0, "log_every_n_steps": 1, "logger": logger}
    return quiet_trainer(*callbacks, default_root_dir=tmp_path, **{**settings, **options})


def sound_events(path: Path) -> list[dict]:
    assert validate_events(path) == []
    return list(read_events(path))


def is_one_fit(path: Path) -> bool:
    return [event["event"] for event in sound_events(path)] == ["started", *["metric"] * 6, "completed"]


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


class Flush(Callback):
    """Does what Lightning does in a signal handler."""

    def on_train_batch_end(self, trainer, *_args):
        trainer.logger.finalize("finished")


@pytest.mark.parametrize("callbacks", [[], [Flush()]])
def test_a_fit_is_one_whole_attempt(tmp_path, path, callbacks):
    make_trainer(tmp_path, *callbacks).fit(Line())
    events = sound_events(path)
    assert is_one_fit(path)
    assert {event["name"] for event in of_kind(events, "metric")} == {"train/loss"}
    assert [event["step"] for event in of_kind(events, "metric")] == list(range(6))
    assert (events[-1]["step"], events[-1]["final_checkpoint"]) == (6, None)
    assert "stopped" not in events[-1]


def test_a_trainer_can_fit_again_and_says_if_lightning_stopped_it(tmp_path, path):
    class StopEarly(Callback):
        def on_train_batch_end(self, trainer, *_args):
            trainer.should_stop = trainer.global_step == 2

    trainer, module = make_trainer(tmp_path, StopEarly()), Line()
    for _ in range(2):
        trainer.fit(module)
    first, second = of_kind(sound_events(path), "completed")
    assert (first["step"], first["stopped"]) == (2, "should_stop")
    assert (second["step"], second.get("stopped")) == (6, None)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_fit_is_the_next_attempt_and_says_where_it_resumed(tmp_path, path):
    make_trainer(tmp_path, Checkpoint(tmp_path / "c", every_n_steps=3)).fit(Line())
    checkpoint = sound_events(path)[-1]["final_checkpoint"]
    trainer = make_trainer(tmp_path, Checkpoint(tmp_path / "c"), max_steps=8)
    trainer.fit(Line(), ckpt_path=checkpoint)
    events = sound_events(path)
    second = events[[event.get("attempt") for event in events].index(2) :]
    assert [(e["name"], e["step"]) for e in of_kind(second, "metric")] == [
        ("trainer/resumed_from_step", 6),
        ("train/loss", 6),
        ("train/loss", 7),
    ]
    assert second[1]["value"] == 6
    assert not any(type(callback).__name__ == "RecordEvents" for callback in trainer.callbacks)


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("is_new_process", [False, True], ids=["same trainer", "another trainer"])
def test_an_evaluation_after_the_fit_takes_nothing_of_it_back(tmp_path, path, stage, is_new_process):
    trainer = make_trainer(tmp_path, max_steps=4)
    module = SlowInEvaluation()
    trainer.fit(module)
    before, history = read_metrics(path).to_pylist(), history_of(tmp_path)
    if is_new_process:
        trainer = make_trainer(tmp_path)
    trainer.limit_val_batches = 1
    getattr(trainer, stage)(module, verbose=False)

    events = sound_events(path)
    assert [event["event"] for event in events[-3:]] == ["started", "metric", "completed"]
    assert events[-3]["metadata"]["stage"] == stage
    assert read_metrics(path).to_pylist()[:-1] == before
    assert history_of(tmp_path).curves["train/loss"].steps == history.curves["train/loss"].steps
    account, summary = account_of(path), summary_of(tmp_path)
    assert account is not None
    assert account.seconds["lost"] == 0
    assert account.seconds["evaluation"] >= 0.009  # both ends are in whole milliseconds
    assert (summary.state, summary.step, summary.attempts) == ("completed", 4, 1)
    assert "stage" not in summary.metadata


@pytest.mark.parametrize(
    ("error", "category", "text"),
    [
        (ValueError("bad shape\nof something"), "train-step", "train-step:ValueError: bad shape"),
        (InputError("no column `x`"), "input", "input:no column `x`"),
    ],
    ids=repr,
)
def test_an_exception_ends_the_attempt_as_failed(tmp_path, path, error, category, text):
    with pytest.raises(type(error)):
        make_trainer(tmp_path).fit(Line(raises=error))
    last = sound_events(path)[-1]
    assert (last["event"], last["step"], last["resumable"]) == ("failed", 3, False)
    assert (last["category"], last["error"]) == (category, text)


@pytest.mark.parametrize("reason", ["canceled", "timeout", "preempted"])
@pytest.mark.parametrize("checkpoints", [0, 2])
def test_a_stop_is_reported_by_its_reason(tmp_path, path, reason, checkpoints):
    callbacks = [ModelCheckpoint(every_n_train_steps=checkpoints)] if checkpoints else []
    with pytest.raises(TrainingCanceled):
        make_trainer(tmp_path, *callbacks).fit(Line(raises=TrainingCanceled(reason)))
    last = sound_events(path)[-1]
    assert (last["error"], last["category"], last["resumable"]) == (reason, reason, bool(checkpoints))


class Terminate(Callback):
    def on_train_batch_end(self, trainer, *_args):
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("module", "callbacks", "error", "text"),
    [
        (Line(raises=KeyboardInterrupt()), [], SystemExit, "canceled"),
        (Line(), [Terminate()], SIGTERMException, "preempted"),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_is_reported_by_its_reason(tmp_path, path, module, callbacks, error, text):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(error):
        make_trainer(tmp_path, *callbacks).fit(module)
    assert sound_events(path)[-1]["error"] == text
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_log_that_another_writer_holds_stops_the_fit_before_it_trains(tmp_path, path):
    module = Line(raises=AssertionError("trained"), at=0)
    with EventLog(path, run_id="r"), refusal(EventLogError):
        make_trainer(tmp_path).fit(module)


def test_the_cause_of_a_failure_survives_a_log_that_cannot_take_it(tmp_path, path, monkeypatch, caplog):
    def refuse(*_args):
        raise OSError(28, "No space left on device")

    class FillTheDisk(Callback):
        def on_exception(self, *_args):
            monkeypatch.setattr(os, "write", refuse)

    with caplog.at_level(logging.ERROR), refusal(ValueError):
        make_trainer(tmp_path, FillTheDisk()).fit(Line(raises=ValueError("the cause")))
    assert "the failure could not be recorded" in caplog.text
    monkeypatch.undo()
    EventLog(path, run_id="r").close()


def test_metrics_at_a_step_whose_checkpoint_is_reported_are_left_out_with_one_warning(tmp_path, path, caplog):
    class LogEpochAsStep(Callback):
        def on_train_batch_end(self, trainer, *_args):
            if trainer.global_step == 4:
                trainer.logger.experiment.checkpoint(path="x", step=2)
            if trainer.global_step > 4:
                trainer.logger.log_metrics({"late": 1.0}, step=2)

    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, LogEpochAsStep()).fit(Line())
    assert not [event for event in sound_events(path) if event.get("name") == "late"]
    assert caplog.text.count("metrics late are not written to") == 1


class Run:
    """A session that has a log or gets that of its logger."""

    is_rank_zero = True

    def __init__(self, event_log=None) -> None:
        self.event_log = event_log


@pytest.mark.parametrize("has_log", [False, True])
def test_a_run_with_a_log_of_the_same_file_or_without_one_ends_it_itself(tmp_path, path, has_log):
    logger, run = EventLogger(path, run_id="r"), Run(EventLog(path, run_id="r") if has_log else None)
    assert path.exists() is has_log
    logger.join_run(run)
    if has_log:
        run.event_log.started()
    make_trainer(tmp_path, logger=logger).fit(Line())
    assert run.event_log.phase == "started"
    run.event_log.completed(step=6, final_checkpoint=None)
    run.event_log.close()
    assert is_one_fit(path)


def test_another_logger_of_a_run_keeps_a_log_of_its_own(tmp_path, path):
    loggers, run = [EventLogger(tmp_path / name, run_id="r") for name in ("events.jsonl", "other.jsonl")], Run()
    for logger in loggers:
        logger.join_run(run)
    make_trainer(tmp_path, logger=loggers).fit(Line())
    run.event_log.completed(step=6, final_checkpoint=None)
    run.event_log.close()
    assert is_one_fit(path)
    assert is_one_fit(tmp_path / "other.jsonl")


def test_a_logger_can_be_used_without_a_trainer(path):
    logger = EventLogger(path, run_id="r")
    assert (logger.save_dir, logger.name, logger.version) == (str(path.parent), "genlight", "r")
    assert EventLogger().run_id != EventLogger().run_id
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1, "epoch": 0}, step=4)
    logger.log_metrics({"b": 2})
    logger.finalize("success")
    events = sound_events(path)
    assert [(event.get("name"), event.get("step")) for event in events] == [(None, None), ("a", 4), ("b", 4), (None, 4)]


def test_other_ranks_open_and_write_nothing(path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger, run = EventLogger(path, run_id="r"), Run()
    run.is_rank_zero = False
    logger.join_run(run)
    logger.log_metrics({"a": 1}, step=1)
    logger.experiment.metric(name="a", value=1, step=1)
    logger.finalize("success")
    assert run.event_log is None
    assert not path.exists()


@pytest.mark.parametrize(("run_id", "error"), [("", ValueError), (3, TypeError)])
def test_a_run_id_that_is_none_is_refused(run_id, error):
    with refusal(error):
        EventLogger(run_id=run_id)


def test_texts_are_left_to_the_loggers_that_take_them(tmp_path, path, caplog):
    """Other loggers accept texts; the event log warns once for each name and still gets the numbers."""

    class LogsTexts(Callback):
        def on_train_batch_end(self, trainer, *_):
            for logger in trainer.loggers:
                logger.log_metrics({"phase": "warm-up", "loss": 1.0, "shapes": {"a": 1.0}}, trainer.global_step)
                logger.log_metrics({"phase": "warm-up"}, trainer.global_step)

    csv_logger = CSVLogger(tmp_path / "csv")
    logger = EventLogger(path, run_id="r")
    trainer = make_trainer(tmp_path, LogsTexts(), logger=[logger, csv_logger], max_steps=2)
    trainer.fit(Line())

    events = sound_events(path)
    assert [(event["step"], event["value"]) for event in events if event.get("name") == "loss"] == [(1, 1.0), (2, 1.0)]
    assert not [event for event in events if event.get("name") in ("phase", "shapes")]
    assert "warm-up" in Path(csv_logger.log_dir, "metrics.csv").read_text()
    assert [record.message for record in caplog.records if "not numbers" in record.message] == [
        f"metrics phase, shapes are not written to {path}: they are not numbers"
    ]
