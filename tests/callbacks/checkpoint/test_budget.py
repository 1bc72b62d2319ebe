"""The time between checkpoints that keeps a budget."""

import math

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import resolve_run_config
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint.budget import Budget, seconds_of
from support.jobs import events_of, run, write_job

pytestmark = pytest.mark.promise(name="checkpoint")


def measured(stall_s, durable_s, **limits):
    budget = Budget(**limits)
    budget.note_stall(stall_s)
    budget.note_durable(durable_s)
    return budget


@pytest.mark.parametrize(
    ("stall_s", "durable_s", "limits", "interval_s"),
    [
        (0.1, 2.0, {"lose_at_most_s": 60.0}, 58.0),
        (0.1, 2.0, {"pay_at_most": 0.01}, 10.0),
        (0.1, 2.0, {"lose_at_most_s": 60.0, "pay_at_most": 0.01}, 10.0),
        (1.0, 2.0, {"lose_at_most_s": 60.0, "pay_at_most": 0.01}, 58.0),  # both cannot be kept
        (0.1, 40.0, {"lose_at_most_s": 60.0}, 40.0),  # nor can this one: saves do not overlap
        (0.0, 0.5, {"pay_at_most": 0.5}, 0.5),
    ],
)
def test_the_interval_follows_from_the_measured_times(stall_s, durable_s, limits, interval_s):
    assert measured(stall_s, durable_s, **limits).interval_s == pytest.approx(interval_s)


@pytest.mark.parametrize("lose_at_most_s", [1.0, 60.0, math.inf])
def test_the_first_save_comes_within_the_budget(lose_at_most_s):
    assert 0 < Budget(lose_at_most_s, 0.02).interval_s < min(lose_at_most_s, 60)


def test_one_slow_save_counts_for_some_time_and_then_fades():
    budget = measured(1.0, 1.0, pay_at_most=0.1)
    slow = budget.interval_s
    for _ in range(50):
        budget.note_stall(0.1)
    assert slow == pytest.approx(10)
    assert budget.interval_s == pytest.approx(1)


@pytest.mark.parametrize("limits", [{"lose_at_most_s": 10.0}, {"lose_at_most_s": 60.0, "pay_at_most": 0.001}])
def test_a_budget_that_cannot_be_kept_is_reported_with_figures(limits, caplog):
    measured(1.0, 30.0, **limits)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_was_measured_continues_in_a_resumed_run():
    budget, resumed = measured(0.2, 3.0, pay_at_most=0.01), Budget(pay_at_most=0.01)
    resumed.load_state_dict(budget.state_dict())
    assert resumed.interval_s == budget.interval_s


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("1.5min", 90), ("2 h", 7200)])
def test_a_time_has_a_unit(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "arguments",
    [
        {"lose_at_most": "60"},
        {"lose_at_most": "-1s"},
        {"pay_at_most": 0},
        {"pay_at_most": 1.5},
        {"lose_at_most": "60s", "every_n_steps": 5},
        {"pay_at_most": 0.1, "every_minutes": 5},
        {"pay_at_most": 0.1, "every_n_epochs": 5},
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(ValueError, match="_at_most"):
        Checkpoint(**arguments)


@pytest.mark.parametrize("other", [{"every_n_steps": 5}, {"every_minutes": 5}])
def test_a_job_has_a_budget_or_a_cadence(other, tmp_path):
    job = write_job(tmp_path, checkpoints={"lose_at_most": "60s", **other})
    with pytest.raises(StartupContractError) as refused:
        resolve_run_config(spec_path=job)
    assert refused.value.code == "startup.invalid_job_spec"


def test_a_run_saves_by_its_budget_and_a_resume_continues(tmp_path):
    fields = {"checkpoints": {"lose_at_most": "0.01s"}, "max_steps": 200, "mock_batches": list(range(400))}
    job = write_job(tmp_path, **fields)
    assert run(job) == 0
    saved = [event for event in events_of(job) if event["event"] == "checkpoint"]
    assert len(saved) > 2
    assert "checkpoint_budget" in [event["kind"] for event in events_of(job) if event["event"] == "finding"]
    assert run(job, "resume_from_latest=true", "max_steps=400") == 0
    assert len([event for event in events_of(job) if event["event"] == "checkpoint"]) > len(saved)
