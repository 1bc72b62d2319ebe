"""Reading and following an event log."""

import threading

import pytest

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters.events.event import Started
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.json_lines import Position
from genlight.reporters.events.reader import follow, read_events, typed_events


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def write_run(path, steps: int = 2, run_id: str = "r") -> None:
    with EventLog(path, run_id=run_id) as log:
        log.started()
        for step in range(1, steps + 1):
            log.metric(name="a", value=step, step=step)
        log.completed(step=steps, final_checkpoint=None)


def test_a_kind_that_is_no_text_does_not_end_the_reading(path):
    with path.open("ab") as file:
        file.write(b'{"event":["completed"]}\n')
    write_run(path.with_name("run.jsonl"))
    with path.open("ab") as file:
        file.write(path.with_name("run.jsonl").read_bytes())
    assert [event["event"] for event in follow(path)] == [["completed"], "started", "metric", "metric", "completed"]


def test_every_prefix_of_a_log_can_be_read(path, tmp_path):
    write_run(path)
    content, cut = path.read_bytes(), tmp_path / "cut.jsonl"
    for size in range(len(content) + 1):
        cut.write_bytes(content[:size])
        assert [event["seq"] for event in read_events(cut)] == list(range(1, content[:size].count(b"\n") + 1))


def test_a_line_that_is_finished_while_the_log_is_read_is_not_called_broken(path):
    write_run(path)
    content = path.read_bytes()
    cut = content.index(b'"metric"')
    path.write_bytes(content[:cut])
    position = Position()
    events = typed_events(path, position=position)
    assert isinstance(next(events), Started)
    with path.open("ab") as file:
        file.write(content[cut:])
    assert list(events) == []
    assert [type(event).__name__ for event in typed_events(path, position=position)] == [
        "Metric",
        "Metric",
        "Completed",
    ]
    assert list(typed_events(path, position=position)) == []


@pytest.mark.parametrize(
    "line", [b"eggs", b"", b"[1]", b'{"a":NaN}', b'{"a":"\xff"}', b'{"a":' + b"[" * 9999 + b"]" * 9999 + b"}"]
)
def test_a_broken_line_within_the_log_is_named(path, line):
    write_run(path)
    with path.open("ab") as file:
        file.write(line + b"\n{}\n")
    for reads in (read_events, follow, typed_events):
        with pytest.raises(EventLogError, match=f"line 5 of event log {path} is broken"):
            list(reads(path))


def test_following_waits_for_the_log_and_for_each_event_until_the_terminal_one(path):
    seen = []
    arrived = threading.Semaphore(0)

    def collect() -> None:
        for event in follow(path, poll_every_s=0.002):
            seen.append(event["event"])
            arrived.release()

    follower = threading.Thread(target=collect)
    follower.start()
    with EventLog(path, run_id="r") as log:
        for write in (
            lambda: log.started(),
            lambda: log.metric(name="a", value=1, step=1),
            lambda: log.completed(step=1, final_checkpoint=None),
        ):
            write()
            assert arrived.acquire(timeout=60)
    follower.join(timeout=60)
    assert seen == ["started", "metric", "completed"]


def test_following_never_gives_a_line_that_is_cut_off_later(path):
    write_run(path, steps=1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"event":"metric","torn')
    events = follow(path, poll_every_s=0.002)
    assert next(events)["event"] == "started"
    path.write_bytes(b"".join(lines))
    assert [event["event"] for event in events] == ["metric", "completed"]


def test_following_goes_over_to_a_file_that_took_the_place_of_the_log(path):
    with EventLog(path, run_id="old") as log:
        log.started()
    events = follow(path, poll_every_s=0.002)
    assert next(events)["run_id"] == "old"
    path.rename(path.with_suffix(".aside"))
    for _ in range(2):  # it does not end with the first attempt
        write_run(path, run_id="new")
    assert list(events) == list(read_events(path))
