"""The rules of an event log: writer, validator and published schema say the same."""

import json
import math

import jsonschema
import pytest
from hypothesis import example, given, settings, strategies as st

from genlight.adapter.contract.exceptions import EventLogError
from genlight.reporters.events.event import MAX_STEP, event_schema
from genlight.reporters.events.event_log import EventLog
from genlight.reporters.events.reader import read_events
from genlight.reporters.events.validation import validate_events
from support.messages import refusal

SCHEMA = jsonschema.Draft202012Validator(event_schema())
SCHEMA.check_schema(event_schema())

COMMON = {"run_id": "r", "schema_version": "trainer_event.v1", "timestamp_ms": 5}
STARTED = {"event": "started", **COMMON}
METRIC = {"event": "metric", "name": "a", "step": 1, "value": 0.5, **COMMON}
CHECKPOINT = {"event": "checkpoint", "path": "/c", "step": 1, **COMMON}
SAMPLE = {"event": "sample", "path": "/s", "step": 1, **COMMON}
COMPLETED = {"event": "completed", "final_checkpoint": None, "step": 1, **COMMON}
FAILED = {"event": "failed", "category": "input", "error": "input:x", "resumable": False, "step": 1, **COMMON}
RESUMED = METRIC | {"name": "trainer/resumed_from_step", "value": 1}
ROLLED_BACK = METRIC | {"name": "trainer/rolled_back_to_step", "value": 1, "step": 3}
KINDS = [STARTED, METRIC, CHECKPOINT, SAMPLE, COMPLETED, FAILED]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def compact(event: dict) -> str:
    return json.dumps(event, sort_keys=True, separators=(",", ":"))


def write(path, *events: dict) -> None:
    numbered = [{"seq": number} | event for number, event in enumerate(events, start=1)]
    path.write_text("".join(compact(event) + "\n" for event in numbered))


def rules(path) -> list[tuple[int, str]]:
    return [(violation.line, violation.rule) for violation in validate_events(path)]


SOUND = {
    "a whole run": [STARTED, METRIC, CHECKPOINT, SAMPLE, COMPLETED],
    "a run that goes on": [STARTED, METRIC],
    "nothing": [],
    "a failure before the start": [FAILED],
    "two failures before the start": [FAILED, FAILED],
    "a failure before the start of a run that is not known": [FAILED | {"run_id": ""}],
    "an attempt after a killed one": [STARTED, METRIC, STARTED | {"attempt": 2}, COMPLETED],
    "an attempt after a finished one": [STARTED, COMPLETED, STARTED | {"attempt": 2}, COMPLETED],
    "another run": [STARTED, COMPLETED, STARTED | {"run_id": "q"}, COMPLETED | {"run_id": "q"}],
    "a failed start of another run": [STARTED, FAILED | {"run_id": "q"}],
    "metrics of later steps before a checkpoint": [STARTED, METRIC, METRIC | {"step": 2}, CHECKPOINT],
    "a step trained again": [STARTED, METRIC, CHECKPOINT, STARTED | {"attempt": 2}, RESUMED, METRIC],
    "a step that comes again": [STARTED, CHECKPOINT | {"step": 2}, ROLLED_BACK, METRIC | {"step": 2}],
    "a stop": [STARTED, FAILED | {"category": "timeout", "error": "timeout", "resumable": True}],
}


@pytest.mark.parametrize("events", SOUND.values(), ids=SOUND)
def test_a_sound_log_has_no_violation(path, events):
    write(path, *events)
    assert validate_events(path) == []


BROKEN = {
    "a metric before the start": ([METRIC, STARTED], [(1, "started")]),
    "a completion before the start": ([COMPLETED], [(1, "started")]),
    "two terminal events": ([STARTED, COMPLETED, COMPLETED], [(3, "terminal")]),
    "a metric after the terminal event": ([STARTED, COMPLETED, METRIC], [(3, "terminal")]),
    "a completion after a failure": ([STARTED, FAILED, COMPLETED], [(3, "terminal")]),
    "a metric after a failed start": ([FAILED, METRIC], [(2, "terminal")]),
    "a line of another run": ([STARTED, METRIC | {"run_id": "q"}, COMPLETED], [(2, "run_id")]),
    "the end of another run": ([STARTED, COMPLETED | {"run_id": "q"}, METRIC, COMPLETED], [(2, "run_id")]),
    "a checkpoint of another run": ([STARTED, CHECKPOINT | {"run_id": "q"}, METRIC], [(2, "run_id")]),
    "a checkpoint before the start": ([CHECKPOINT, COMPLETED], [(1, "started"), (2, "started")]),
    "a gap": ([STARTED, METRIC | {"seq": 3}, COMPLETED | {"seq": 4}], [(2, "seq")]),
    "a repeated seq": ([STARTED, METRIC | {"seq": 1}, METRIC | {"seq": 2}], [(2, "seq")]),
    "a late first seq": ([STARTED | {"seq": 2}], [(1, "seq")]),
    "an attempt without its number": ([STARTED, STARTED], [(2, "attempt")]),
    "an attempt with another number": ([STARTED, STARTED | {"attempt": 3}], [(2, "attempt")]),
    "a first attempt with a number": ([STARTED | {"attempt": 2}], [(1, "attempt")]),
    "a metric after its checkpoint": ([STARTED, CHECKPOINT, METRIC], [(3, "order")]),
    "a resume said twice": ([STARTED, RESUMED, RESUMED], [(3, "resumed")]),
    "a resume from elsewhere": ([STARTED, RESUMED | {"value": 7}], [(2, "resumed")]),
    "a roll-back to a later step": ([STARTED, ROLLED_BACK | {"value": 4}], [(2, "rolled_back")]),
    "a roll-back to nowhere": (
        [STARTED, CHECKPOINT, ROLLED_BACK | {"value": None, "value_text": "nan"}, METRIC],
        [(3, "rolled_back"), (4, "order")],
    ),
    "a metric of the step gone back to": ([STARTED, CHECKPOINT, ROLLED_BACK, METRIC], [(4, "order")]),
    "a field too many": ([STARTED | {"extra": 1}], [(1, "schema")]),
    "another version": ([STARTED | {"schema_version": "trainer_event.v2"}], [(1, "schema")]),
    "an error without its category": ([STARTED, FAILED | {"error": "x"}], [(2, "schema")]),
    "a failure of an older runtime, without its category": (
        [STARTED, {k: v for k, v in FAILED.items() if k != "category"}],
        [(2, "schema")],
    ),
    "a null without its name": ([STARTED, METRIC | {"value": None}], [(2, "schema")]),
}


@pytest.mark.parametrize(("events", "expected"), BROKEN.values(), ids=BROKEN)
def test_each_broken_rule_is_found_at_its_line(path, events, expected):
    write(path, *events)
    assert rules(path) == expected


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("eggs", "json"),
        ("[]", "json"),
        ("", "json"),
        ('{"event":"met{"event":"metric"}', "json"),
        (compact(METRIC | {"seq": 2}).replace("0.5", "NaN"), "json"),
        (compact(METRIC | {"seq": 2}).replace('"name":"a"', '"name":"a","name":"a"'), "form"),
        (compact(METRIC | {"seq": 2, "name": "?"}).replace("?", "\\ud800"), "json"),
        (json.dumps(METRIC | {"seq": 2}, sort_keys=True), "form"),
        (compact(METRIC | {"seq": 2}) + "\r", "form"),
        (json.dumps({"seq": 2} | METRIC, separators=(",", ":")), "form"),
    ],
)
def test_each_fault_of_writing_is_found(path, line, rule):
    write(path, STARTED)
    with path.open("a", newline="") as file:
        file.write(line + "\n")
        file.write(compact(COMPLETED | {"seq": 3}) + "\n")
    assert rules(path) == [(2, rule)]


def test_white_space_within_a_text_is_no_fault(path):
    write(path, STARTED, METRIC | {"name": 'a "b" \\ c\td, : e'})
    assert validate_events(path) == []


@pytest.mark.parametrize("value", [1e-05, 1e300, 7])
def test_numbers_and_texts_may_be_spelled_as_python_does(path, value):
    write(path, STARTED, METRIC | {"name": "é", "value": value}, SAMPLE)
    assert validate_events(path) == []


def test_all_faults_of_a_line_are_found(path):
    write(path, STARTED)
    line = json.dumps({"seq": 7} | METRIC | {"run_id": "q", "extra": 1})[:-1] + ',"extra":2}'
    path.write_text(path.read_text() + line + "\n")
    assert [rule for _, rule in rules(path)] == ["form", "schema", "seq", "run_id"]


def test_a_torn_tail_is_no_violation(path):
    write(path, STARTED)
    with path.open("a") as file:
        file.write('{"event":"met')
    assert validate_events(path) == []


def test_an_absent_log_is_an_error_and_not_a_sound_log(path):
    with refusal(EventLogError):
        validate_events(path)


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([MAX_STEP, MAX_STEP + 1, 0.5, -1.0, "", "x", "nan", "input:", "canceled", "timeout", "metric"]),
    st.just([]),
    st.just({}),
)


@given(
    st.sampled_from(KINDS),
    st.dictionaries(
        st.sampled_from(sorted({name for kind in KINDS for name in kind} | {"attempt", "stopped", "value_text", "x"})),
        odd_values,
        max_size=3,
    ),
    st.sets(st.sampled_from(sorted(METRIC | FAILED)), max_size=1),
)
@settings(max_examples=300)
@example(METRIC, {"value": None, "value_text": "nan"}, set())
@example(FAILED, {"category": "canceled", "error": "canceled"}, set())
@example(STARTED, {"attempt": 2}, set())
@example(COMPLETED, {"stopped": "x", "final_checkpoint": ""}, set())
def test_schema_and_code_agree_on_every_event(path, kind, changes, dropped):
    event = {k: v for k, v in ({"seq": 1} | kind | changes).items() if k not in dropped}
    path.write_text(compact(event) + "\n")
    assert SCHEMA.is_valid(event) == ("schema" not in [rule for _, rule in rules(path)])


texts = st.text(st.characters(codec=None, exclude_categories=[]), min_size=1, max_size=8)
steps = st.integers(0, 4)
calls = st.one_of(
    st.tuples(st.just("started"), st.just({})),
    st.tuples(
        st.just("metric"),
        st.fixed_dictionaries(
            {
                "name": texts | st.sampled_from(["trainer/resumed_from_step", "trainer/rolled_back_to_step"]),
                "value": st.floats() | steps,
                "step": steps,
            }
        ),
    ),
    st.tuples(st.sampled_from(["checkpoint", "sample"]), st.fixed_dictionaries({"path": texts, "step": steps})),
    st.tuples(
        st.just("completed"),
        st.fixed_dictionaries(
            {"step": steps, "final_checkpoint": st.none() | texts, "stopped": st.none() | st.just("should_stop")}
        ),
    ),
    st.tuples(
        st.just("failed"),
        st.fixed_dictionaries(
            {
                "step": steps,
                "error": texts | st.sampled_from(["canceled", "input:x"]),
                "category": st.sampled_from([None, "input", "upload", "canceled"]),
                "resumable": st.booleans(),
            }
        ),
    ),
    st.tuples(st.just("reopen"), st.fixed_dictionaries({"run_id": st.sampled_from(["r", "q"])})),
)


def readable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def matches(event: dict, name: str, arguments: dict) -> bool:
    expected = {k: readable(v) if isinstance(v, str) else v for k, v in arguments.items()}
    value = expected.get("value", 0.0)
    if not math.isfinite(value):
        expected |= {"value": None, "value_text": str(value)}
    for optional in ("stopped", "category"):
        if optional in expected and expected[optional] is None:
            del expected[optional]
    if name == "failed":
        error = expected.pop("error")
        assert event["error"] in {error, f"{event['category']}:{error}"}
    return event["event"] == name and expected.items() <= event.items()


@given(st.lists(calls, max_size=25).map(lambda made: [("started", {}), *made]))
@settings(max_examples=60)
def test_any_sequence_of_calls_gives_a_sound_log_that_reads_back(path, made):
    path.unlink(missing_ok=True)
    accepted = []
    log = EventLog(path, run_id="r")
    for name, arguments in made:
        if name == "reopen":
            log.close()
            log = EventLog(path, **arguments)
            continue
        try:
            getattr(log, name)(**arguments)
        except (EventLogError, ValueError):
            continue
        accepted.append((name, arguments))
    log.close()
    events = list(read_events(path))
    assert validate_events(path) == []
    assert all(SCHEMA.is_valid(event) for event in events)
    assert len(events) == len(accepted)
    assert all(matches(event, *call) for event, call in zip(events, accepted, strict=True))
