"""A hook with a cadence acts once for each boundary, also if it was not called in between."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks import Checkpoint, Hook, WriteSamples
from genlight.callbacks.hook.cadence import Boundaries
from genlight.callbacks.hook.events import run_state_of


class Periodic:
    """The part of a hook that `Boundaries` uses."""

    def __init__(self, every):
        self.every_n_steps = every


@given(every=st.integers(1, 12), jumps=st.lists(st.integers(1, 30), min_size=1))
def test_a_counter_that_jumps_misses_no_boundary(every, jumps):
    boundaries, step = Boundaries(Periodic(every)), 0
    for jump in jumps:
        assert boundaries.crosses(step + jump) == ((step + jump) // every > step // every)
        step += jump


def test_a_second_fit_counts_its_own_steps(fit, counting_trainer, tmp_path):
    samples, checkpoint = WriteSamples(tmp_path, 4), Checkpoint(tmp_path, every_n_steps=4, save_final=False)
    for attempt in ("first", "second"):
        samples.directory = checkpoint.dirpath = tmp_path / attempt
        fit(counting_trainer(), [samples, checkpoint], steps=10, enable_checkpointing=True)
        for suffix in ("json", "txt"):  # checkpoints, samples
            found = sorted(path.name for path in samples.directory.glob(f"*.{suffix}"))
            assert found == [f"step-0000000{step}.{suffix}" for step in (4, 8)]


class StopsAt(Hook):
    """Requests a stop after a step."""

    ranks = "all"
    writes = ("stop_reason",)

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_):
        if trainer.global_step == self.step:
            run_state_of(trainer).stop_reason = "canceled"


def test_a_stop_in_a_second_fit_saves_a_step_that_the_first_fit_saved_too(fit, counting_trainer, tmp_path):
    checkpoint = Checkpoint(tmp_path / "first", every_n_steps=4, save_final=False)
    fit(counting_trainer(), [checkpoint], steps=4, enable_checkpointing=True)
    checkpoint.dirpath, checkpoint.every_n_steps = tmp_path / "second", 0
    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [StopsAt(4), checkpoint], steps=8, enable_checkpointing=True)
    assert [path.name for path in (tmp_path / "second").glob("*.json")] == ["step-00000004.json"]
