"""`genlight init` writes a folder that is ready to run, or nothing."""

from __future__ import annotations

import json
import os

import pytest

from genlight.adapter.cli.command_line import main
from genlight.reporters import read_events
from support.forked import run_forked


def genlight(*words, folder):
    """Run the command line in `folder`, without variables that name a job."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    return run_forked(*words, folder=folder, environ=environ)


@pytest.mark.slow
def test_a_new_project_runs_at_once_and_learns(tmp_path):
    for words in (["init", "start"], ["run", "start/job.json"]):
        done = genlight(*words, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    assert "warning" not in done.stderr.lower(), done.stderr
    (log,) = tmp_path.rglob("events.jsonl")
    events = list(read_events(log))
    losses = [event["value"] for event in events if event["event"] == "metric" and event["name"] == "train/loss"]
    assert events[-1]["event"] == "completed"
    assert losses[-1] < losses[0] / 2


def test_the_folder_holds_everything_that_its_job_and_readme_name(tmp_path, capsys):
    folder = tmp_path / "new" / "my start"
    assert main(["init", str(folder)]) == 0

    job = json.loads((folder / "job.json").read_text())
    assert (folder / job["$schema"]).is_file()
    assert all((folder / path).is_file() for path in job["dataset"]["parquet_paths"])
    assert f"next: genlight run '{folder / 'job.json'}'" in capsys.readouterr().out


def test_a_folder_that_is_not_empty_is_left_as_it_was(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")

    assert main(["init", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert "is not an empty folder; name a new one" in capsys.readouterr().err


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch, capsys):
    """An unset variable of a script leaves an empty name."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", ""]) == 2
    assert "the name of the folder is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
