"""Everything of ours can be pickled and deep-copied, before and after it was used, and the copy can be used."""

import copy
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter import ContractModule, EventLogError, TrainingJobSpec
from genlight.callbacks import (
    Checkpoint,
    DurableCheckpointIO,
    Evaluate,
    Hook,
    JobProgress,
    LogMetrics,
    ReplicaGuard,
    StopRequests,
    UploadArtifacts,
    WatchHangs,
    WatchNonfinite,
    WriteSamples,
)
from genlight.callbacks.hook.events import callbacks_of
from genlight.reporters import EventLog, EventLogger, RecordEvents, read_events
from genlight.reporters.uploads import UploadConfig, Uploader
from support import SUPPORT
from support.messages import refusal
from support.trainer_class import Trains
from support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers")


class Scored(Trains):
    """Evaluates itself, and is asked whether it is canceled; module level, so that it can be pickled."""

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> torch.Tensor:
        assert not ctx.is_canceled()
        return torch.full((2, 2), float(raw) / 100)

    def evaluate(self, state: Any, ctx: Any) -> dict[str, float]:
        return {"score": 1.0}


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


copies = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


def all_of_ours(folder: Path) -> list[pl.Callback]:
    """Every callback that a user may construct and that works without a server."""
    return [
        Checkpoint(folder / "checkpoints", every_n_steps=2),
        Evaluate(2),
        JobProgress(),
        LogMetrics(2),
        ReplicaGuard(2),
        StopRequests(folder / "cancel"),
        UploadArtifacts(run_id="copies"),
        WatchHangs(folder / "hangs"),
        WatchNonfinite(every_n_steps=2),
        WriteSamples(folder / "samples", every_n_steps=2),
    ]


def trainer_with_all(folder: Path, steps: int = 4) -> pl.Trainer:
    return quiet_trainer(
        *all_of_ours(folder),
        max_steps=steps,
        logger=EventLogger(folder / "events.jsonl", run_id="copies"),
        default_root_dir=folder,
    )


def new_module() -> ContractModule:
    return ContractModule(Scored(), TrainingJobSpec("copies", 4))


@copies
def test_a_copy_of_a_trainer_with_every_callback_trains(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    """After a fit nothing of the process (threads, locks, signals) prevents a copy."""
    original, module = trainer_with_all(tmp_path), new_module()
    trainer, module = copied((original, module))
    trainer.fit(module, range(9))
    assert (original.global_step, trainer.global_step) == (0, 4)
    assert (tmp_path / "checkpoints" / "final.json").exists()
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")][-1] == "completed"

    again, module = copied((trainer, module))
    again.fit_loop.epoch_loop.max_steps = 6
    again.fit_loop.max_epochs = 5
    again.fit(module, range(9))
    assert (trainer.global_step, again.global_step) == (4, 6)


@copies
def test_callbacks_can_be_copied_while_they_train(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    """A tuner or a user's callback may copy inside a hook; the copies are idle."""

    class Copies(Hook):
        made: list[Any]

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            ours = [callback for callback in callbacks_of(trainer) if callback is not self]
            self.made = [copied(part) for part in (*ours, trainer.logger, trainer.strategy.checkpoint_io)]

    callback = Copies()
    callback.critical = True
    trainer = trainer_with_all(tmp_path)
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    trainer.fit(new_module(), range(9))
    for made in callback.made:
        assert not vars(made).get("_inside_event")
    assert callback.made[-1].store.is_settled
    for made in callback.made:  # of which none does anything by itself
        if isinstance(made, Checkpoint):
            made.wait(trainer)


@copies
def test_a_copy_of_a_plugin_has_no_save_in_flight(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    """The original finishes its save, and the copy saves separately."""
    plugin, goes_on = DurableCheckpointIO(asynchronous=True), threading.Event()
    plugin.store.background.submit(goes_on.wait)
    plugin.save_checkpoint({"state_dict": {}}, tmp_path / "own.ckpt")
    try:
        other = copied(plugin)
        assert other.asynchronous
        assert other.store.is_settled
        other.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
        other.store.wait()
        assert torch.equal(other.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"], torch.ones(2))
        assert not plugin.store.is_settled
    finally:
        goes_on.set()
        plugin.store.wait()


@copies
def test_an_open_log_gives_a_closed_copy_as_a_fork_does(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    """One writer: the copy says that it is closed, and the original continues."""
    with EventLog(tmp_path / "events.jsonl", run_id="copies") as event_log:
        event_log.started()
        original = EventLogger()
        original.attach(event_log)
        callback, logger = copied((RecordEvents(event_log), original))
        assert callback.event_log.closed
        with refusal(EventLogError):
            callback.event_log.metric(name="loss", value=1.0, step=1)
        with refusal(EventLogError):
            logger.log_metrics({"loss": 1.0}, 1)
        event_log.metric(name="loss", value=1.0, step=1)
        event_log.completed(step=1, final_checkpoint=None)
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["started", "metric", "completed"]


@copies
def test_a_copy_of_uploads_has_neither_token_nor_uploader(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    """A pickle may end in a file. An uploader of the caller's belongs to one process: a fit with a copy is refused."""
    config = UploadConfig(run_id="copies", queue_dir=tmp_path / "uploads", token="secret-token")
    with Uploader(config) as uploader:
        original = UploadArtifacts(uploader)
        assert b"secret-token" not in pickle.dumps(original)
        trainer = pl.Trainer(accelerator="cpu", max_steps=1, callbacks=[copied(original)], default_root_dir=tmp_path)
        with refusal(ValueError):
            trainer.fit(BoringModel())
        assert original._uploader is uploader


@copies
def test_a_copy_of_a_module_asks_itself_whether_to_stop(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    trainer, module = trainer_with_all(tmp_path), new_module()
    trainer.fit(module, range(9))
    other = copied(module)
    module.hosted_trainer.add_cancel_check(lambda: True)
    assert module.ctx.is_canceled is not None
    assert module.ctx.is_canceled()
    other._trainer = trainer
    assert not other.ctx.is_canceled()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "plugin"), [("ddp_spawn", ["plugin"]), ("ddp_fork", [])])
def test_spawned_or_forked_processes_return_their_weights(tmp_path: Path, strategy: str, plugin: list[str]) -> None:
    """The children's weights are in the checkpoints, and in the module of the process that started them."""
    script = SUPPORT / "launched_by_copy.py"
    command = [sys.executable, str(script), strategy, str(tmp_path), *plugin]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.rpartition("\nresult ")[2])
    assert result["best"] == str(tmp_path / "made" / "final.json")
    assert result["events"] == ["started", *["checkpoint"] * 3, "completed"]
    assert result["is_trained"]
