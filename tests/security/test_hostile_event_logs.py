"""An event log that somebody else wrote costs no more than its size, and its faults are reported."""

import contextlib
import json
import resource
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import EventLogError
from genlight.adapter.view import log_search
from genlight.adapter.view.summary import summary_of
from genlight.reporters import EventLog, read_events
from genlight.reporters.events import event_log, json_lines, validation
from genlight.reporters.events.event import Metric
from genlight.reporters.events.json_lines import encode_json
from genlight.reporters.events.reader import follow, starts_of, typed_events
from genlight.reporters.events.validation import validate_events
from support.messages import refusal

STARTED = b'{"event":"started","run_id":"r","schema_version":"trainer_event.v1","seq":1,"timestamp_ms":1}\n'
METRIC = {
    "event": "metric",
    "name": "loss",
    "run_id": "r",
    "schema_version": "trainer_event.v1",
    "seq": 2,
    "step": 1,
    "timestamp_ms": 1,
    "value": 0.5,
}
NESTED, FLAT = b'{"event":"started","a":' * 200_000 + b"1" + b"}" * 200_000, b'{"event":"started"},' * 200_000
HUGE = {"nested": NESTED + b"\n", "flat": b'{"a":[' + FLAT + b"{}]}\n"}


@pytest.mark.parametrize("line", HUGE)
def test_a_line_of_megabytes_with_the_same_word_in_it_many_times_is_parsed_once(tmp_path, line):
    """Parsing the line again for each of them would take an hour."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(HUGE[line] + STARTED)

    assert len(starts_of(path, "r")) == 1
    with EventLog(path, run_id="r") as log:
        assert log.attempt == 2
    assert validate_events(path)


def test_a_word_in_another_event_is_no_start_and_a_last_line_that_is_nested_without_end_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(STARTED + b'{"a":{"event":"started"},"event":"metric","run_id":"r"}\n' + HUGE["nested"])

    assert len(starts_of(path, "r")) == 1
    with refusal(EventLogError):
        EventLog(path, run_id="r")


LIMITED = """
import resource, sys
from genlight.adapter.cli import main
import genlight.adapter.cli.events, genlight.adapter.cli.command_line
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["events", sys.argv[1], "--check"])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) >> 10)
sys.exit(code)
"""


@pytest.mark.slow
def test_checking_a_long_log_needs_no_memory_for_it(tmp_path):
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(STARTED)
        for seq in range(2, 1_000_000):
            event = Metric(run_id="r", seq=seq, timestamp_ms=1, name="loss", step=seq, value=0.5)
            file.write(encode_json(event) + b"\n")
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    said, grown_mib = done.stdout.splitlines()
    assert said == "sound: 999999 events"
    assert int(grown_mib) < 50
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """A log whose second line has four times as many bytes as are read; they are fewer here."""
    for module in (json_lines, log_search):
        monkeypatch.setattr(module, "LONGEST_LINE", 2 << 20)
    path = tmp_path / "metrics" / "events.jsonl"
    path.parent.mkdir()
    path.write_bytes(STARTED + b'{"event":"metric","name":"' + b"x" * (8 << 20) + b'"}\n')
    return path


READS = {
    "validation": validate_events,
    "structs": lambda path: [*typed_events(path)],
    "dictionaries": lambda path: [*read_events(path)],
    "following": lambda path: [*follow(path)],
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_line_of_more_bytes_than_any_run_writes_is_named_before_it_takes_memory(endless, reads):
    with refusal(EventLogError):
        reads(endless)


def test_a_listing_takes_no_more_memory_for_it(endless, monkeypatch):
    looked_through = []
    search = log_search._search_lines
    monkeypatch.setattr(
        log_search, "_search_lines", lambda seen, block: looked_through.append(len(block)) or search(seen, block)
    )

    assert summary_of(endless.parent.parent).run_id == "r"
    assert max(looked_through) <= 4 << 20


@pytest.fixture(params=["one hole", "many holes"])
def sparse(request, tmp_path):
    """A log of some kilobytes on disk that is as long as all disks of this machine; with lines, or without an end."""
    path = tmp_path / "run" / "metrics" / "events.jsonl"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(STARTED)
        for number in range(1, 50 if request.param == "many holes" else 1):
            file.seek(number << 23)
            file.write(b"\n")
        file.truncate(1 << 42)
    if path.stat().st_blocks * 512 > 1 << 22:
        pytest.skip("this file system keeps no holes")
    return path


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_log_with_holes_that_no_run_leaves_is_named_before_it_is_read(sparse, reads):
    with refusal(EventLogError):
        reads(sparse)
    with refusal(EventLogError):
        EventLog(sparse, run_id="r")


def test_a_log_with_long_holes_is_listed_reported_and_compared_by_its_beginning(sparse, tmp_path, capsys):
    assert summary_of(tmp_path / "run").run_id == "r"
    for words in (["ls"], ["diff", "run", "run"], ["report", "run", "--to", "report.html"], ["stop", "run"]):
        with contextlib.chdir(tmp_path), contextlib.suppress(SystemExit):
            main(words)
    assert "run" in capsys.readouterr().out
    assert "were never written" in (tmp_path / "report.html").read_text()


def test_blocks_that_a_power_cut_left_are_no_long_holes(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(STARTED)
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\n" + encode_json(METRIC) + b"\n")
    assert len([*typed_events(path, strict=False)]) == 2


VALUES = st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3) | st.just("nan")
CHANGES = st.dictionaries(st.sampled_from([*METRIC, "value_text", "other"]), VALUES, max_size=3)


@given(st.lists(CHANGES, max_size=4), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_the_quick_look_at_metrics_finds_what_the_whole_proof_finds(tmp_path_factory, changes, separators, in_order):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    events = [{**METRIC, "seq": seq, **change} for seq, change in enumerate(changes, start=2)]
    lines = [json.dumps(event, separators=separators, sort_keys=in_order).encode() + b"\n" for event in events]
    path.write_bytes(STARTED + b"".join(lines))

    found = validate_events(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "encode_lines", lambda events: b"")
        assert validate_events(path) == found


@pytest.mark.parametrize("now_ns", [-1, -(10**18), 2**63, 10**30, 0])
def test_a_clock_before_1970_or_far_ahead_keeps_the_log_valid(tmp_path, now_ns, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(event_log, "time_ns", lambda: now_ns)
    with EventLog(path, run_id="r") as log:
        log.started()
        log.metrics({"a": 1.0, "b": float("nan")}, step=1)
        log.sample(path="s", step=1)
        log.checkpoint(path="c", step=1)
        log.failed(step=1, error="x")

    assert validate_events(path) == []
    assert len(list(read_events(path))) == 6
