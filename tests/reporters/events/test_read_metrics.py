"""The metrics of a log as a table: of steps that were made again, the last ones."""

import math

import pyarrow as pa
import pytest

from genlight.adapter import EventLogError
from genlight.reporters import EventLog, read_metrics
from genlight.reporters.events.event import RESUMED_METRIC, ROLLED_BACK_METRIC
from support.messages import refusal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def attempt(path, values, *, resumed_from=0, run_id="r", metadata=None):
    with EventLog(path, run_id=run_id) as log:
        log.started(metadata=metadata)
        if resumed_from:
            log.metric(name=RESUMED_METRIC, value=resumed_from, step=resumed_from)
        for step, value in values:
            log.metrics({"loss": value, "lr": 0.5}, step=step)


def losses(path, run_id="r"):
    rows = read_metrics(path).to_pylist()
    return [(row["step"], row["value"]) for row in rows if (row["name"], row["run_id"]) == ("loss", run_id)]


def test_a_table_has_typed_columns_with_names_as_dictionaries(path):
    attempt(path, [(1, 1.0), (2, math.inf)])
    table = read_metrics(path)
    assert table.schema.names == ["run_id", "attempt", "step", "timestamp", "name", "value"]
    assert table.schema.field("timestamp").type == pa.timestamp("ms", "UTC")
    assert table.column("name").to_pylist() == ["loss", "lr", "loss", "lr"]
    assert table.column("value").to_pylist() == [1.0, 0.5, math.inf, 0.5]
    assert set(table.column("run_id").to_pylist()) == {"r"}


def test_steps_that_a_resume_took_back_are_those_of_the_later_attempt(path):
    attempt(path, [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)])
    attempt(path, [(3, 30.0), (5, math.inf)], resumed_from=2)
    assert losses(path) == [(1, 1.0), (2, 2.0), (3, 30.0), (5, math.inf)]
    every = read_metrics(path, all_attempts=True).to_pylist()
    assert [row["attempt"] for row in every if row["name"] == "loss"] == [1, 1, 1, 1, 2, 2]


def test_an_attempt_that_begins_anew_takes_all_back_and_one_that_trains_nothing_takes_none(path):
    attempt(path, [(1, 1.0), (2, 2.0)])
    attempt(path, [(1, 10.0)])
    attempt(path, [])
    assert losses(path) == [(1, 10.0)]


@pytest.mark.parametrize("step", [0, 2, 3])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_takes_nothing_back_at_whatever_step_it_logs(path, stage, step):
    attempt(path, [(1, 1.0), (2, 2.0)])
    attempt(path, [(step, 9.0)], metadata={"stage": stage})
    assert losses(path) == [(1, 1.0), (2, 2.0), (step, 9.0)]


def test_an_attempt_that_ends_before_its_first_step_takes_nothing_back(path):
    attempt(path, [(1, 1.0), (2, 2.0), (3, 3.0)])
    attempt(path, [(2, 9.0)], resumed_from=2)  # an evaluation before the first step
    with EventLog(path, run_id="r") as log:
        log.started()
        log.failed(step=1, error="train-step: no", category="train-step", resumable=False)
    assert losses(path) == [(1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0)]


def test_steps_that_a_roll_back_undid_are_left_out(path):
    with EventLog(path, run_id="r") as log:
        log.started()
        for step in (1, 2, 3):
            log.metrics({"loss": float(step)}, step=step)
        log.metric(name=ROLLED_BACK_METRIC, value=1, step=3)
        log.metrics({"loss": 20.0}, step=2)
    assert losses(path) == [(1, 1.0), (2, 20.0)]


def test_several_runs_of_a_file_stay_apart(path):
    attempt(path, [(1, 1.0)], run_id="a")
    attempt(path, [(1, 2.0)], run_id="b")
    assert read_metrics(path).column("run_id").to_pylist() == ["a", "a", "b", "b"]
    assert losses(path, run_id="b") == [(1, 2.0)]


def test_the_folder_of_a_run_leads_to_its_log_and_a_log_without_metrics_is_an_empty_table(tmp_path, path):
    path.touch()
    assert (len(read_metrics(path)), len(read_metrics(path).schema)) == (0, 6)
    attempt(tmp_path / "metrics" / "events.jsonl", [(1, 1.0)])
    assert losses(tmp_path) == [(1, 1.0)]


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"metric","name":"loss"',
        b"\0\0\0\n",
        b'{"event":"tomorrow","schema_version":"trainer_event.v2"}\n',
        b'{"error":"x","event":"failed","run_id":"r","schema_version":"trainer_event.v1","seq":9,"step":1,"timestamp_ms":1}\n',
    ],
    ids=["torn", "lost block", "another release", "the runtime before"],
)
def test_lines_that_are_torn_or_of_another_release_are_passed_over(path, line):
    attempt(path, [(1, 1.0)])
    with path.open("ab") as file:
        file.write(line)
    assert losses(path) == [(1, 1.0)]


def test_a_damaged_line_is_named(path):
    attempt(path, [(1, 1.0)])
    with path.open("ab") as file:
        file.write(b'{"event":\n')
    with refusal(EventLogError):
        read_metrics(path)
