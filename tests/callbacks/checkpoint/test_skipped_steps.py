"""genlight's loop does not call `Checkpoint` after every step, yet it notices finished saves in time."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from genlight.adapter.contract.exceptions import CheckpointError
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint.store import Background
from genlight.callbacks.hook.hook import Hook
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


class HeldWriter(Background):
    """A writer whose writes end exactly at the beginning of the next step."""

    def __init__(self):
        super().__init__()
        self.may_write, self.jobs = threading.Event(), []

    def submit(self, job):
        def run():
            self.may_write.wait()
            return job()

        self.may_write.clear()
        self.jobs.append(super().submit(run))
        return self.jobs[-1]

    def end(self):
        """Let the write in flight end, without raising its failure."""
        self.may_write.set()
        concurrent.futures.wait(self.jobs)

    def finish(self):
        self.end()
        super().finish()


class SlowDisk(Hook):
    def __init__(self, writer):
        self.writer = writer

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.checkpoint_io.store.background = self.writer

    def on_train_end(self, trainer, pl_module):
        self.writer.end()


@pytest.fixture
def writer():
    return HeldWriter()


@pytest.fixture
def trainer_class(counting_trainer, writer):
    class Waiting(counting_trainer):
        def train_step(self, batch, state, ctx):
            writer.end()
            return super().train_step(batch, state, ctx)

    return Waiting


class Counted(Checkpoint):
    calls = 0

    def poll(self, trainer):
        self.calls += 1
        super().poll(trainer)


class Listener(Hook):
    def __init__(self):
        self.heard = []

    def on_checkpoint_durable(self, trainer, pl_module, record):
        self.heard.append((record.step, trainer.global_step))


def test_a_failure_in_the_background_ends_the_run_within_a_step_whoever_saved(fit, trainer_class, writer, tmp_path):
    class Saving(Hook):
        critical = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 30:
                trainer.strategy.checkpoint_io.asynchronous = True
                (tmp_path / "other" / "mine.json").mkdir(parents=True)
                trainer.save_checkpoint(tmp_path / "other" / "mine.json")

    class Counting(trainer_class):
        def train_step(self, batch, state, ctx):
            self.steps = state["steps"] + 1
            return super().train_step(batch, state, ctx)

    plugin = Counting()
    checkpoint = Counted(tmp_path / "c", every_n_steps=1000, save_final=False)
    with refusal(CheckpointError):
        fit(plugin, [SlowDisk(writer), Saving(), checkpoint], steps=60, enable_checkpointing=True)

    assert plugin.steps in (30, 31)
    assert checkpoint.calls < 15


def test_each_of_two_checkpoints_is_reported_once_it_is_durable(fit, trainer_class, writer, tmp_path):
    """Both save through one store; the second must not replace the first in it."""
    listener = Listener()
    often, rarely = (Counted(tmp_path / str(every), every_n_steps=every, save_final=False) for every in (20, 70))
    fit(trainer_class(), [SlowDisk(writer), often, rarely, listener], steps=75, enable_checkpointing=True)
    assert listener.heard == [(20, 21), (40, 41), (60, 61), (70, 71)]
    assert rarely.calls < 40


@pytest.mark.parametrize("first_continues", [True, False])
def test_a_failed_save_is_reported_to_its_own_callback(fit, trainer_class, writer, tmp_path, first_continues, caplog):
    """One callback ends the run at a failure and the other continues, whichever polls first."""
    listener = Listener()
    broken = Checkpoint(tmp_path / "broken", every_n_steps=20, save_final=False, on_error="continue")
    sound = Checkpoint(tmp_path / "sound", every_n_steps=50, save_final=False)
    callbacks = [broken, sound] if first_continues else [sound, broken]

    class BreaksAt20(Hook):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 19:
                (tmp_path / "broken" / "step-00000020.json").mkdir(parents=True)

    fit(trainer_class(), [SlowDisk(writer), BreaksAt20(), *callbacks, listener], steps=60, enable_checkpointing=True)
    assert [step for step, _ in listener.heard] == [40, 50, 60]
    assert "step-00000020.json is not a checkpoint" in caplog.text
