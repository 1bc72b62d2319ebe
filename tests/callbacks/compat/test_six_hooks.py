"""Callbacks of the six-hook style: all six are called, with the attributes that they use, under a policy."""

import copy
import json
import math
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Checkpoint, JobProgress, LogMetrics
from genlight.callbacks.checkpoint import list_checkpoints
from genlight.callbacks.compat import (
    Callback,
    CallbackList,
    CheckpointCallback,
    DiagnosisCallback,
    EarlyStoppingCallback,
    EvalCallback,
    HeartbeatCallback,
    LoggingCallback,
    ProgressCallback,
    TrainingReportCallback,
    load_checkpoint,
)
from genlight.callbacks.compat.callback_list import HOOKS
from genlight.reporters import EventLogger
from genlight.reporters.events.reader import read_events as read_log
from genlight.reporters.telemetry import read_events
from support.messages import refusal
from support.trainer_class import Stateless

EPOCH = ["on_epoch_begin", *["on_step_begin", "on_step_end"] * 3, "on_epoch_end"]


class Trains(Stateless):
    def __init__(self, floor: float = 0.0) -> None:
        self.floor = floor

    def configure(self, ctx):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {"model": model, "optimizer": optimizer, "step": 0, "lr_sched": scheduler}

    def train_step(self, batch, state, ctx):
        state["step"] += 1
        state["optimizer"].zero_grad()
        state["model"](torch.ones(1)).square().sum().backward()
        state["optimizer"].step()
        state["lr_sched"].step()
        return StepResult(metrics={"loss": max(self.floor, 10.0 - state["step"])})

    def state_dict(self, state):
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Notes(Callback):
    def __init__(self):
        self.calls, self.steps = [], []

    def note(self, hook, trainer):
        self.calls.append(hook)
        if hook == "on_step_end":
            self.steps.append((trainer.global_step, trainer.metrics["loss"]))


for _hook in HOOKS:
    setattr(Notes, _hook, lambda self, trainer, hook=_hook: self.note(hook, trainer))


class Writes(Callback):
    def __init__(self, path) -> None:
        self.path = path

    def on_train_end(self, trainer):
        trainer.save_checkpoint(self.path)


@pytest.fixture
def run(tmp_path: Path, quiet):
    def train(callbacks, *, plugin=None, steps=3, epochs=1, defaults=False, other_callbacks=(), **options):
        adapter = callbacks if isinstance(callbacks, CallbackList) else CallbackList(callbacks, defaults=defaults)
        settings = {**quiet, "max_steps": steps, "max_epochs": epochs, "default_root_dir": tmp_path, **options}
        trainer = pl.Trainer(**settings, callbacks=[*other_callbacks, adapter])
        module = ContractModule(plugin or Trains(), TrainingJobSpec("r", steps, hyperparams={"width": 7}))
        trainer.fit(module, BatchStream(range(steps)))
        return trainer, module

    return train


def test_all_six_hooks_are_called_in_order_with_the_metrics_of_the_step(run, fit_plain) -> None:
    notes, of_lightnings_loop = Notes(), Notes()
    run([notes])
    fit_plain([CallbackList([of_lightnings_loop], defaults=False)], steps=3)

    assert notes.calls == of_lightnings_loop.calls == ["on_train_begin", *EPOCH, "on_train_end"]
    assert notes.steps == [(1, 9.0), (2, 8.0), (3, 7.0)]
    assert [(step, loss >= 0) for step, loss in of_lightnings_loop.steps] == [(1, True), (2, True), (3, True)]


def test_the_trainer_has_the_attributes_that_six_hook_callbacks_use(run, tmp_path: Path) -> None:
    """Among them times and losses of the whole run, which a report at the end has too."""

    class Looks(Callback):
        def on_train_begin(self, trainer):
            self.before = (trainer.state.ttfi_sec, trainer.state.total_loss, trainer.best_loss)

        def on_step_end(self, trainer):
            names = ("model", "optimizer", "scheduler", "config", "loss", "best_loss", "device", "max_steps", "state")
            self.seen = {name: getattr(trainer, name) for name in names}

    looks = Looks()
    _, module = run([looks, LoggingCallback(2), TrainingReportCallback(tmp_path / "report.json")], steps=4)

    seen, state = looks.seen, module.contract_state
    assert (seen["model"], seen["optimizer"]) == (state["model"], state["optimizer"])
    assert seen["scheduler"] is state["lr_sched"]
    assert (seen["config"].width, seen["config"].total_steps) == (7, 4)
    assert (seen["loss"], seen["best_loss"], seen["state"].global_step, seen["max_steps"]) == (6.0, 6.0, 4, 4)
    assert seen["device"] == torch.device("cpu")
    assert looks.before == (None, 0.0, math.inf)
    assert seen["state"].total_loss == 9.0 + 8.0 + 7.0 + 6.0
    profile = seen["state"].runtime_profile()
    assert 0 < seen["state"].ttfi_sec == profile["ttfi_sec"] <= profile["elapsed_sec"]
    assert profile["throughput_steps_per_sec"] > 0
    assert 0 < seen["state"].train_start_time < time.time()
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["global_step"], report["loss"], report["best_loss"], report["config"]["width"]) == (4, 6.0, 6.0, 7)
    assert report["elapsed_sec"] > 0


def test_an_unknown_attribute_is_named(run) -> None:
    class Asks(Callback):
        critical = True

        def on_step_end(self, trainer):
            trainer.global_stp

    with refusal(AttributeError):
        run([Asks()])


def test_should_stop_ends_the_run(run) -> None:
    class Stops(Callback):
        def on_step_end(self, trainer):
            trainer.should_stop = trainer.global_step == 2

    trainer, module = run([Stops()], steps=9)

    assert trainer.global_step == 2
    assert module.stopped == "should_stop"


def test_failures_are_counted_other_callbacks_continue_and_a_critical_one_ends_the_run(run, caplog) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer):
            raise OSError("no such disk")

    notes = Notes()
    run([Fails(), notes])
    assert len(notes.steps) == 3
    assert "Fails failed: on_step_end 3 times" in caplog.text

    critical = Fails()
    critical.critical = True
    with refusal(OSError):
        run([critical])


@pytest.mark.parametrize("callback", [Notes, 3])
def test_an_object_without_any_of_the_six_hooks_is_refused(callback) -> None:
    with refusal(TypeError):
        CallbackList([callback])


def test_a_lightning_callback_in_the_list_joins_the_trainer_unless_it_is_a_second_progress_bar(run) -> None:
    second_bar = ProgressCallback()
    trainer, _ = run([timer := pl.callbacks.Timer(), second_bar], other_callbacks=[JobProgress()])

    assert timer in trainer.callbacks
    assert timer.time_elapsed() > 0
    assert second_bar not in trainer.callbacks


def test_a_six_hook_callback_passed_to_the_trainer_is_refused_with_the_remedy(quiet) -> None:
    def train():
        pl.Trainer(**quiet, max_steps=1, callbacks=[Notes()]).fit(ContractModule(Trains(), None), BatchStream([1]))

    with refusal(TypeError):
        train()


def test_logging_and_checkpoints_are_on_by_default_also_in_a_second_fit(run, tmp_path: Path, capfd) -> None:
    notes = Notes()
    trainer, module = run(CallbackList([notes]), steps=100)
    assert "step 100  " in capfd.readouterr().err
    assert [listed.record.step for listed in list_checkpoints(tmp_path / "checkpoints")] == [100]
    notes.calls.clear()
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = 103, 2
    trainer.fit(module, BatchStream(range(3)))

    assert notes.calls.count("on_train_begin") == 1
    assert notes.calls.count("on_step_end") <= 3
    assert sum(isinstance(callback, Checkpoint) for callback in trainer.callbacks) == 1
    assert [listed.record.step for listed in list_checkpoints(tmp_path / "checkpoints")][-1] == 103


def test_a_copy_has_separate_callbacks(run) -> None:
    notes = Notes()
    run(copy.deepcopy(CallbackList([notes], defaults=False)))

    assert notes.calls == []


def test_a_callback_can_save_a_pt_file_that_another_run_loads(run, tmp_path: Path) -> None:
    class Loads(Callback):
        critical = True

        def on_train_begin(self, trainer):
            trainer.load_checkpoint(tmp_path / "x.pt")
            self.weight = trainer.model.weight.clone()
            self.step = int(trainer.optimizer.state_dict()["state"][0]["step"])

    _, module = run([Writes(tmp_path / "x.pt")], steps=8)
    weight, checkpoint, loads = (
        module.contract_state["model"].weight.clone(),
        load_checkpoint(tmp_path / "x.pt"),
        Loads(),
    )
    run([loads])

    assert (checkpoint["global_step"], checkpoint["best_loss"], checkpoint["config"]["width"]) == (8, 2.0, 7)
    assert torch.equal(checkpoint["model_state_dict"]["weight"], weight)
    assert checkpoint["scheduler_state_dict"]["last_epoch"] == 8
    assert torch.equal(loads.weight, weight)
    assert loads.step == checkpoint["optimizer_state_dict"]["state"][0]["step"] == 8


def test_early_stopping_heartbeats_diagnosis_and_progress_work(run, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("WORLDFLUX_METRICS_PATH", str(tmp_path / "metrics.jsonl"))
    callbacks = [
        EarlyStoppingCallback(patience=20, monitor="loss"),
        HeartbeatCallback(10, scenario="digits"),
        DiagnosisCallback(10, gradient_min_norm=1e9),
        ProgressCallback("Digits"),
    ]
    trainer, _ = run(callbacks, plugin=Trains(floor=5.0), steps=200)

    assert trainer.global_step == 30  # metrics come every 10 steps, and none is better than at step 10
    events = read_events(tmp_path / "metrics.jsonl")
    assert [event["step"] for event in events if event["event"] == "heartbeat"] == [10, 20, 30]
    assert "vanishing_gradients" in [event["artifacts"].get("fault") for event in events]
    assert len({event["run_id"] for event in events}) == 1
    assert "Digits  step 30/200" in capfd.readouterr().err


def test_a_function_evaluates_at_its_cadence_with_the_model_in_eval_mode(run, tmp_path: Path) -> None:
    modes = []

    def evaluate(trainer):
        modes.append((trainer.global_step, trainer.model.training, torch.is_grad_enabled()))
        return {"accuracy": trainer.global_step / 10}

    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    _, module = run([EvalCallback(evaluate, 2)], steps=5, logger=logger)

    assert modes == [(2, False, False), (4, False, False)]
    assert module.contract_state["model"].training
    logged = [event for event in read_log(tmp_path / "events.jsonl") if event.get("name") == "eval/accuracy"]
    assert [(event["step"], event["value"]) for event in logged] == [(2, 0.2), (4, 0.4)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LoggingCallback(-1), "`log_interval`"),
        (lambda: CheckpointCallback(-1), "`save_interval`"),
        (lambda: CheckpointCallback(max_checkpoints=0), "`max_checkpoints`"),
        (lambda: EarlyStoppingCallback(patience=-1), "`patience`"),
        (lambda: HeartbeatCallback(-1), "`interval_steps`"),
        (lambda: DiagnosisCallback(-1), "`check_interval`"),
    ],
)
def test_invalid_arguments_are_refused_by_name(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_state_of_a_callback_is_resumed(run, tmp_path: Path, quiet) -> None:
    class Counts(Callback):
        def __init__(self):
            self.steps = 0

        def on_step_end(self, trainer):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    run([Counts(), Counts()], other_callbacks=[Checkpoint(tmp_path / "c")], enable_checkpointing=True)
    first, second = Counts(), Counts()
    trainer = pl.Trainer(
        **{**quiet, "enable_checkpointing": True}, max_steps=5, default_root_dir=tmp_path,
        callbacks=[Checkpoint(tmp_path / "c", replace_existing=True), CallbackList([first, second], defaults=False)],
    )  # fmt: skip
    trainer.fit(ContractModule(Trains(), None), BatchStream(range(9)), ckpt_path=str(tmp_path / "c" / "final.json"))

    assert (first.steps, second.steps) == (5, 5)


def test_a_missing_wandb_is_an_error_that_names_the_package(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with refusal(ModuleNotFoundError):
        LoggingCallback(use_wandb=True)


def test_metrics_of_a_module_that_logs_nothing_reach_its_loggers(fit_plain, tmp_path: Path) -> None:
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    fit_plain([CallbackList([LoggingCallback(2)], defaults=False)], steps=4, logger=logger)

    logged = [event for event in read_log(tmp_path / "events.jsonl") if event.get("name") == "loss"]
    assert [event["step"] for event in logged] == [2, 4]


LOSSES = [5.0, 4.0, 3.0, 2.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]


class Returns(pl.LightningModule):
    def __init__(self, as_mapping: bool = False) -> None:
        super().__init__()
        self.as_mapping = as_mapping
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = 0.0 * self.layer.weight.sum() + LOSSES[self.trainer.global_step]
        return {"loss": loss, "other": -loss.detach()} if self.as_mapping else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader([0.0] * len(LOSSES))


class Listed(Trains):
    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": LOSSES[state["step"] - 1]})


def fit_losses(kind, callbacks, folder, quiet, steps=12, resume=None):
    trainer = pl.Trainer(
        **{**quiet, "enable_checkpointing": True}, max_steps=steps, callbacks=callbacks, default_root_dir=folder
    )
    if kind == "trainer_class":
        module = ContractModule(Listed(), TrainingJobSpec("r", steps, metric_every=1))
        trainer.fit(module, BatchStream(range(steps)), ckpt_path=resume)
    else:
        trainer.fit(Returns(as_mapping=kind == "mapping"), ckpt_path=resume)
    return trainer


KINDS = ["module", "mapping", "trainer_class"]


@pytest.mark.parametrize(("kind", "is_listed"), [*((kind, True) for kind in KINDS), ("trainer_class", False)])
def test_the_checkpoint_with_the_smallest_loss_is_kept(kind, is_listed, quiet, tmp_path: Path) -> None:
    saves = CheckpointCallback(2, max_checkpoints=2, output_dir=tmp_path / "c")
    callbacks = [CallbackList([saves], defaults=False)] if is_listed else [saves]
    fit_losses(kind, [*callbacks, LogMetrics(1)], tmp_path, quiet)
    assert sorted(int(path.stem[-2:]) for path in (tmp_path / "c").glob("step-*.json")) == [4, 10, 12]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_listed", [True, False])
def test_early_stopping_counts_steps_and_not_checks(kind, is_listed, quiet, tmp_path: Path) -> None:
    stops = EarlyStoppingCallback(patience=5)
    callbacks = [CallbackList([stops], defaults=False)] if is_listed else [stops]
    trainer = fit_losses(kind, [*callbacks, LogMetrics(1)], tmp_path, quiet)
    assert (trainer.global_step, stops.best_step) == (9, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_loss_covers_all_steps_without_readers_and_after_a_resume(kind, quiet, tmp_path) -> None:
    def best(steps, resume=None):
        callbacks = [
            Checkpoint(tmp_path / "c", every_n_steps=6),
            CallbackList([Writes(tmp_path / "x.pt")], defaults=False),
        ]
        fit_losses(kind, callbacks, tmp_path, quiet, steps, resume)
        return load_checkpoint(tmp_path / "x.pt")["best_loss"]

    assert best(6) == 2.0
    assert best(8, str(tmp_path / "c" / "step-00000006.json")) == 2.0
