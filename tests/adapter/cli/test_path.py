"""The paths of the newest and the best checkpoint of a run, and the mark in a listing."""

from __future__ import annotations

import json
import shutil

import pytest

from genlight.adapter.cli import main
from genlight.adapter.run.run import RunOptions, run_job

TRAINER = """
from support.trainer_class import Counts as Base


class Counts(Base):
    def evaluate(self, state, ctx):
        return {"score": {2: 5.0, 4: 1.0, 6: 3.0}[state["steps"]]}
"""
JOB = {
    "run_id": "scored",
    "trainer": "path_trainer:Counts",
    "max_steps": 6,
    "mock_batches": [1, 2, 3, 4, 5, 6],
    "validate": {"every_n_steps": 2},
    "checkpoints": {"every_n_steps": 2, "keep_last": 0, "monitor": "score", "mode": "min"},
    "lightning": {"accelerator": "cpu"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("path")
    (folder / "path_trainer.py").write_text(TRAINER)
    (folder / "job.json").write_text(json.dumps(JOB))
    assert run_job(RunOptions(spec_path=folder / "job.json", environ={})) == 0
    return folder / "runs" / "scored"


@pytest.fixture
def scored(trained, tmp_path):
    """A copy of a run with scores 5, 1 and 3 after 2, 4 and 6 steps."""
    return shutil.copytree(trained, tmp_path / "scored")


def printed(capsys, *arguments):
    assert main(["path", *map(str, arguments)]) == 0
    return capsys.readouterr().out.strip()


def test_the_newest_and_the_best_checkpoint_are_printed(scored, capsys, monkeypatch):
    checkpoints = scored / "checkpoints"
    assert printed(capsys, scored) == str(checkpoints / "final.json")
    assert printed(capsys, scored, "--best") == str(checkpoints / "step-00000004.json")
    monkeypatch.chdir(scored.parent)
    assert printed(capsys, "scored/checkpoints") == str(checkpoints / "final.json")


def test_a_broken_checkpoint_is_named_and_skipped(scored, capsys):
    checkpoints = scored / "checkpoints"
    for name in ("final", "step-00000004"):
        for file in (checkpoints / name).iterdir():
            if file.is_file() and file.name != "scores.json":
                file.write_bytes(b"x" * file.stat().st_size)
    for option, broken in ([], "final"), (["--best"], "step-00000004"):
        assert main(["path", str(scored), *option]) == 0
        shown = capsys.readouterr()
        assert shown.out.strip() == str(checkpoints / "step-00000006.json")
        assert broken in shown.err


def test_a_listing_marks_the_best(scored, capsys):
    assert main(["checkpoints", "list", str(scored)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best" in line]
    assert line.startswith("step-00000004")


def test_a_run_without_scores_or_checkpoints_is_named(scored, tmp_path, capsys):
    for record in (scored / "checkpoints").glob("*.json"):
        record.unlink()
    for words, code, said in (
        ([scored], 1, "no complete checkpoint in"),
        ([scored, "--best"], 2, "`checkpoints.monitor`"),
        ([tmp_path / "absent"], 2, "`genlight ls`"),
    ):
        assert main(["path", *map(str, words)]) == code
        assert said in capsys.readouterr().err
