"""A run in the folder of another one whose uploads have failed: it trains, and neither sends what is the other's."""

from __future__ import annotations

import shlex

import pytest

from genlight.adapter.cli import main
from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks.checkpoint import verify
from support.jobs import write_job
from support.upload_server import TOKEN


@pytest.fixture
def start(tmp_path):
    """Starts a run in the one folder that all share, with uploads to `url`; returns its exit code."""

    def start(run_id, url, *, fresh=False, **environ):
        shared = {
            "TRAINER_JOB_SPEC_PATH": str(write_job(tmp_path, run_id=run_id, owner="me")),
            "TRAINER_ARTIFACTS_DIR": str(tmp_path / "shared"),
            "TRAINER_CAPABILITY_TOKEN": TOKEN,
            "TRAINER_UPLOAD_CHECKPOINT_URL": f"{url}/checkpoint",
            "TRAINER_UPLOAD_DEADLINE_SECONDS": "20" if fresh or environ.get("arrives") else "0.2",
            "TENSORHUB_URL": url,
        }
        environ.pop("arrives", None)
        return run_job(RunOptions(environ={**shared, **environ}, fresh=fresh))

    return start


AWAY = "http://127.0.0.1:9"


def sent(chaos):
    return {message["run_id"] for message in chaos.messages("/checkpoint")}


@pytest.mark.parametrize("how", ["fresh", "own folder of checkpoints"])
def test_the_next_run_sends_the_uploads_of_the_run_before_under_that_runs_name(
    how, start, chaos, tmp_path, monkeypatch, capsys, caplog
):
    shared = tmp_path / "shared"
    assert start("a", AWAY) == 1
    if how == "fresh":
        assert start("b", chaos.url, fresh=True) == 0
        checkpoints = shared / "checkpoints"
    else:
        checkpoints = tmp_path / "of-b"
        assert start("b", chaos.url, arrives=True, TRAINER_CHECKPOINTS_DIR=str(checkpoints)) == 0
    record = verify(checkpoints / "final.json")
    assert (record.run_id, record.step) == ("b", 3)
    assert sent(chaos) == {"b"}
    assert f"genlight uploads retry {shlex.quote(str(shared / 'uploads'))}" in caplog.text

    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", TOKEN)
    monkeypatch.setenv("TENSORHUB_URL", chaos.url)
    monkeypatch.setenv("TRAINER_UPLOAD_CHECKPOINT_URL", f"{chaos.url}/checkpoint")
    assert main(["uploads", "retry", str(shared / "uploads")]) == 0, capsys.readouterr()
    assert sent(chaos) == {"a", "b"}
