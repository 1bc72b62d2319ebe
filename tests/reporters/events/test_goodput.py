"""The parts of a run's wall time match the reports of its attempts, and sum to the total."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters.events.goodput import account_of


def log(folder: Path, *events: tuple[float, str, dict[str, Any]]) -> Path:
    """A log of events, each with its time in seconds."""
    path = folder / "events.jsonl"
    lines = [
        json.dumps({"schema_version": "trainer_event.v1", "run_id": "r", "seq": i, "event": event, **more}
                   | {"timestamp_ms": int(at_s * 1000)})
        for i, (at_s, event, more) in enumerate(events, start=1)
    ]  # fmt: skip
    path.write_text("".join(line + "\n" for line in lines))
    return path


def spent(at_s: float, step: int, **seconds: float) -> list[tuple[float, str, dict[str, Any]]]:
    return [(at_s, "metric", {"name": f"time/{part}", "value": value, "step": step}) for part, value in seconds.items()]


def completed(at_s: float, step: int) -> tuple[float, str, dict[str, Any]]:
    return (at_s, "completed", {"step": step, "final_checkpoint": "f"})


FAILED_AT_150 = {"step": 150, "error": "train-step: no", "category": "train-step", "resumable": True}
RUNS = {
    "never interrupted": (
        [
            *spent(110, 50, steps=8.0, data_wait=2.0, start_up=5.0),
            *spent(120, 100, steps=15.0, data_wait=4.0, checkpoint=1.0, start_up=5.0),
            completed(123, 100),
        ],
        {"steps": 15.0, "data_wait": 4.0, "checkpoint": 1.0, "start_up": 5.0, "ending": 3.0},
    ),
    "waited for uploads after its last checkpoint": (
        [
            *spent(120, 100, steps=20.0, start_up=5.0),
            (122, "checkpoint", {"step": 100, "path": "final.json"}),
            completed(130, 100),
        ],
        {"steps": 20.0, "start_up": 5.0, "ending": 2.0, "upload_wait": 8.0},
    ),
    "failed after a checkpoint of another step": (
        [
            *spent(110, 100, steps=10.0, start_up=5.0),
            (111, "checkpoint", {"step": 100, "path": "step-00000100.json"}),
            (120, "failed", FAILED_AT_150),
        ],
        {"steps": 20.0, "start_up": 5.0},
    ),
    "rolled back": (
        [*spent(120, 100, steps=16.0, lost=4.0, start_up=5.0), completed(120, 100)],
        {"steps": 16.0, "lost": 4.0, "start_up": 5.0},
    ),
    "killed": (
        [
            *spent(110, 50, steps=10.0, start_up=5.0),
            *spent(120, 100, steps=20.0, start_up=5.0),
            # The next process starts at 150 and needs 10 s to its first step.
            (160, "started", {"attempt": 2}),
            (160, "metric", {"name": "trainer/resumed_from_step", "value": 50, "step": 50}),
            *spent(180, 150, steps=20.0, start_up=10.0),
            completed(181, 150),
        ],
        {"steps": 30.0, "lost": 10.0, "start_up": 15.0, "idle": 30.0, "ending": 1.0},
    ),
    "without reports": ([completed(102, 5)], {"steps": 2.0}),
}


@pytest.mark.parametrize(("events", "expected"), RUNS.values(), ids=RUNS)
def test_the_parts_of_a_run_sum_to_its_wall_time(tmp_path, events, expected):
    path = log(tmp_path, (100, "started", {}), *events)
    with path.open("ab") as file:
        file.write(b'{"event":"started","timest')  # a torn line does not count

    account = account_of(path)

    assert account is not None
    assert {part: s for part, s in account.seconds.items() if s} == pytest.approx(expected)
    assert account.wall_s == pytest.approx(sum(expected.values()))
    assert account.goodput == pytest.approx(expected["steps"] / account.wall_s)
    assert account.attempts == 1 + ("idle" in expected)
    assert account.is_measured is (len(expected) > 1)


FAILED = {"step": 0, "error": "startup: no", "category": "startup", "resumable": False}


@pytest.mark.parametrize(
    ("later", "extra"),
    [
        ([(121, "started", {"attempt": 2, "metadata": {"stage": "validate"}}),
          (123, "metric", {"name": "val/loss", "value": 1.0, "step": 100}),
          (123, "completed", {"step": 100, "final_checkpoint": None})], {"evaluation": 2.0, "idle": 1.0}),
        ([(121, "started", {"attempt": 2}), (123, "failed", FAILED)], {"ending": 2.0, "idle": 1.0}),
        ([(123, "failed", FAILED)], {}),
    ],
    ids=["an evaluation", "a failure before the first step", "a failed start"],
)  # fmt: skip
def test_an_attempt_without_a_training_step_loses_nothing_of_the_earlier_ones(tmp_path, later, extra):
    assert account_of(log(tmp_path, (1, "failed", FAILED))) is None
    fit = [(100, "started", {}), *spent(120, 100, steps=15.0, start_up=5.0)]
    fit += [(120, "completed", {"step": 100, "final_checkpoint": "f"})]
    before, after = account_of(log(tmp_path, *fit)), account_of(log(tmp_path, *fit, *later))

    assert before is not None
    assert after is not None
    assert after.seconds == {**before.seconds, **{part: before.seconds[part] + s for part, s in extra.items()}}


@pytest.mark.parametrize("jump_s", [-7.0, -3600.0])
@pytest.mark.parametrize("after", [110, 121], ids=["in an attempt", "between two attempts"])
def test_a_clock_that_was_set_back_makes_no_part_negative(tmp_path, jump_s, after):
    events = [
        (100000, "started", {}),
        *spent(100110, 50, steps=104.0, start_up=5.0),
        (100120, "checkpoint", {"step": 50, "path": "c"}),
        (100121, "failed", {"step": 50, "error": "preempted", "category": "preempted", "resumable": True}),
        (100130, "started", {"attempt": 2}),
        (100130, "metric", {"name": "trainer/resumed_from_step", "value": 50, "step": 50}),
        *spent(100150, 60, steps=20.0, start_up=5.0),
        (100150, "completed", {"step": 60, "final_checkpoint": None}),
    ]
    jumped = [(at_s + (jump_s if at_s > 100000 + after else 0.0), kind, more) for at_s, kind, more in events]

    account = account_of(log(tmp_path, *jumped))

    assert account is not None
    assert min(account.seconds.values()) >= 0
    assert account.seconds["steps"] == pytest.approx(124.0, abs=7), "what was measured counts, whatever the clock says"
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s)
    assert all(span.ended_s >= span.began_s for span in account.spans)
    assert 0 < account.goodput <= 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"metric","name":"lo',
        b"",
        b"[]",
        b'{"event":"metric","name":"loss","step":3,"value":1.0}',
        b'{"event":"metric","name":"loss","step":3,"timestamp_ms":"now","value":1.0}',
        b'{"event":"metric","name":"loss","step":3,"timestamp_ms":-1,"value":1.0}',
        b'{"event":"metric","name":"loss","timestamp_ms":1,"value":1.0}',
        b'{"event":"metric","name":"time/steps","step":3,"timestamp_ms":1,"value":"long"}',
        b'{"event":"other","timestamp_ms":1}',
        b'{"event":"started","timestamp_ms":1' + b"0" * 400 + b"}",
        b'{"event":"started","timestamp_ms":1,"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"event":"metric","name":"\xff","step":3,"timestamp_ms":1,"value":1.0}',
    ],
)
def test_a_line_that_is_not_an_event_is_named(tmp_path, line):
    path = log(tmp_path, (1, "started", {}), (2, "completed", {"step": 5, "final_checkpoint": None}))
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + last)

    with pytest.raises(EventLogError, match=rf"line 2 of event log {path} is broken") as raised:
        account_of(path)
    assert len(str(raised.value)) < 500


attempts = st.lists(
    st.tuples(
        st.floats(0, 20),  # idle before
        st.floats(0, 10),  # start-up
        st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 1), st.integers(1, 50)), max_size=5),
        st.floats(0, 5),  # after the last figures
        st.floats(0, 1),  # share of the steps that the next attempt keeps
    ),
    min_size=1,
    max_size=5,
)


@given(attempts)
def test_whatever_happens_the_parts_sum_to_the_wall_time_and_none_is_negative(tmp_path_factory, attempts):
    now, step, events = 100.0, 0, []
    for number, (idle, start_up, figures, rest, kept) in enumerate(attempts):
        now += idle + start_up
        first = step
        events.append((now, "started", {"attempt": number + 1} if number else {}))
        if step:
            events.append((now, "metric", {"name": "trainer/resumed_from_step", "value": step, "step": step}))
        steps_s = wait_s = 0.0
        for duration, share, done in figures:
            now, step = now + duration, step + done
            steps_s, wait_s = steps_s + duration * (1 - share), wait_s + duration * share
            events += spent(now, step, steps=round(steps_s, 3), data_wait=round(wait_s, 3), start_up=round(start_up, 3))
        now += rest
        events.append((now, "metric", {"name": "train/loss", "value": 1.0, "step": step}))
        step = first + int((step - first) * kept)

    account = account_of(log(tmp_path_factory.mktemp("log"), *events))

    assert account is not None
    assert sum(account.seconds.values()) == pytest.approx(account.wall_s, abs=0.05)
    assert all(seconds >= -0.05 for seconds in account.seconds.values())
