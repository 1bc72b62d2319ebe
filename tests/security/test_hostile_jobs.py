"""Whatever a job spec holds, its start ends in a configuration or in one startup error, and can be reported."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import UNKNOWN_RUN_ID, read_run_config, resolve_run_config
from genlight.adapter.job.spec import JobSpec
from genlight.adapter.plumbing.failures import describe_failure
from genlight.adapter.plumbing.settings import keys_of
from genlight.reporters import EventLog, read_events
from genlight.reporters.events.validation import validate_events

CANARY = "c4nary-0f-4-h0stile-j0b"
SOUND = {"run_id": "r", "trainer": "a:B", "max_steps": 2, "mock_batches": [1], "capability_token": CANARY}
TEXT = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["\ud800", "\udfff", "a\udc80", "../..", "\0", f"http://u:{CANARY}@h/?sig={CANARY}", "hf:a/b:\ud800", CANARY]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
INNER = {
    name: st.dictionaries(st.sampled_from(sorted(keys_of(key.block))), VALUE)
    for name, key in keys_of(JobSpec).items()
    if key.block is not None
}
FIELDS = st.fixed_dictionaries({}, optional={name: VALUE | INNER.get(name, VALUE) for name in keys_of(JobSpec)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@given(fields=FIELDS, more=st.dictionaries(TEXT, VALUE, max_size=1))
@example(fields={"hyperparams": {f"http://u:{CANARY}@h/": 1}}, more={})
@settings(max_examples=200)
def test_a_job_of_any_content_is_resolved_or_refused_and_the_refusal_can_be_written(folder, fields, more):
    path, log = folder / "job.json", folder / "events.jsonl"
    path.write_text(json.dumps({**SOUND, **fields, **more}))
    log.unlink(missing_ok=True)
    given_settings = {"spec_path": path, "environ": {"TRAINER_CAPABILITY_TOKEN": CANARY}}
    try:
        config = resolve_run_config(**given_settings)
    except StartupContractError as error:
        told, _ = read_run_config(**given_settings)
        failure = describe_failure(error, has_checkpoint=False, secrets=told.secrets, environ={})
        with EventLog(log, run_id=told.run_id or UNKNOWN_RUN_ID) as events:
            events.failed(step=0, error=failure.text, category=failure.category)
        (event,) = read_events(log)
        assert event["error"].startswith("startup:startup.")
        assert CANARY not in event["error"]
        assert validate_events(log) == []
    else:
        EventLog(log, run_id=config.run_id).close()
        assert CANARY not in repr(config.spec_fields)
        assert CANARY in config.secrets
