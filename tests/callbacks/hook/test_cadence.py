"""A periodic action is due when a boundary is crossed, however far the counter jumps; an invalid cadence is refused."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from genlight import callbacks
from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.adapter.contract.types import StepControlHints, StepResult
from genlight.callbacks import Checkpoint, WriteSamples
from genlight.callbacks.hook.cadence import Boundaries, crossed, next_multiple, suppressed
from support.stopping import StopsAt

STEPS = st.integers(min_value=0, max_value=10_000)


@given(previous=STEPS, advance=st.integers(min_value=0, max_value=500), every=st.integers(-1, 300))
def test_an_action_is_due_exactly_if_a_multiple_lies_between_two_steps(previous, advance, every):
    passed = every > 0 and any(step % every == 0 for step in range(previous + 1, previous + advance + 1))

    assert crossed(previous, previous + advance, every) == passed


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
    assert not suppressed(object()), "a module that hosts no trainer class"


@given(step=STEPS, every=st.integers(0, 300), ahead=st.integers(1, 600))
def test_the_next_multiple_is_the_first_step_that_crosses_one(step, every, ahead):
    assert crossed(step, step + ahead, every) == (step + ahead >= next_multiple(step, every))


class Periodic:
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


def test_a_stop_in_a_second_fit_saves_a_step_that_the_first_fit_saved_too(fit, counting_trainer, tmp_path):
    checkpoint = Checkpoint(tmp_path / "first", every_n_steps=4, save_final=False)
    fit(counting_trainer(), [checkpoint], steps=4, enable_checkpointing=True)
    checkpoint.dirpath, checkpoint.every_n_steps = tmp_path / "second", 0
    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [StopsAt(4), checkpoint], steps=8, enable_checkpointing=True)
    assert [path.name for path in (tmp_path / "second").glob("*.json")] == ["step-00000004.json"]


OTHERS = {"EvaluateCommand": {"command": "true"}, "WriteSamples": {"directory": "samples"}}
CADENCES = [
    ("Diagnosis", "check_interval"),
    ("Heartbeat", "interval_steps"),
    *(
        (name, "every_n_steps")
        for name in ("Checkpoint", "Evaluate", "EvaluateCommand", "LogMetrics", "ReplicaGuard", "WatchNonfinite")
    ),
    ("WriteSamples", "every_n_steps"),
]
TIMES = [
    ("EvaluateCommand", "time_limit_s"),
    ("Goodput", "every_s"),
    ("JobProgress", "line_every_s"),
    ("SystemMonitor", "every_s"),
    *(("WatchHangs", name) for name in ("factor", "floor_s", "work_limit_s")),
]


def refuses(name, argument, value):
    with pytest.raises((ValueError, TypeError), match=argument if not isinstance(value, str) else "."):
        getattr(callbacks, name)(**{**OTHERS.get(name, {}), argument: value})


@pytest.mark.parametrize("value", [-1, math.nan, 2.5, "10", True])
@pytest.mark.parametrize(("name", "argument"), CADENCES)
def test_a_cadence_that_is_not_an_integer_of_at_least_0_is_refused(name, argument, value):
    refuses(name, argument, value)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *((*time, value) for time in TIMES for value in (0, -1.0, math.nan)),
        *(("StopRequests", "max_runtime_s", value) for value in (-1.0, math.nan)),
        ("SystemMonitor", "every_s", math.inf),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(name, argument, value):
    refuses(name, argument, value)
