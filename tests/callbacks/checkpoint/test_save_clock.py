"""Saves by the clock: their time, and the same time on all ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from genlight.callbacks import Checkpoint, Hook
from genlight.callbacks.checkpoint import budget, list_checkpoints, policy
from genlight.callbacks.hook import cadence
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="checkpoint")


def saved(directory) -> list[int]:
    return [listed.record.step for listed in list_checkpoints(directory)]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    for module in (budget, cadence, policy):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Takes(Hook):
    def __init__(self, clock, seconds) -> None:
        self.clock, self.seconds = clock, seconds

    def on_train_batch_start(self, trainer, *_):
        self.clock.now += self.seconds(trainer.global_step + 1)


@pytest.mark.parametrize(
    ("every_n_steps", "expected"),
    [(0, [12, 24, 36]), (10, [10, 20, 30, 40])],  # the minutes count from the last save, whatever caused it
)
def test_minutes_count_from_the_last_save(fit, counting_trainer, tmp_path, clock, every_n_steps, expected) -> None:
    checkpoint = Checkpoint(tmp_path, every_minutes=2, every_n_steps=every_n_steps, keep_last=None, save_final=False)
    callbacks = [checkpoint, Takes(clock, lambda step: 10.0)]
    fit(counting_trainer(), callbacks, steps=40, batches=range(40), enable_checkpointing=True)
    assert saved(tmp_path) == expected


def test_ranks_save_when_rank_zero_decides(tmp_path) -> None:
    run_ranks("save_clock_ranks.py", tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["minutes"] == [12, 24]  # rank 1's clock does not advance
