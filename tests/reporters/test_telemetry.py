"""WASR telemetry: keys, complete lines, concurrent writers, the path, and refused values."""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters import telemetry
from genlight.reporters.events.json_lines import LineFile
from genlight.reporters.telemetry import make_run_id, read_events, telemetry_path, write_event
from support.messages import refusal

pytestmark = pytest.mark.promise(name="old names")

KEYS = {
    *("event", "scenario", "success", "duration_sec", "ttfi_sec", "artifacts", "error", "run_id", "epoch", "step"),
    *("throughput_steps_per_sec", "flops_estimate", "watts_estimate", "flops_per_watt", "suggestions", "timestamp"),
}
HEARTBEAT = {"event": "heartbeat", "scenario": "trainer", "success": True}

WRITER = """
import sys
from genlight.reporters.telemetry import write_event
for step in range(int(sys.argv[2])):
    write_event(event="heartbeat", scenario=sys.argv[1], success=True, step=step, error="x" * 300)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "metrics.jsonl"


def test_an_event_has_every_key_and_null_for_what_was_not_given(path: Path) -> None:
    assert read_events(path) == []
    written = write_event(**HEARTBEAT, path=path)

    (read,) = read_events(path)
    assert read == written
    assert set(read) == KEYS
    assert read["suggestions"] == []
    assert read["artifacts"] == {}
    assert read["error"] == ""
    assert {name for name in KEYS if read[name] is None} == {
        *("duration_sec", "ttfi_sec", "epoch", "step", "throughput_steps_per_sec"),
        *("flops_estimate", "watts_estimate", "flops_per_watt"),
    }
    assert isinstance(read["timestamp"], float)


def test_values_are_written_as_given_and_what_json_cannot_hold_as_null_or_text(path: Path) -> None:
    given = {
        "run_id": make_run_id(),
        "epoch": 1,
        "step": 1000,
        "duration_sec": math.nan,
        "ttfi_sec": 0.5,
        "throughput_steps_per_sec": 45.2,
        "flops_estimate": math.inf,
        "watts_estimate": 0.0,
        "flops_per_watt": 3.3e9,
        "suggestions": ["Consider lower LR"],
        "artifacts": {"checkpoint": Path("/c/1"), "best": [math.nan, 2**70, None], "odd": os.fsdecode(b"\xff")},
    }

    write_event(**HEARTBEAT, **given, path=path)

    expected = given | {"duration_sec": None, "flops_estimate": None}
    expected["artifacts"] = {"checkpoint": "/c/1", "best": [None, 2**70, None], "odd": "\\udcff"}
    line = path.read_text()
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"a bare {name}"))
    assert {name: read[name] for name in given} == expected
    assert line == json.dumps(read, sort_keys=True, separators=(",", ":")) + "\n"


def test_the_path_is_the_argument_then_the_environment_then_the_default(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLDFLUX_METRICS_PATH", raising=False)
    write_event(**HEARTBEAT)
    assert len(read_events(".worldflux/metrics.jsonl")) == len(read_events()) == 1

    monkeypatch.setenv("WORLDFLUX_METRICS_PATH", "elsewhere.jsonl")
    assert telemetry_path() == Path("elsewhere.jsonl")
    assert telemetry_path("argument.jsonl") == Path("argument.jsonl")


def test_blank_and_torn_lines_are_skipped_by_readers_and_a_torn_one_is_cut_off_by_the_next_writer(path: Path) -> None:
    write_event(**HEARTBEAT, step=1, path=path)
    path.write_bytes(b"  \n\n" + path.read_bytes() + b'{"event":"hea')

    assert [event["step"] for event in read_events(path)] == [1]
    write_event(**HEARTBEAT, step=2, path=path)
    assert [event["step"] for event in read_events(path)] == [1, 2]


def test_many_threads_and_processes_write_whole_lines_to_one_file(path: Path) -> None:
    environ = {**os.environ, "WORLDFLUX_METRICS_PATH": str(path)}
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, f"process {n}", "40"], env=environ) for n in range(3)]
    threads = [
        threading.Thread(
            target=lambda name=f"thread {n}": [
                write_event(event="heartbeat", scenario=name, success=True, step=step, path=path) for step in range(40)
            ]
        )
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]

    steps: dict[str, list[int]] = {}
    for event in read_events(path):
        steps.setdefault(event["scenario"], []).append(event["step"])
    assert len(steps) == 6
    assert all(order == list(range(40)) for order in steps.values())


def test_a_file_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")

    with refusal(EventLogError):
        write_event(**HEARTBEAT, path=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_a_file_that_another_writer_keeps_is_an_error_that_names_the_process(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("genlight.reporters.telemetry.TRIES", 2)
    with contextlib.closing(LineFile(path)), pytest.raises(EventLogError, match=f"written by process {os.getpid()}"):
        write_event(**HEARTBEAT, path=path)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"event": ""}, ValueError, "`event`"),
        ({"scenario": 3}, TypeError, "`scenario`"),
        ({"success": "yes"}, TypeError, "`success`"),
        ({"duration_sec": "long"}, TypeError, "duration_sec"),
        ({"step": -1}, ValueError, "`step`"),
        ({"epoch": 1.5}, TypeError, "`epoch`"),
        ({"suggestions": "one text"}, TypeError, "`suggestions`"),
        ({"suggestions": [1]}, TypeError, r"`suggestions\[0\]`"),
        ({"artifacts": [1]}, TypeError, "`artifacts`"),
        ({"artifacts": {"a": {"b": object()}}}, TypeError, "received a object"),
        ({"error": 3}, TypeError, "`error`"),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_nothing_is_written(wrong, error, text, path: Path) -> None:
    with pytest.raises(error, match=text):
        write_event(**{**HEARTBEAT, **wrong}, path=path)
    assert not path.exists()


def test_a_text_holds_no_secret(path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", "tok-1234567890")

    write_event(**HEARTBEAT, error="refused tok-1234567890 at https://me:pw123456@host/x", path=path)

    assert "tok-1234567890" not in path.read_text()
    assert "pw123456" not in path.read_text()


def test_the_signature_and_names_of_upstream_are_taken(path: Path, monkeypatch) -> None:
    event = write_event(event="x", scenario="s", success=True, timestamp=5.5, error=None, suggestions=None, path=path)
    assert (event["timestamp"], event["error"], event["suggestions"]) == (5.5, "", [])
    assert {*telemetry.REQUIRED_EVENT_FIELDS, *telemetry.OPTIONAL_EVENT_FIELDS} == set(event)
    monkeypatch.setenv("WORLDFLUX_METRICS_PATH", "~/metrics.jsonl")
    assert telemetry.default_metrics_path() == Path.home() / "metrics.jsonl"
