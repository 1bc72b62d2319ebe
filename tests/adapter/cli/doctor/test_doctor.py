"""``genlight doctor``: the settings of a job and all its faults, without training."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.cli import main
from genlight.adapter.job.sources import VARIABLES

TRAINER = """
from support.trainer_class import Counts as Good

class Lacking:
    def setup(self, ctx): ...

class Misspells(Good):
    def evaluates(self, state, ctx): ...
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A sound job in a separate folder, the working directory; returns a writer of job specs."""
    monkeypatch.chdir(tmp_path)
    for name in [*VARIABLES, "HF_ENDPOINT"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "doctors_trainer.py").write_text(TRAINER)
    (tmp_path / "broken_trainer.py").write_text("raise OSError('canary-token is not for you')")
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")

    def write(**fields):
        spec = {
            "run_id": "r",
            "trainer": "doctors_trainer:Good",
            "max_steps": 5,
            "dataset": {"parquet_paths": ["a.parquet"], "columns": ["x"]},
            "lightning": {"accelerator": "cpu"},
        }
        (tmp_path / "job.json").write_text(json.dumps({**spec, **fields}))
        return "job.json"

    return write


@pytest.fixture
def diagnose(capsys):
    """Runs the command and returns its exit code and its output."""

    def run(*words):
        code = main(["doctor", *words])
        return code, capsys.readouterr().out

    return run


def lines(text, level):
    return [line for line in text.splitlines() if line.startswith(level)]


def test_a_sound_job_is_found_sound_and_nothing_is_created(job, diagnose, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    code, text = diagnose(job())
    assert (code, lines(text, "fault")) == (0, [])
    assert "the run can start\n\nsettings of " in text
    after = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    assert after == sorted([*before, "job.json"])
    for subject, word in (
        ("artifacts", "can be written"),
        ("dataset", "1 Parquet file"),
        ("trainer", "with all hooks"),
        ("trainer", "Lightning takes the job: CPUAccelerator, SingleDeviceStrategy, 1 ranks"),
    ):
        assert any(subject in line and word in line for line in lines(text, "ok"))


def test_every_setting_is_shown_with_its_value_and_its_source(job, diagnose, monkeypatch):
    monkeypatch.setenv("TRAINER_MAX_RUNTIME_SECONDS", "60")
    _, text = diagnose(job(metric_every=3), "--set", "hyperparams.lr=0.1", "--set", "checkpoint_every=7", "--all")
    table = {words[0]: words[1:] for line in text.splitlines() if len(words := line.split(maxsplit=2)) == 3}
    assert table["max_runtime_seconds"] == ["TRAINER_MAX_RUNTIME_SECONDS", "60.0"]
    assert table["checkpoint_every"] == ["--set", "7"]
    assert table["hyperparams"] == ["--set", '{"lr": 0.1}']
    assert table["sample_every"] == ["default", "0"]
    assert table["dataset.batch_size"] == ["default", "32"]
    assert re.search(r"metric_every +job spec", text)
    assert str(Path("runs/r/metrics/events.jsonl").absolute()) in text


def test_all_faults_of_spec_environment_trainer_data_and_inputs_are_listed(job, diagnose, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINER_UPLOAD_DEADLINE_SECONDS", "-1")
    (tmp_path / "blocked").write_text("")
    path = job(
        metric_every=-1,
        orchestrated=True,
        trainer="doctors_trainer:Lacking",
        dataset={"parquet_paths": ["none.parquet", "a.parquet", "nothing.parquet"], "columns": ["y"]},
        inputs={"base_model_ref": "./no/model", "resume_checkpoint_url": "http://127.0.0.1:1/c.json"},
        uploads={"terminal_url": "http://127.0.0.1:1/t"},
        lightning={"accelerator": "cpu", "device": 1},
    )
    code, text = diagnose(path, "--set", f"artifacts_dir={tmp_path / 'blocked'}")
    found = "\n".join(lines(text, "fault"))
    assert code == 2
    for word in (
        *("`metric_every`", "`TRAINER_UPLOAD_DEADLINE_SECONDS`", "startup.missing_capability_token", "train_step"),
        *("startup.invalid_artifact_paths", "none.parquet", "nothing.parquet", "no/model"),
    ):
        assert word in found
    assert f"{len(lines(text, 'fault'))} faults" in text


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_without_a_readable_spec_the_rest_is_still_checked(job, diagnose, tmp_path, monkeypatch, content):
    job()
    if content is None:
        (tmp_path / "job.json").unlink()
    else:
        (tmp_path / "job.json").write_text(content)
    monkeypatch.setenv("TRAINER_PLUGIN", "doctors_trainer:Lacking")
    code, text = diagnose("job.json")
    assert code == 2
    first, *_ = lines(text, "fault")
    assert str(tmp_path / "job.json") in first
    assert len([line for line in lines(text, "fault") if " settings " in line]) == 1
    assert "startup.invalid_trainer" in text
    assert "settings of" not in text, "a table of defaults"


def test_without_an_argument_the_environment_names_the_job(job, diagnose, monkeypatch):
    assert "startup.missing_job_spec_path" in diagnose()[1]
    monkeypatch.setenv("TRAINER_JOB_SPEC_PATH", job())
    monkeypatch.setenv("TRAINER_ARTIFACTS_DIR", "out")
    code, text = diagnose()
    assert code == 0
    assert ["artifacts_dir", "TRAINER_ARTIFACTS_DIR", str(Path("out").absolute())] in map(str.split, text.splitlines())


def test_an_error_of_a_trainers_module_is_reported_without_secrets(job, diagnose):
    code, text = diagnose(job(trainer="broken_trainer:T", capability_token="canary-token"))
    assert code == 2
    assert "importing 'broken_trainer:T' raised OSError" in text
    assert "canary" not in text


def test_secrets_are_masked_wherever_they_come_from(job, diagnose, monkeypatch):
    monkeypatch.setenv("TRAINER_CAPABILITY_TOKEN", "canary-1")
    monkeypatch.setenv("TENSORHUB_URL", "http://u:canary-2@127.0.0.1:1/x?canary-3")
    path = job(
        capability_token="canary-4",
        hyperparams={
            "api_key": "canary-5",
            "nested": [{"password": "canary-6"}],
            "url": "http://canary-7:x@h/?canary-8",
        },
        inputs={"base_model_url": "http://u:canary-9@127.0.0.1:1/m?canary-10"},
        uploads={"metrics_url": "http://u:canary-11@127.0.0.1:1/m?canary-12"},
        owner="canary-1 is my token",
    )
    _, text = diagnose(path, "--all")
    assert re.search(r"capability_token +TRAINER_CAPABILITY_TOKEN +<hidden>", text)
    assert "canary" not in text


def test_data_without_a_full_batch_is_a_fault_if_the_rest_is_dropped(job, diagnose, tmp_path):
    pq.write_table(pa.table({"x": list(range(10))}), tmp_path / "ten.parquet")
    for drops, code in ((False, 0), (True, 2)):
        dataset = {"parquet_paths": ["ten.parquet"], "batch_size": 11, "drop_last": drops}
        assert diagnose(job(dataset=dataset))[0] == code


def test_a_misspelled_optional_hook_is_named(job, diagnose):
    code, text = diagnose(job(trainer="doctors_trainer:Misspells"))
    assert code == 0
    assert any(
        "`evaluates` is not a hook and is never called; did you mean `evaluate`?" in line
        for line in lines(text, "warning")
    ), text


def test_an_existing_checkpoint_is_a_fault_unless_the_run_resumes(job, diagnose, tmp_path):
    record = tmp_path / "runs" / "r" / "checkpoints" / "step-00000003.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"step": 3, "state": {}}')  # as an older runtime wrote one
    code, text = diagnose(job())
    assert code == 2
    assert "startup.artifacts_in_use" in text
    assert diagnose(job(resume_from_latest=True))[0] == 0


def test_a_live_run_in_the_directory_is_a_fault(job, diagnose):
    from genlight.adapter.job.config import resolve_run_config
    from genlight.adapter.run.folder import lock_artifacts, prepare_artifact_dirs

    config = resolve_run_config(spec_path=job(), environ={})
    prepare_artifact_dirs(config)
    with lock_artifacts(config):
        code, text = diagnose(job())
        assert code == 2
        assert f"in use by a live run (process {os.getpid()} " in text
    assert diagnose(job())[0] == 0


@pytest.mark.parametrize(
    ("origin", "levels"), [("http://far.example", ["ok", "warning"]), ("https://far.example", ["ok"])]
)
def test_a_token_that_would_travel_without_encryption_is_a_warning(job, diagnose, origin, levels):
    _, text = diagnose(job(capability_token="t"), "--set", f"token_origins={origin}")
    assert [line.split()[0] for line in text.splitlines() if line.split()[1:2] == ["token"]] == levels


def test_an_unused_token_and_a_missing_one_are_warnings(job, diagnose):
    assert "is sent to no origin" in diagnose(job(capability_token="t"))[1]
    assert (
        "is not set, and would be sent only to http://127.0.0.1:1"
        in diagnose(job(uploads={"metrics_url": "http://127.0.0.1:1/m"}))[1]
    )


def test_data_behind_a_url_is_a_warning_that_it_was_not_checked(job, diagnose):
    code, text = diagnose(job(dataset={"parquet_paths": ["s3://key:canary@bucket/x.parquet"]}))
    assert code == 0
    assert "s3://bucket/x.parquet is not checked" in text
    assert "canary" not in text
