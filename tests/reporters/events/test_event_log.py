"""The writer of an event log: accepted and refused events, and the lines it writes."""

import json
import os
import sys
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.validation import validate_events
from support.messages import refusal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics" / "events.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_attempts_are_counted_per_run_and_only_when_they_started(path):
    for run_id in ("a", "b", "a"):
        with EventLog(path, run_id=run_id) as log:
            log.started()
            log.completed(step=0, final_checkpoint=None)
    with EventLog(path, run_id="a") as log:
        log.failed(step=0, error="bad spec", category="startup")
    with EventLog(path, run_id="a") as log:
        assert log.attempt == 3
    with EventLog(path, run_id="b") as log:
        assert log.attempt == 2
    assert validate_events(path) == []


@pytest.mark.parametrize(
    "tail",
    [b'{"event":"met', b'{"event":"started","run_id":"r"}', b"\0" * 4096, b"\0\0\n\0\0", b"{\xff", b"{"],
    ids=["half a line", "a line without its newline", "lost blocks", "lost blocks with newline", "bytes", "a brace"],
)
@pytest.mark.parametrize("complete_lines", [0, 2])
def test_a_torn_last_line_is_cut_off_and_never_glued_to_the_next(path, tail, complete_lines):
    path.parent.mkdir()
    path.touch()
    if complete_lines:
        with EventLog(path, run_id="r") as log:
            log.started()
            log.metric(name="a", value=1, step=1)
    with path.open("ab") as file:
        file.write(tail)
    with EventLog(path, run_id="r") as log:
        log.started()
    assert [event["seq"] for event in lines(path)] == list(range(1, complete_lines + 2))
    assert validate_events(path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a shopping list", "does not hold JSON lines"),
        (b"eggs\nmilk\n", "has other content"),
        (b'["a"]\n', "has other content"),
        (b'{"a":"\xff"}\n', "has other content"),
        (b'{"event":"heartbeat"}\n', "has other content"),
        (b'{"schema_version":"trainer_event.v2","seq":3}\n', "has other content"),
        (b'{"schema_version":"trainer_event.v1","seq":"3"}\n', "has other content"),
    ],
)
def test_a_file_that_is_no_event_log_is_refused_and_left_as_it_was(path, content, message):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(EventLogError, match=message):
        EventLog(path, run_id="r")
    assert path.read_bytes() == content


def test_a_second_writer_is_refused_with_path_and_holder_and_leaves_no_descriptor_open(path, open_files):
    with EventLog(path, run_id="r"):
        before = open_files(path.parent)
        assert before
        with pytest.raises(EventLogError, match=f"{path}.*process {os.getpid()}"):
            EventLog(path, run_id="r")
        assert open_files(path.parent) == before


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, Path.touch], ids=["directory", "fifo", "no folder"])
def test_a_path_that_cannot_be_a_regular_file_is_refused_by_name(tmp_path, make):
    make(tmp_path / "events")
    path = tmp_path / "events" / "x.jsonl" if make is Path.touch else tmp_path / "events"
    with pytest.raises(EventLogError, match=f"cannot open {path}"):
        EventLog(path, run_id="r")


def test_lines_are_completed_after_a_short_write_with_a_clock_before_1970(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:100]))
    monkeypatch.setattr("genlight.reporters.events.event_log.time_ns", lambda: -(10**15))
    with EventLog(path, run_id="r") as log:
        log.started()
        log.metrics({"loss": 0.5, "rate": 0.25}, step=1)
    assert [line["timestamp_ms"] for line in lines(path)] == [0, 0, 0]
    assert validate_events(path) == []


def test_the_rules_hold_for_each_metric_of_a_step(path):
    with EventLog(path, run_id="r") as log:
        log.started()
        with pytest.raises(EventLogError, match="its value is its step"):
            log.metrics({"a": 1, "trainer/resumed_from_step": 7}, step=8)
        log.metrics({"a": 1, "trainer/resumed_from_step": 7}, step=7)
        with pytest.raises(EventLogError, match="once in an attempt"):
            log.metric(name="trainer/resumed_from_step", value=7, step=7)
        with pytest.raises(EventLogError, match="run 'q' cannot start"):
            log.started(run_id="q")
        with pytest.raises(EventLogError, match="already started"):
            log.started()
    assert len(lines(path)) == 3


def test_a_run_without_identity_can_only_fail(path):
    with EventLog(path, run_id="") as log:
        with refusal(EventLogError):
            log.started()
        log.failed(step=0, error="not JSON", category="startup")
    assert validate_events(path) == []


@pytest.mark.promise(name="speed")
def test_the_metrics_of_a_step_are_lines_in_their_order_written_in_one_call(path, monkeypatch):
    written = []
    write = os.write
    with EventLog(path, run_id="r") as log:
        log.started()
        monkeypatch.setattr(os, "write", lambda descriptor, data: written.append(data) or write(descriptor, data))
        log.metrics({"loss": 0.5, "count": 3, "norm": float("inf"), "rate": torch.tensor(0.25)}, step=1)
        monkeypatch.undo()
        log.completed(step=1, final_checkpoint=None)

    metrics = lines(path)[1:-1]
    assert [(m["seq"], m["name"], m["value"], m.get("value_text")) for m in metrics] == [
        (2, "loss", 0.5, None),
        (3, "count", 3.0, None),
        (4, "norm", None, "inf"),
        (5, "rate", 0.25, None),
    ]
    assert [bytes(data).splitlines() for data in written] == [path.read_bytes().splitlines()[1:-1]]
    assert validate_events(path) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (torch.tensor(float("inf")), "inf"),
        (np.float64("-inf"), "-inf"),
        (3, 3.0),
        (np.array([2.5]), 2.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (Decimal("0.25"), 0.25),
    ],
    ids=str,
)
def test_numbers_of_every_kind_become_json_numbers_or_null_with_their_text(path, value, expected):
    with EventLog(path, run_id="r") as log:
        log.started()
        log.metric(name="a", value=value, step=np.int64(1))
    is_text = isinstance(expected, str)
    assert lines(path)[1]["value"] == (None if is_text else expected)
    assert lines(path)[1].get("value_text") == (expected if is_text else None)
    assert validate_events(path) == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"value": "1.5"}, TypeError, "metric 'a'. Expected one number, but received str: '1.5' is a text"),
        ({"value": None}, TypeError, "metric 'a'. Expected one number, but received NoneType"),
        ({"value": 1j}, TypeError, "Expected one number, but received complex"),
        ({"value": torch.zeros(2)}, TypeError, "Expected one number, but received Tensor"),
        ({"value": np.zeros(2)}, TypeError, "Expected one number, but received ndarray"),
        ({"value": 10**400}, TypeError, "received int: int too large to convert to float"),
        ({"name": 3}, TypeError, "Invalid `name`. Expected a string"),
        ({"name": ""}, ValueError, "Invalid `name`. Expected a non-empty string"),
        ({"step": 1.5}, TypeError, "Invalid `step`. Expected an integer >= 0"),
        ({"step": -1}, ValueError, "Invalid `step`"),
        ({"step": 2**63}, ValueError, "Invalid `step`"),
    ],
)
def test_a_metric_that_is_none_is_refused_by_name_and_leaves_no_trace(path, wrong, error, message):
    with EventLog(path, run_id="r") as log:
        log.started()
        given = {"name": "a", "value": 1, "step": 1} | wrong
        with pytest.raises(error, match=message):
            log.metrics({"first": 1.0, given["name"]: given["value"]}, step=given["step"])
        log.metric(name="a", value=1, step=1)
        path.rename(path.with_name("old.jsonl"))
        with EventLog(path, run_id="r") as fresh:  # a log that was moved aside does not block a new one
            assert (fresh.attempt, fresh.seq) == (1, 0)
    log.close()
    with pytest.raises(EventLogError, match="the log is closed"):
        log.metric(name="a", value=1, step=1)
    assert [event["seq"] for event in lines(path.with_name("old.jsonl"))] == [1, 2]


@pytest.mark.parametrize("run_id", [None, 3, b"r"])
def test_a_run_id_that_is_no_text_is_refused(path, run_id):
    with refusal(TypeError):
        EventLog(path, run_id=run_id)
    assert not path.exists()


def test_a_run_id_that_utf8_cannot_hold_is_spelled_out(path):
    for attempt in (1, 2):
        with EventLog(path, run_id="\ud800") as log:
            assert (log.run_id, log.attempt) == ("\\ud800", attempt)
            log.started()
    assert validate_events(path) == []


@pytest.mark.parametrize(
    ("given", "error", "category"),
    [
        ({"error": "boom"}, "train-step:boom", "train-step"),
        ({"error": "input:no file", "category": "input"}, "input:no file", "input"),
        ({"error": "no file", "category": "input"}, "input:no file", "input"),
        ({"error": "preempted"}, "preempted", "preempted"),
        ({"error": "timeout", "category": "timeout"}, "timeout", "timeout"),
        ({"error": "canceled", "category": "train-step"}, "train-step:canceled", "train-step"),
    ],
)
def test_a_failure_has_its_category_in_its_text_and_refuses_another(path, given, error, category):
    with EventLog(path, run_id="r") as log:
        for wrong in ("weather", "canceled"):
            with pytest.raises(ValueError, match=f"does not say its `category` '{wrong}'"):
                log.failed(step=0, error="boom", category=wrong)
        log.failed(step=0, **given)
    assert (lines(path)[0]["error"], lines(path)[0]["category"]) == (error, category)
    assert validate_events(path) == []


def test_metrics_of_many_threads_beside_checkpoints_make_a_log_that_holds_what_was_not_refused(path):
    written, refused = [], []

    def train(thread: int) -> None:
        for step in range(1, 1500):
            try:
                log.metrics({f"thread-{thread}": 1.0}, step=step)
            except EventLogError:
                refused.append((thread, step))
            else:
                written.append((thread, step))
                newest[0] = step

    def save() -> None:
        while any(thread.is_alive() for thread in threads):
            log.checkpoint(path="/c", step=newest[0])

    newest, interval = [1], sys.getswitchinterval()
    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        with EventLog(path, run_id="r") as log:
            log.started()
            for thread in threads:
                thread.start()
            save()
            log.completed(step=1500, final_checkpoint=None)
    finally:
        sys.setswitchinterval(interval)

    assert validate_events(path) == []
    assert len([event for event in lines(path) if event["event"] == "metric"]) == len(written)
    assert len(written) + len(refused) == 3 * 1499
