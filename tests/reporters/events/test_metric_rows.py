"""The rows of an event log are those that count: of steps that were made again, the last ones."""

from __future__ import annotations

import math

import pytest

from genlight.adapter import EventLogError
from genlight.reporters import EventLog
from genlight.reporters.events.lines import RESUMED_METRIC
from genlight.reporters.events.metric_rows import metric_rows


def attempt(path, values, *, resumed_from=0):
    with EventLog(path, run_id="r") as log:
        log.started()
        if resumed_from:
            log.metric(name=RESUMED_METRIC, value=resumed_from, step=resumed_from)
        for step, value in values:
            log.metrics({"loss": value, "lr": 0.5}, step=step)


def test_steps_that_a_resume_took_back_are_those_of_the_later_attempt(tmp_path):
    path = tmp_path / "events.jsonl"
    attempt(path, [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)])
    attempt(path, [(3, 30.0), (5, math.inf)], resumed_from=2)

    rows = [(step, row["loss"]) for step, row in metric_rows(path, up_to=10)]
    assert rows == [(1, 1.0), (2, 2.0), (3, 30.0), (5, math.inf)]
    assert [step for step, _ in metric_rows(path, up_to=2)] == [1, 2]
    assert next(metric_rows(path, up_to=1)) == (1, {"loss": 1.0, "lr": 0.5})


def test_an_attempt_that_begins_anew_takes_all_back_and_one_that_trains_nothing_takes_none(tmp_path):
    path = tmp_path / "events.jsonl"
    attempt(path, [(1, 1.0), (2, 2.0)])
    attempt(path, [(1, 10.0)])
    attempt(path, [])
    assert [(step, row["loss"]) for step, row in metric_rows(path, up_to=10)] == [(1, 10.0)]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"started"}\n{"event":\n')
    with pytest.raises(EventLogError, match="line 2"):
        metric_rows(path, up_to=10)
