"""The Checkpoint callback in a plain Lightning trainer."""

import os
import random
import shutil
import threading

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from genlight.adapter.contract.exceptions import CheckpointError
from genlight.adapter.contract.types import StepControlHints, StepResult
from genlight.callbacks.checkpoint import Checkpoint, list_checkpoints, load, newest_valid, read_record
from genlight.callbacks.hook.events import run_state_of
from genlight.callbacks.hook.hook import Hook
from genlight.callbacks.witness.entry import FOLDER
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


class Killed(Exception):
    """Ends a run before its end."""


class KillAfterSave(pl.Callback):
    def __init__(self, batch, checkpoint):
        self.batch, self.checkpoint, self.seen = batch, checkpoint, 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen += 1
        if self.seen == self.batch:
            self.checkpoint.on_train_batch_end(trainer, pl_module, *_)
            self.checkpoint.save(trainer, pl_module, wait=True)
            raise Killed


class KillAtEpochEnd(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise Killed


def records(directory):
    return [listed.path.name for listed in list_checkpoints(directory)]


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return all(torch.equal(one[name], other[name]) for name in one)


def scramble_rng():
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


@pytest.mark.parametrize("stop", [3, 13, "epoch"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, train_net, make_trainer, make_net, make_loader, stop):
    """The run has dropout, a scheduler, and an open accumulation window, and stops in and after an epoch."""
    reference = make_net()
    train_net(max_epochs=2, accumulate_grad_batches=4, net=reference)

    checkpoint = Checkpoint(tmp_path / "c", save_final=False, every_n_epochs=1 if stop == "epoch" else 0)
    killer = KillAtEpochEnd() if stop == "epoch" else KillAfterSave(stop, checkpoint)
    with pytest.raises(Killed):
        train_net(killer, checkpoint, max_epochs=2, accumulate_grad_batches=4)
    saved, warnings = newest_valid(tmp_path / "c")
    assert not warnings

    resumed, again = make_net(seed=5), Checkpoint(tmp_path / "c", save_final=False)
    scramble_rng()
    trainer = make_trainer(again, max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(resumed, make_loader(), ckpt_path=saved.path)

    assert equal(resumed, reference)


def test_changes_of_the_modules_own_hook_belong_to_the_checkpoint_of_the_step(tmp_path, train_net, make_net):
    """Moving averages are often updated there; Lightning calls it after the hooks of all callbacks."""

    class Counts(type(make_net())):
        def __init__(self):
            super().__init__()
            self.register_buffer("ended", torch.zeros(()))

        def on_train_batch_end(self, *_):
            self.ended += 1

    train_net(Checkpoint(tmp_path, every_n_steps=3, save_final=False), net=Counts(), max_steps=5)
    assert load(tmp_path / "step-00000003.json")["state_dict"]["ended"] == 3


@pytest.mark.parametrize("of_instance", [False, True])
def test_a_save_after_the_modules_own_hook_fails_by_policy(tmp_path, train_net, make_net, caplog, of_instance):
    ended = []
    net = make_net()
    hooked = net if of_instance else type(net)
    note = lambda *_: ended.append(1)  # noqa: E731
    hooked.on_train_batch_end = note

    (tmp_path / "c").mkdir()
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=3, on_error="continue", save_final=False)
    breaker = Unwritable(tmp_path / "c", checkpoint)
    try:
        train_net(breaker, checkpoint, net=net)
    finally:
        del hooked.on_train_batch_end

    assert len(ended) == 10
    assert "Checkpoint failed" in caplog.text


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(6, 4)


@pytest.mark.parametrize(
    ("loader", "stop", "is_warned"),
    [
        (lambda _: DataLoader(Endless(), batch_size=None), 3, True),
        (lambda _: {"a": DataLoader(Endless(), batch_size=None)}, 3, True),
        (lambda resumable: resumable(), 3, False),
        (lambda resumable: DataLoader([torch.ones(6, 4)] * 4, batch_size=None), 4, False),
    ],
    ids=["endless", "several", "resumable", "between epochs"],
)
def test_a_loader_without_position_is_warned_of(
    tmp_path, train_net, make_net, make_loader, caplog, loader, stop, is_warned
):
    class Net(type(make_net())):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

    train_net(Checkpoint(tmp_path), max_steps=stop, net=Net(), loader=loader(make_loader))
    caplog.clear()
    train_net(
        Checkpoint(tmp_path), max_steps=6, net=Net(), loader=loader(make_loader), ckpt_path=tmp_path / "final.json"
    )
    assert ("DataLoader keeps no position" in caplog.text) is is_warned
    assert ("torchdata.stateful_dataloader.StatefulDataLoader" in caplog.text) is is_warned


def test_cadence_and_retention_keep_the_two_newest_and_final(tmp_path, train_net):
    train_net(Checkpoint(tmp_path / "c", every_n_steps=3))
    kept = ["step-00000006", "step-00000009", "final"]
    assert records(tmp_path / "c") == [f"{name}.json" for name in kept]
    assert sorted(os.listdir(tmp_path / "c")) == sorted([FOLDER, *kept, *(f"{name}.json" for name in kept)])
    assert read_record(tmp_path / "c" / "final.json").final


class Scored(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.callback_metrics["score"] = torch.tensor([1.0, 9.0, 3.0, 4.0, 5.0][batch_idx])


def test_a_monitor_that_was_never_logged_is_named_with_the_logged_names(tmp_path, train_net, caplog):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=1, monitor="scores")
    train_net(Scored(), checkpoint, max_steps=1, loader=1)
    assert (
        "'scores' by which checkpoints are kept had not been logged by step 1; logged metrics: loss, score"
        in caplog.text
    )


class Listener(Hook):
    def __init__(self):
        self.heard = []

    def on_checkpoint_durable(self, trainer, pl_module, record):
        self.heard.append((record.step, record.path.exists(), threading.current_thread() is threading.main_thread()))


def test_callbacks_hear_of_a_durable_checkpoint_in_the_training_thread(tmp_path, make_trainer, make_net, make_loader):
    listener = Listener()
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None)
    trainer = make_trainer(checkpoint, listener, max_epochs=1)
    trainer.fit(make_net(), make_loader(5))
    assert listener.heard == [(2, True, True), (4, True, True), (5, True, True)]
    assert run_state_of(trainer).latest_checkpoint_uri == str(tmp_path / "c" / "final.json")


def test_no_checkpoint_is_saved_for_a_step_that_skips_cadences(fit, counting_trainer, tmp_path):
    class Skips(counting_trainer):
        def train_step(self, batch, state, ctx):
            super().train_step(batch, state, ctx)
            return StepResult(control=StepControlHints(skip_cadence_emit=ctx.step == 1))

    fit(Skips(), [Checkpoint(tmp_path, every_n_steps=2, keep_last=None)], steps=5, enable_checkpointing=True)
    assert records(tmp_path) == ["step-00000004.json", "final.json"]


def test_debris_of_a_killed_run_is_removed(tmp_path, train_net):
    directory = tmp_path / "c"
    train_net(Checkpoint(directory, every_n_steps=5))
    (directory / ".tmp-step-00000015-1-aa").mkdir()
    (directory / ".tmp-step-00000015.json-1-aa").touch()
    (directory / "step-00000005.json").rename(directory / "step-00000005" / ".tmp-step-00000005.json-1-aa")
    (directory / "mine").mkdir()
    train_net(Checkpoint(directory, every_n_steps=100, save_final=False))
    kept = [FOLDER, "final", "final.json", "mine", "step-00000010", "step-00000010.json"]
    assert sorted(os.listdir(directory)) == kept


def wait_for_save(checkpoint):
    checkpoint._store.background.finish()


class Unwritable(pl.Callback):
    def __init__(self, directory, checkpoint):
        self.directory, self.checkpoint, self.batches = directory, checkpoint, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1
        if batch_idx == 1:
            shutil.rmtree(self.directory)
            self.directory.write_text("in the way")
        wait_for_save(self.checkpoint)


def test_space_is_checked_before_training(tmp_path, train_net, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with refusal(CheckpointError):
        train_net(Checkpoint(tmp_path / "c", every_n_steps=3))


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, train_net, caplog, monkeypatch):
    real = os.rename

    def refuse(path, target):
        if str(path).endswith("step-00000001.json"):
            raise PermissionError(13, "Permission denied")
        real(path, target)

    monkeypatch.setattr(os, "rename", refuse)
    train_net(Checkpoint(tmp_path / "c", every_n_steps=1), loader=4)
    assert records(tmp_path / "c") == [
        f"{n}.json" for n in ("step-00000001", "step-00000003", "step-00000004", "final")
    ]
    assert "Could not remove the checkpoint" in caplog.text


def test_a_fast_development_run_saves_nothing(tmp_path, train_net):
    train_net(Checkpoint(tmp_path / "c", every_n_steps=1), fast_dev_run=2, loader=4)
    assert not (tmp_path / "c").exists()


def test_a_strategy_with_its_own_checkpoint_format_is_refused_with_an_alternative(tmp_path, make_trainer, make_net):
    class Sharding(SingleDeviceStrategy, FSDPStrategy):
        """A sharding strategy with one process."""

    trainer = make_trainer()
    trainer.strategy.__class__ = Sharding
    with refusal(TypeError):
        Checkpoint(tmp_path).setup(trainer, make_net(), "fit")


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_steps": -3},
        {"every_n_epochs": -1},
        {"keep_last": 0, "mode": "best"},
        {"every_minutes": float("nan"), "on_error": "x", "weights": "some", "on_difference": "ask"},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_the_constructor_refuses_invalid_arguments_and_names_all(arguments):
    with refusal(ValueError):
        Checkpoint(**arguments)


def test_elapsed_time_accumulates_over_attempts(tmp_path, train_net):
    train_net(Checkpoint(tmp_path / "c"), loader=2)
    first = read_record(tmp_path / "c" / "final.json").elapsed_s
    train_net(Checkpoint(tmp_path / "d"), max_epochs=2, loader=2, ckpt_path=tmp_path / "c" / "final.json")
    assert read_record(tmp_path / "d" / "final.json").elapsed_s > first > 0
    assert load(tmp_path / "d" / "final.json")["genlight"]["elapsed_s"] > first
