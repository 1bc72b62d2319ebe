"""How a run came to be stands in its event log and in its checkpoints, and both commands show it."""

from __future__ import annotations

import json
import shutil
import subprocess

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter.cli import main
from genlight.adapter.job.config import JOB_NAME, read_job
from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint import read_record
from genlight.reporters import EventLogger, read_events
from genlight.reporters.events.run_metadata import git_state, installed_packages, numerics
from genlight.reporters.events.validation import validate_events
from support.saving_trainer import SAVING_TRAINER

JOB = {
    "run_id": "told",
    "trainer": "metadata_trainer:Counts",
    "max_steps": 2,
    "mock_batches": [1, 2, 3],
    "tags": ["baseline", "small"],
    "notes": "the first one, with key-of-the-job-9",
    "hyperparams": {"api_key": "key-of-the-job-9"},
    "lightning": {"accelerator": "cpu"},
}
TOKEN = "token-canary-31"


@pytest.fixture
def project(tmp_path):
    """A committed project with a job; gives its folder."""
    (tmp_path / "metadata_trainer.py").write_text(SAVING_TRAINER)
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    (tmp_path / ".gitignore").write_text("runs/\n__pycache__/\n")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "one")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    git_state.cache_clear()
    yield tmp_path
    git_state.cache_clear()


def attempt(project, *overrides, **options):
    return run_job(RunOptions(spec_path=project / "job.json", overrides=overrides, **options))


@pytest.mark.filterwarnings("ignore:.*fork.*multi-threaded.*:DeprecationWarning")
def test_event_log_and_record_have_the_metadata_of_the_run_and_no_token(project, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/genlight", "run", "job.json", "--set", f"capability_token={TOKEN}"])
    token = f"capability_token={TOKEN}"
    assert attempt(project, token) == 0
    assert attempt(project, token, "resume_from_latest=true") == 0

    run = project / "runs" / "told"
    log = run / "metrics" / "events.jsonl"
    assert validate_events(log) == []
    started = [event for event in read_events(log) if event["event"] == "started"]
    record = read_record(run / "checkpoints" / "final.json")
    for metadata in (started[0]["metadata"], started[1]["metadata"], record.metadata):
        assert metadata["git"]["dirty"] is False
        assert len(metadata["git"]["commit"]) == 40
        assert metadata["packages"]["torch"]
        assert metadata["tags"] == ["baseline", "small"]
        assert metadata["notes"] == "the first one, with <hidden>"
        assert "capability_token=<hidden>" in metadata["command"]
    for file in project.joinpath("runs").rglob("*"):
        if file.is_file():
            assert TOKEN.encode() not in file.read_bytes(), file
            assert b"key-of-the-job-9" not in file.read_bytes(), file

    capsys.readouterr()
    assert main(["events", str(run)]) == 0
    assert record.metadata["git"]["commit"] in (shown := capsys.readouterr().out)
    assert 'tags=["baseline", "small"]' in shown
    assert main(["checkpoints", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert record.metadata["git"]["commit"] in shown
    assert "the first one" in shown
    assert main(["checkpoints", "show", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == record.metadata


def test_the_job_in_the_folder_of_a_run_can_continue_the_run(project, tmp_path_factory, monkeypatch):
    assert attempt(project, "hyperparams.rate=0.5") == 0
    path = project / "runs" / "told" / JOB_NAME
    first = path.read_bytes()
    assert json.loads(first)["hyperparams"]["rate"] == 0.5

    assert attempt(project, "resume_from_latest=true", "max_steps=3", "hyperparams.rate=0.1") == 2
    assert path.read_bytes() == first, "a job that was refused has trained nothing"

    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    more = ["resume_from_latest=true", "max_steps=3", "hyperparams.api_key=k", "notes=null"]
    assert run_job(RunOptions(spec_path=path, overrides=more)) == 0
    assert read_record(project / "runs" / "told" / "checkpoints" / "final.json").step == 3
    assert read_job(path.parent)["max_steps"] == 3

    assert attempt(project, fresh=True) == 0
    (aside,) = path.parent.glob("before-*")
    assert read_job(aside)["max_steps"] == 3
    assert read_job(path.parent)["max_steps"] == 2


def test_a_plain_fit_has_the_metadata_too(tmp_path, quiet):
    trainer = pl.Trainer(
        **{**quiet, "enable_checkpointing": True, "logger": EventLogger(tmp_path / "events.jsonl", run_id="plain")},
        max_steps=2,
        callbacks=[Checkpoint(tmp_path / "checkpoints")],
    )
    trainer.fit(BoringModel())

    started = next(read_events(tmp_path / "events.jsonl"))
    record = read_record(tmp_path / "checkpoints" / "final.json")
    assert started["metadata"] == {**record.metadata, "ranks": 1, "last_step": 2, "numerics": numerics()}
    assert record.metadata["packages"]["lightning"]
    assert record.metadata["host"]


# settings that change bits


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("threads", "threads is 3, was 2"),
        ("deterministic", "deterministic is True, was False"),
        ("matmul_precision", "matmul_precision is high, was highest"),
        ("torch", "torch is 2.0, was "),
        (None, None),
    ],
)
def test_a_resume_names_changed_settings_that_may_change_bits(project, monkeypatch, caplog, capsys, change, said):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which Lightning would set and leave
    torch.set_num_threads(2)
    assert attempt(project, "max_steps=1") == 0
    first = next(iter(read_events(project / "runs" / "told" / "metrics" / "events.jsonl")))["metadata"]["numerics"]
    assert (first["threads"], first["deterministic"], first["matmul_precision"]) == (2, False, "highest")
    shutil.copytree(project / "runs" / "told", project / "copy")

    overrides = ["lightning.deterministic=true"] if change == "deterministic" else []
    if change == "threads":
        torch.set_num_threads(3)
    elif change == "matmul_precision":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    elif change == "torch":
        packages = {**installed_packages(), "torch": "2.0"}
        monkeypatch.setattr("genlight.reporters.events.run_metadata.installed_packages", lambda: packages)
    try:
        assert attempt(project, "max_steps=2", "resume_from_latest=true", *overrides, allow_changed=True) == 0
    finally:
        torch.use_deterministic_algorithms(False)

    warned = [text for text in caplog.messages if "may not have the same numbers" in text]
    assert [said in text for text in warned] == ([] if said is None else [True])
    capsys.readouterr()
    assert main(["diff", str(project / "copy"), str(project / "runs" / "told")]) == 0
    assert (f"  {change} " in capsys.readouterr().out) is (change is not None)
