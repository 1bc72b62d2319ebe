"""The report of a start that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genlight.adapter.job.config import read_run_config
from genlight.adapter.run.run import log_of_failed_start


def read(**settings):
    """The readable settings of a run, and its event log."""
    config, _ = read_run_config(**settings)
    return config, log_of_failed_start(config, is_from_file="spec_path" in settings)


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
    config, log = read(spec_path=path, environ={})
    assert (config.run_id, config.uploads.terminal_url, config.capability_token) == ("r", "http://h/t", "canary")
    assert log == tmp_path / "runs" / "r" / "metrics" / "events.jsonl"
    assert "canary" not in repr(config)


def test_without_any_spec_the_environment_is_enough(spec):
    environ = {
        "TRAINER_EVENTS_PATH": "/logs/e.jsonl",
        "TRAINER_UPLOAD_TERMINAL_URL": "http://h/t",
        "TRAINER_CAPABILITY_TOKEN": "t",
        "TRAINER_MAX_RUNTIME_SECONDS": "never",
    }
    config, log = read(environ=environ)
    assert (config.run_id, config.uploads.terminal_url, config.capability_token) == ("", "http://h/t", "t")
    assert log == Path("/logs/e.jsonl")


def test_a_container_has_its_default_log_even_when_the_spec_is_broken(spec):
    _, log = read(environ={"TRAINER_JOB_SPEC_PATH": str(spec("{"))})
    assert log == Path("/tmp/training/metrics/events.jsonl")


def test_a_run_without_an_id_has_no_log_unless_the_job_names_one(spec, tmp_path):
    path = spec("not json")
    assert read(spec_path=path, environ={})[1] is None
    for named in ("artifacts_dir=x", "metrics_dir=x/metrics", "events_path=x/metrics/events.jsonl"):
        _, log = read(spec_path=path, environ={}, overrides=[named])
        assert log == tmp_path / "x" / "metrics" / "events.jsonl"


def test_a_url_that_cannot_be_requested_is_no_sink(spec):
    path = spec({"run_id": "r", "uploads": {"terminal_url": "nowhere"}})
    assert read(spec_path=path, environ={})[0].uploads.terminal_url is None
    environ = {"TRAINER_UPLOAD_TERMINAL_URL": "nowhere"}
    assert read(spec_path=spec({"run_id": "r"}), environ=environ)[0].uploads.terminal_url is None
