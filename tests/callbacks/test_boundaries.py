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


def recording(base):
    """Return a subclass of `base` that records its steps instead of acting."""

    class Recording(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.acted = []

        def save(self, trainer, pl_module, **_):
            self.acted.append(trainer.global_step)

        def write(self, trainer, pl_module, step):
            self.acted.append(step)

    return Recording


@pytest.fixture
def hooks(tmp_path):
    """Functions that make a hook with a cadence of steps, by name."""
    return {
        "checkpoint": lambda every: recording(Checkpoint)(tmp_path, every_n_steps=every, save_final=False),
        "samples": lambda every: recording(WriteSamples)(tmp_path, every),
    }


@pytest.mark.parametrize("name", ["checkpoint", "samples"])
def test_a_second_fit_counts_its_own_steps(fit, counting_trainer, hooks, name):
    hook = hooks[name](4)
    for _ in range(2):
        fit(counting_trainer(), [hook], steps=10, enable_checkpointing=name == "checkpoint")
    assert hook.acted == [4, 8, 4, 8]


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
