"""Six-hook callbacks work in a user's own loop, with a trainer object of any class."""

import json
from types import SimpleNamespace

import torch

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
)
from genlight.callbacks.compat.named import HOOKS
from genlight.reporters.telemetry import read_events
from support.messages import refusal


class Loop:
    """A training loop of thirty lines, as users write them."""

    def __init__(self, folder, losses):
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.global_step, self.epoch, self.should_stop, self.metrics = 0, 0, False, {}
        self.output_dir, self.losses, self.saved = folder, losses, []

    def save_checkpoint(self, path):
        self.saved.append(path.name)
        torch.save(self.model.state_dict(), path)

    def train(self, callbacks):
        callbacks.on_train_begin(self)
        callbacks.on_epoch_begin(self)
        for loss in self.losses:
            callbacks.on_step_begin(self)
            self.optimizer.zero_grad()
            (self.model(torch.ones(1, 2)).sum() * loss).backward()
            self.optimizer.step()
            self.metrics = {"loss": loss}
            self.global_step += 1
            callbacks.on_step_end(self)
            if self.should_stop:
                break
        callbacks.on_epoch_end(self)
        callbacks.on_train_end(self)


def test_all_callbacks_act(tmp_path, capsys):
    telemetry = tmp_path / "metrics.jsonl"
    loop = Loop(tmp_path, [3.0, 2.0, 1.0, 1.0, float("nan"), 1.0])
    heard, evaluated = [], []

    class Own(Callback):
        pass

    for hook in HOOKS:
        setattr(Own, hook, lambda self, trainer, hook=hook: heard.append((hook, trainer)))

    loop.train(
        CallbackList(
            [
                LoggingCallback(2),
                CheckpointCallback(2, max_checkpoints=1),
                HeartbeatCallback(3, run_id="mine", metrics_path=telemetry),
                DiagnosisCallback(5, run_id="mine", metrics_path=telemetry),
                ProgressCallback("Mine"),
                EvalCallback(lambda trainer: evaluated.append((trainer.global_step, trainer.model.training)), 4),
                TrainingReportCallback(),
                Own(),
            ]
        )
    )

    assert loop.saved == [
        *("checkpoint_2.pt", "checkpoint_best.pt", "checkpoint_4.pt", "checkpoint_best.pt", "checkpoint_6.pt")
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_6.pt",
        "checkpoint_best.pt",
    ]
    steps = ["on_step_begin", "on_step_end"] * 6
    assert [hook for hook, _ in heard] == ["on_train_begin", "on_epoch_begin", *steps, "on_epoch_end", "on_train_end"]
    assert all(trainer is loop for _, trainer in heard)
    assert evaluated == [(4, False)]
    assert json.loads((tmp_path / "training_report.json").read_text())["global_step"] == 6
    errors = capsys.readouterr().err
    assert "step 2  loss 2\n" in errors
    assert "Mine  step 6" in errors
    events = list(read_events(telemetry))
    assert {event["run_id"] for event in events} == {"mine"}
    assert [event["step"] for event in events if event["event"] == "heartbeat"] == [3, 6]
    faults = [event["artifacts"]["fault"] for event in events if event["event"] == "diagnostic"]
    assert faults[:2] == ["nonfinite_loss", "nonfinite_gradients"]


def test_early_stopping_ends_the_loop(tmp_path):
    loop = Loop(tmp_path, [3.0, 2.0, *[2.0] * 20])
    loop.train(CallbackList([EarlyStoppingCallback(patience=4)]))

    assert (loop.should_stop, loop.global_step) == (True, 6)


def test_steps_are_counted_and_a_loop_without_save_checkpoint_is_refused(tmp_path):
    trainer = SimpleNamespace(loss=torch.tensor(1.0))
    callbacks = CallbackList([EarlyStoppingCallback(patience=3)])
    for _ in range(4):
        callbacks.on_step_end(trainer)
    assert trainer.should_stop

    with refusal(AttributeError):
        CallbackList([CheckpointCallback(1, output_dir=tmp_path)]).on_step_end(trainer)


def test_an_exception_of_a_callback_reaches_the_loop(tmp_path):
    class EndsEarly(Callback):
        def on_step_end(self, trainer):
            raise KeyError("enough")

    with refusal(KeyError):
        Loop(tmp_path, [1.0]).train(CallbackList([EndsEarly()]))
