"""A periodic action is due when a boundary is crossed, however far the counter jumps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.types import StepControlHints, StepResult
from genlight.callbacks.hook.cadence import crossed, next_multiple, suppressed

STEPS = st.integers(min_value=0, max_value=10_000)


@given(previous=STEPS, advance=st.integers(min_value=0, max_value=500), every=st.integers(min_value=1, max_value=300))
def test_an_action_is_due_exactly_if_a_multiple_lies_between_two_steps(previous, advance, every):
    passed = any(step % every == 0 for step in range(previous + 1, previous + advance + 1))

    assert crossed(previous, previous + advance, every) == passed


@given(previous=STEPS, advance=st.integers(min_value=0, max_value=500), every=st.integers(max_value=0))
def test_a_cadence_of_zero_is_never_due(previous, advance, every):
    assert not crossed(previous, previous + advance, every)


@given(start=STEPS, jumps=st.lists(st.integers(min_value=0, max_value=70), max_size=40), every=st.integers(1, 50))
def test_no_boundary_of_a_run_counts_twice(start, jumps, every):
    step, due = start, 0
    for jump in jumps:
        due += crossed(step, step + jump, every)
        step += jump

    assert due <= step // every - start // every
    if all(jump <= every for jump in jumps):
        assert due == step // every - start // every


@pytest.mark.parametrize(
    ("result", "is_suppressed"),
    [
        (StepResult(control=StepControlHints(skip_cadence_emit=True)), True),
        (StepResult(control=StepControlHints(backoff_seconds=1.0)), False),
        (StepResult(), False),
        (SimpleNamespace(metrics={}), False),
        (SimpleNamespace(metrics={}, control=SimpleNamespace(backoff_seconds=1.0)), False),
        (SimpleNamespace(metrics={}, control=SimpleNamespace(skip_cadence_emit=True)), True),
        (None, False),
    ],
)
def test_only_a_step_with_the_hint_is_suppressed(result, is_suppressed):
    assert suppressed(SimpleNamespace(hosted_trainer=SimpleNamespace(step_result=result))) is is_suppressed


def test_a_module_that_hosts_no_trainer_class_is_never_suppressed():
    assert not suppressed(object())


@given(step=STEPS, every=st.integers(0, 300), ahead=st.integers(1, 600))
def test_the_next_multiple_is_the_first_step_that_crosses_one(step, every, ahead):
    assert crossed(step, step + ahead, every) == (step + ahead >= next_multiple(step, every))
