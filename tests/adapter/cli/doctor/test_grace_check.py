"""The time that a stop has is compared with what a save takes."""

import json

import pytest

from genlight.adapter.cli import main
from support.saving_trainer import SAVING_TRAINER


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run that has saved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graceful_trainer.py").write_text(SAVING_TRAINER)
    job = {"run_id": "r", "trainer": "graceful_trainer:Counts", "max_steps": 2, "mock_batches": [1, 2]}
    (tmp_path / "job.json").write_text(json.dumps(job | {"lightning": {"accelerator": "cpu"}}))
    assert main(["run", "job.json"]) == 0


def findings(capsys):
    capsys.readouterr()
    code = main(["doctor", "job.json", "--set", "resume_from_latest=true"])
    return code, [line for line in capsys.readouterr().out.splitlines() if "a stop has" in line]


def test_a_grace_period_that_is_shorter_than_a_save_is_red(trained, capsys, monkeypatch):
    monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", "0.0000001")
    code, (line,) = findings(capsys)
    assert code == 2
    assert "a stop has 1e-07 s" in line
    main(["doctor", "job.json", "--set", "resume_from_latest=true"])
    assert "  → have the scheduler send its signal at least " in capsys.readouterr().out


def test_one_that_is_long_enough_is_not_and_without_one_nothing_is_said(trained, capsys, monkeypatch):
    assert findings(capsys) == (0, [])
    monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", "1000000")
    code, (line,) = findings(capsys)
    assert code == 0
    assert "writing a checkpoint of" in line
