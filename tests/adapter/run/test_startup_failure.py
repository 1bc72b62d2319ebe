"""Where a start that failed is still reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genlight.adapter.run.startup_failure import UNKNOWN_RUN_ID, resolve_failure_sinks


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content):
        path = tmp_path / "job.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_faulty_spec_still_names_its_run_its_log_and_its_terminal(spec, tmp_path):
    path = spec(
        {
            "run_id": "r",
            "max_steps": -1,
            "dataset": 3,
            "uploads": {"terminal_url": "http://h/t", "sample_url": 4},
            "capability_token": "canary",
        }
    )
    sinks = resolve_failure_sinks(spec_path=path, environ={})
    assert (sinks.run_id, sinks.terminal_url, sinks.token) == ("r", "http://h/t", "canary")
    assert sinks.events_path == tmp_path / "runs" / "r" / "metrics" / "events.jsonl"
    assert "canary" not in repr(sinks)


def test_without_any_spec_the_environment_is_enough(spec):
    environ = {
        "TRAINER_EVENTS_PATH": "/logs/e.jsonl",
        "TRAINER_UPLOAD_TERMINAL_URL": "http://h/t",
        "TRAINER_CAPABILITY_TOKEN": "t",
        "TRAINER_MAX_RUNTIME_SECONDS": "never",
    }
    sinks = resolve_failure_sinks(environ=environ)
    assert (sinks.run_id, sinks.terminal_url, sinks.token) == (UNKNOWN_RUN_ID, "http://h/t", "t")
    assert sinks.events_path == Path("/logs/e.jsonl")


def test_a_container_has_its_default_log_even_when_the_spec_is_broken(spec):
    sinks = resolve_failure_sinks(environ={"TRAINER_JOB_SPEC_PATH": str(spec("{"))})
    assert sinks.events_path == Path("/tmp/training/metrics/events.jsonl")


def test_a_run_without_an_id_has_no_folder_and_so_no_log_unless_one_is_named(spec, tmp_path):
    path = spec("not json")
    assert resolve_failure_sinks(spec_path=path, environ={}).events_path is None
    for named in ("artifacts_dir=x", "metrics_dir=x/metrics", "events_path=x/metrics/events.jsonl"):
        sinks = resolve_failure_sinks(spec_path=path, environ={}, overrides=[named])
        assert sinks.events_path == tmp_path / "x" / "metrics" / "events.jsonl"


def test_a_url_that_cannot_be_requested_is_no_sink(spec):
    path = spec({"run_id": "r", "uploads": {"terminal_url": "nowhere"}})
    assert resolve_failure_sinks(spec_path=path, environ={}).terminal_url is None
    environ = {"TRAINER_UPLOAD_TERMINAL_URL": "nowhere"}
    assert resolve_failure_sinks(spec_path=spec({"run_id": "r"}), environ=environ).terminal_url is None
