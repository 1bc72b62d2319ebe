"""``genlight events``."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from unittest import mock

import pytest
from pyarrow import csv, parquet

from genlight.adapter.cli import main
from genlight.reporters.events.event_log import EventLog

PROGRAM = """
import sys
from genlight.adapter.cli import main
code = main(["events", *sys.argv[1:]])
assert not {"torch", "lightning"} & set(sys.modules), "imported too much"
sys.exit(code)
"""


def call(*arguments):
    return main(["events", *map(str, arguments)])


def write_run(path, *, ends=True):
    ticks = iter(range(1_700_000_000_000_000_000, 1_700_000_099_000_000_000, 1_000_000_000))
    with (
        mock.patch("genlight.reporters.events.event_log.time_ns", side_effect=ticks),
        EventLog(path, run_id="digits") as log,
    ):
        log.started()
        log.metric(name="train/loss", value=0.123456789, step=10)
        log.metric(name="train/lr", value=float("nan"), step=10)
        log.metric(name="train/loss", value=0.1, step=20)
        log.checkpoint(path="/c/step-00000020", step=20)
        log.sample(path="/s/step-00000020-00.json", step=20)
        if ends:
            log.completed(step=20, final_checkpoint="/c/final", stopped="should_stop")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")


def shown(capsys):
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_log_is_shown_line_by_line_with_the_metrics_of_a_step_together(path, capsys):
    write_run(path)
    assert call(path) == 0
    lines = shown(capsys)
    assert [line.split(" ", 2)[2] for line in lines] == [
        "started run_id=digits",
        "metric 10 train/loss 0.123457 train/lr nan",
        "metric 20 train/loss 0.1",
        "checkpoint 20 path=/c/step-00000020 run_id=digits",
        "sample 20 path=/s/step-00000020-00.json run_id=digits",
        "completed 20 final_checkpoint=/c/final run_id=digits stopped=should_stop",
    ]


def test_the_directory_of_a_run_stands_for_its_log_and_a_second_attempt_is_named(tmp_path, capsys):
    write_run(tmp_path / "metrics/events.jsonl")
    with EventLog(tmp_path / "metrics/events.jsonl", run_id="digits") as log:
        log.started()
        log.failed(step=30, error="preempted", resumable=True)
    assert call(tmp_path) == 0
    lines = shown(capsys)
    assert len(lines) == 8
    assert lines[-2].endswith("started attempt=2 run_id=digits")
    assert lines[-1].endswith("failed 30 category=preempted error=preempted resumable=true run_id=digits")


def test_json_gives_the_lines_of_the_log(path, capsys):
    write_run(path)
    assert call(path, "--json") == 0
    assert capsys.readouterr().out == path.read_text()


def test_a_text_cannot_control_the_terminal(path, capsys):
    with EventLog(path, run_id="r") as log:
        log.failed(step=0, error="\x1b[2J\nboom [red]", category="input")
    call(path)
    out = capsys.readouterr().out
    assert "input:\\x1b[2J\\nboom [red]" in out
    assert "\x1b[2J" not in out


def test_following_ends_with_the_run(path, capsys):
    write_run(path, ends=False)
    finished = threading.Event()

    def follow():
        assert call(path, "--follow", "--json") == 0
        finished.set()

    follower = threading.Thread(target=follow)
    follower.start()
    with EventLog(path, run_id="digits") as log:
        log.started()
        log.completed(step=20, final_checkpoint=None)
    follower.join(timeout=60)
    assert finished.is_set()
    assert capsys.readouterr().out == path.read_text()


@pytest.mark.parametrize(("content", "count"), [(None, 7), (b"", 0), (b"\x1f\x8b\x08gzip", 0)])
def test_a_sound_log_passes_the_check(path, capsys, content, count):
    """A log without a complete line breaks no rule."""
    write_run(path) if content is None else path.write_bytes(content)
    assert call(path, "--check") == 0
    assert capsys.readouterr().out == f"sound: {count} events\n"


def test_every_violation_is_printed_with_its_line(path, capsys):
    write_run(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[2], "broken\n", *lines[4:], lines[1]]))
    assert call(path, "--check") == 1
    out = shown(capsys)
    assert [line.split(": ")[:2] for line in out[:-1]] == [
        ["line 2", "seq"],
        ["line 3", "json"],
        ["line 7", "seq"],
        ["line 7", "terminal"],
    ]
    assert out[-1] == f"{path}: 4 violations"


def test_violations_come_as_json_and_cannot_control_the_terminal(path, capsys):
    path.write_text('{"\\u001b[2J":1}\nbroken\n')
    assert call(path, "--check", "--json") == 1
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert (last["line"], last["rule"]) == (2, "json")
    assert "\x1b" not in out


@pytest.mark.parametrize("options", [[], ["--check"], ["--json"]])
def test_an_absent_log_is_a_usage_error_that_names_it(path, options, capsys):
    assert call(path, *options) == 2
    assert f"no event log at {path}" in capsys.readouterr().err


def test_a_broken_line_ends_the_display_with_its_number(path, capsys):
    write_run(path)
    with path.open("a") as file:
        file.write("broken\n")
    assert call(path) == 1
    assert "line 8" in capsys.readouterr().err


def test_lines_that_lack_fields_can_still_be_shown(path, capsys):
    path.write_text('{}\n{"event":"metric"}\n{"event":"failed","timestamp_ms":1e99}\n{"event":"completed","step":[]}\n')
    assert call(path) == 0
    assert len(shown(capsys)) == 4


def test_it_runs_without_torch_and_stops_quietly_when_its_reader_does(path):
    with EventLog(path, run_id="r") as log:
        log.started()
        for step in range(5000):
            log.metric(name="a", value=1, step=step)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "started" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 0
        assert process.stderr.read() == ""


def test_metrics_are_written_as_a_table(path, capfdbinary):
    write_run(path)
    assert call(path, "--metrics") == 0
    table = csv.read_csv(io.BytesIO(capfdbinary.readouterr().out))
    assert list(zip(*(table[name].to_pylist() for name in ("step", "name")), strict=True)) == [
        (10, "train/loss"),
        (10, "train/lr"),
        (20, "train/loss"),
    ]
    assert call(path, "--metrics", "--format", "parquet") == 0
    assert parquet.read_table(io.BytesIO(capfdbinary.readouterr().out)).column_names == table.column_names
