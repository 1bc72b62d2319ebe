"""`genlight init` writes a folder that runs as it is, and nothing where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from genlight.adapter.cli.command_line import main
from genlight.reporters import read_events

OWN = """
import torch
from gen_worker.trainer import StepResult

class Helper:
    pass

class Mean:
    def setup(self, ctx): ...
    def configure(self, ctx): return {"mean": torch.nn.Linear(1, 1)}
    def prepare_batch(self, raw, state, ctx): return torch.tensor(raw["seen"].to_pylist())
    def train_step(self, batch, state, ctx): return StepResult(metrics={"loss": batch.mean()})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


def genlight(*words, folder):
    """Run the command line in `folder`, without variables that name a job."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    command = [sys.executable, "-m", "genlight.adapter.cli", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=240)


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


@pytest.mark.slow
def test_a_project_from_a_class_and_data_of_the_user_runs_at_once(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "mean.py").write_text(OWN)
    pq.write_table(pa.table({"seen": [1.0, 2.0, 3.0, 4.0]}), tmp_path / "seen.parquet")

    for words in (["init", "own", "--from", "mean.py", "--data", "seen.parquet"], ["run", "own/job.json"]):
        done = genlight(*words, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    assert not (tmp_path / "own" / "my_trainer.py").exists()
    assert (tmp_path / "own" / "mean.py").read_text() == OWN


def test_the_folder_holds_everything_that_its_job_and_readme_name(tmp_path, capsys):
    assert main(["init", str(tmp_path / "new" / "start")]) == 0

    folder = tmp_path / "new" / "start"
    job = json.loads((folder / "job.json").read_text())
    assert (folder / job["$schema"]).is_file()
    assert all((folder / path).is_file() for path in job["dataset"]["parquet_paths"])
    assert f"next: genlight run {folder / 'job.json'}" in capsys.readouterr().out


def test_a_folder_that_is_not_empty_is_left_as_it_was(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")

    assert main(["init", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert "is not an empty folder; name a new one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "source", "expected"),
    [
        ("two.py", OWN + OWN.replace("Mean", "Other"), "two.py", "expected one class with a method train_step"),
        ("none.py", "class Helper: ...", "none.py", "classes in it: Helper"),
        ("one.py", OWN, "one.py:Nobody", "there is no such class; classes in it: Helper, Mean"),
        ("bad.py", "class (", "bad.py", "not a Python file"),
        ("a-b.py", OWN, "a-b.py", "whose name can be imported"),
        ("make_data.py", OWN, "make_data.py", "rename it first"),
        ("one.py", OWN, "absent.py", "No such file"),
    ],
)
def test_a_class_that_cannot_be_taken_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys, name, text, source, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)

    assert main(["init", "new", "--from", source]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_data_that_cannot_be_trained_on_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    """The project would run at once, and fail at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder").mkdir()
    for given, expected in (
        (["rows.csv"], "rows.csv: not a complete Parquet file"),
        (["folder"], "folder matches no file that ends in .parquet"),
        (["none", "rows.csv", "gone"], "--data none: there is no such file; --data gone: there is no such file"),
    ):
        assert main(["init", "new", *(word for path in given for word in ("--data", path))]) == 2
        assert expected in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def test_the_next_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my project"]) == 0
    assert "next: genlight run 'my project/job.json'\n" in capsys.readouterr().out


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch, capsys):
    """What an unset variable of a script leaves."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", ""]) == 2
    assert "the name of the folder is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
