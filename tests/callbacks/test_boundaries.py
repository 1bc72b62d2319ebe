"""A hook with a cadence acts once for each boundary, also where it is not called in between and the cadence changes."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks import Checkpoint, Evaluate, Hook, WriteSamples
from genlight.callbacks.hook.cadence import Boundaries, StepCadence
from genlight.callbacks.hook.events import run_state_of

STEPS = 40
EVERY = st.integers(0, 12)


class Waits:
    """What `Boundaries` knows of a hook."""

    every_n_steps = StepCadence()

    def __init__(self, every):
        self.every_n_steps = every


def acts(every, changes, *, skipped):
    """The steps in which a hook acts whose cadence is changed before it is called in some."""
    hook = Waits(every)
    boundaries = Boundaries(hook)
    acted = []
    for step in range(1, STEPS + 1):
        if step in changes:
            hook.every_n_steps = changes[step]
        if not (skipped and step < hook.next_due_step) and boundaries.crosses(step):
            acted.append(step)
    return acted


@given(every=EVERY, changes=st.dictionaries(st.integers(1, STEPS), EVERY, max_size=5))
def test_a_hook_that_is_skipped_acts_in_the_steps_in_which_one_acts_that_is_always_called(every, changes):
    assert acts(every, changes, skipped=True) == acts(every, changes, skipped=False)


@given(every=st.integers(1, 12), jumps=st.lists(st.integers(1, 30), min_size=1))
def test_a_counter_that_jumps_misses_no_boundary(every, jumps):
    boundaries, step = Boundaries(Waits(every)), 0
    for jump in jumps:
        assert boundaries.crosses(step + jump) == ((step + jump) // every > step // every)
        step += jump


def test_a_cadence_that_another_thread_changes_meanwhile_is_not_waited_for_any_longer():
    class Changed(Waits):
        """One whose cadence changes while it is asked when to act next."""

        changed = False

        def __setattr__(self, name, value):
            if name == "next_due_step" and value > 0 and not self.changed:
                self.changed = True
                self.every_n_steps = 5
            super().__setattr__(name, value)

    hook = Changed(0)
    Boundaries(hook).crosses(3)
    assert hook.every_n_steps == 5
    assert hook.next_due_step == 0


class Changing(Hook):
    """Changes the cadence of a hook in the course of a training."""

    def __init__(self, hook, changes):
        self.hook, self.changes = hook, changes

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.changes:
            self.hook.every_n_steps = self.changes[trainer.global_step]


def noting(base):
    """A class of `base` that notes its steps instead of acting in them."""

    class Noting(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.acted = []

        def save(self, trainer, pl_module, **_):
            self.acted.append(trainer.global_step)

        def write(self, trainer, pl_module, step):
            self.acted.append(step)

    return Noting


@pytest.fixture
def hooks(tmp_path):
    """Each of genlight's hooks with a cadence of steps, as a function of that cadence."""
    return {
        "checkpoint": lambda every: noting(Checkpoint)(tmp_path, every_n_steps=every, save_final=False),
        "samples": lambda every: noting(WriteSamples)(tmp_path, every),
    }


@pytest.mark.parametrize("name", ["checkpoint", "samples"])
def test_a_cadence_that_changes_counts_from_the_next_step_on(fit, counting_trainer, hooks, name):
    """Boundaries of the new cadence that passed while the hook was skipped are over."""
    hook = hooks[name](20)
    is_saver = name == "checkpoint"
    fit(counting_trainer(), [Changing(hook, {15: 7, 30: 0, 33: 2}), hook], steps=36, enable_checkpointing=is_saver)
    assert hook.acted[:5] == [21, 28, 34, 36]


@pytest.mark.parametrize("name", ["checkpoint", "samples"])
def test_a_second_fit_counts_its_own_steps(fit, counting_trainer, hooks, name):
    hook = hooks[name](4)
    for _ in range(2):
        fit(counting_trainer(), [hook], steps=10, enable_checkpointing=name == "checkpoint")
    assert hook.acted == [4, 8, 4, 8]


def test_an_evaluation_keeps_to_a_cadence_that_changes(fit, counting_trainer):
    class Evaluated(counting_trainer):
        def evaluate(self, state, ctx):
            return {"step": float(state["steps"])}

    class Scores(Hook):
        ranks = "all"
        reads = ("eval_scores",)

        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            scores = run_state_of(trainer).eval_scores
            if scores and scores not in self.seen:
                self.seen.append(scores)

    evaluate, scores = Evaluate(20), Scores()
    fit(Evaluated(), [Changing(evaluate, {15: 7}), evaluate, scores], steps=30)
    assert scores.seen == [{"step": 21.0}, {"step": 28.0}]


class StopsAt(Hook):
    """Asks for a stop after a step."""

    ranks = "all"
    writes = ("stop_reason",)

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_):
        if trainer.global_step == self.step:
            run_state_of(trainer).stop_reason = "canceled"


def test_a_stop_in_a_second_fit_saves_the_step_that_the_first_one_saved_last(fit, counting_trainer, tmp_path):
    checkpoint = Checkpoint(tmp_path / "first", every_n_steps=4, save_final=False)
    fit(counting_trainer(), [checkpoint], steps=4, enable_checkpointing=True)
    checkpoint.dirpath, checkpoint.every_n_steps = tmp_path / "second", 0
    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [StopsAt(4), checkpoint], steps=8, enable_checkpointing=True)
    assert [path.name for path in (tmp_path / "second").glob("*.json")] == ["step-00000004.json"]
