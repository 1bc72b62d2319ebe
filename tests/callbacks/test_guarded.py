"""Callbacks from elsewhere under a policy: failures are noted, ranks are kept, and state is as without it."""

from __future__ import annotations

import copy
import logging

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from genlight.callbacks import Guarded, Hook, LogMetrics
from genlight.callbacks.hook.hook import listeners


class Fails(pl.Callback):
    """Fails in two hooks, and counts one."""

    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1
        raise RuntimeError(f"no luck at {batch_idx}")

    def on_train_end(self, trainer, pl_module):
        raise RuntimeError("no luck at the end")

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


@pytest.mark.parametrize("loop", ["fit", "fit_plain"])
def test_a_failure_is_logged_once_for_each_hook_counted_and_summed_up(request, counting_trainer, caplog, loop) -> None:
    run = request.getfixturevalue(loop)
    guarded = Guarded(Fails())
    run(*([counting_trainer()] if loop == "fit" else []), [guarded], steps=3)

    assert guarded.callback.count == 3
    assert guarded.failures == {"on_train_batch_end": 3, "on_train_end": 1}
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("Fails failed in on_train_batch_end" in text for text in told) == 1
    assert "Fails failed: on_train_batch_end 3 times, on_train_end 1 times" in told


def test_a_critical_one_ends_the_run_with_its_own_exception(fit, counting_trainer) -> None:
    with pytest.raises(RuntimeError, match="no luck at 0"):
        fit(counting_trainer(), [Guarded(Fails(), critical=True)])


def test_it_has_the_hooks_that_the_callback_has_and_no_others(fit, counting_trainer) -> None:
    trainer, _ = fit(counting_trainer(), [Guarded(Fails())])

    assert len(listeners(trainer, "on_train_batch_end")) == 2  # with LogMetrics, which a trainer class always gets
    assert listeners(trainer, "on_train_batch_start") == []


def test_rank_zero_alone_runs_it_by_default(fit, counting_trainer, monkeypatch) -> None:
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda trainer: False))
    zero, everywhere = Guarded(Fails()), Guarded(Fails(), ranks="all")

    fit(counting_trainer(), [zero], steps=3)
    fit(counting_trainer(), [everywhere], steps=3)

    assert (zero.callback.count, everywhere.callback.count) == (0, 3)


def test_its_state_is_that_of_the_callback_under_the_same_key() -> None:
    callback = Fails()
    guarded = Guarded(callback)
    assert guarded.state_key == callback.state_key

    guarded.load_state_dict({"count": 7})
    assert guarded.state_dict() == callback.state_dict() == {"count": 7}


def test_a_copy_guards_a_copy(fit, counting_trainer) -> None:
    guarded = Guarded(Fails())
    other = copy.deepcopy(guarded)
    fit(counting_trainer(), [other], steps=2)

    assert (guarded.callback.count, other.callback.count) == (0, 2)


def test_a_callback_of_lightning_still_does_its_work(fit, counting_trainer) -> None:
    trainer, _ = fit(counting_trainer(), [Guarded(Timer(duration={"seconds": 0}), ranks="all")], steps=5)

    assert trainer.global_step < 5


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (LogMetrics(), "LogMetrics has a policy of its own"),
        (ModelCheckpoint(), "ModelCheckpoint cannot be guarded"),
        (object(), "Expected a Lightning callback"),
    ],
)
def test_what_cannot_be_guarded_is_refused(callback, words) -> None:
    with pytest.raises(TypeError, match=words):
        Guarded(callback)


def test_unknown_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="'zero' or 'all'"):
        Guarded(Fails(), ranks="some")


def test_a_hook_keeps_its_own_name_in_messages() -> None:
    class Mine(Hook):
        pass

    assert Mine().label == "Mine"
    assert Guarded(Fails()).label == "Fails"
