"""The job that a run writes into its folder starts the same job again, and holds no secret."""

import json

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import JOB_NAME, job_file, read_job, resolve_run_config, write_job
from genlight.adapter.job.standard_callbacks import callbacks_of_job
from support.messages import refusal

KEY, TOKEN, PASSWORD, OF_ENVIRONMENT = "key-canary-7", "token-canary-31", "password-canary-5", "variable-canary-13"
JOB = {
    "run_id": "r1",
    "trainer": "t:T",
    "max_steps": 5,
    "seed": 3,
    "hyperparams": {"lr": 0.1, "net": {"width": 8, "depth": None}, "text": "", "list": []},
    "dataset": {"parquet_paths": ["a.parquet"], "shuffle": True},
    "checkpoints": {"every_n_steps": 2, "monitor": "eval/error"},
    "sample_every": 2,
    "sample_prompts": ["three"],
    "sample_seed": 4,
    "inputs": {"base_model_ref": "https://host/model#sha256=" + "0" * 64},
    "lightning": {"accelerator": "cpu"},
}


@pytest.fixture
def job(tmp_path):
    """Writes a job of `JOB` and the fields given, and returns its path."""

    def write(**fields):
        path = tmp_path / "project" / "first.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**JOB, **fields}))
        return path

    return write


def written(config, **environ):
    config.artifacts_dir.mkdir(parents=True, exist_ok=True)
    assert write_job(config, environ)
    return config.artifacts_dir / JOB_NAME


def settings_of(config):
    own = {"spec_path", "as_given", "sources", "base_dir", "secrets"}
    return {name: value for name in config.__struct_fields__ if name not in own for value in [getattr(config, name)]}


def test_a_run_started_from_its_written_job_is_the_same_job_in_the_same_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["hyperparams.lr=0.2", "cancel_file_path=stop", "dataset.batch_size=4"]
    first = resolve_run_config(spec_path=job(), overrides=overrides, environ={"TRAINER_MAX_RUNTIME_SECONDS": "60"})
    again = resolve_run_config(spec_path=written(first), environ={})
    assert settings_of(again) == settings_of(first)
    assert again.warnings == ()
    assert read_job(again.artifacts_dir) == read_job(written(again).parent)


def test_settings_that_follow_another_one_follow_it_in_the_written_job_too(job):
    path = written(resolve_run_config(spec_path=job(), environ={}))
    changed = resolve_run_config(
        spec_path=path, overrides=["seed=9", "sample_seed=8", "checkpoints.every_n_steps=4"], environ={}
    )
    assert changed.dataset is not None
    seed_of_samples = callbacks_of_job(changed)["WriteSamples"]["seed"]
    assert (changed.dataset.seed, seed_of_samples, changed.checkpoint_every) == (9, 8, 4)
    early = written(resolve_run_config(spec_path=job(checkpoints={}, checkpoint_every=3), environ={}))
    assert resolve_run_config(spec_path=early, overrides=["checkpoint_every=4"], environ={}).checkpoint_every == 4


def test_the_written_job_holds_no_secret_and_a_start_from_it_names_those_that_are_missing(job):
    hyperparams = {"api_key": KEY, "note": f"with {KEY}", "from_environment": OF_ENVIRONMENT, "lr": 0.1}
    uploads = {"metrics_url": f"https://user:{PASSWORD}@host/m"}
    environ = {"TRAINER_CAPABILITY_TOKEN": TOKEN, "MY_SECRET": OF_ENVIRONMENT}
    config = resolve_run_config(
        spec_path=job(hyperparams=hyperparams, uploads=uploads), overrides=["notes=see " + TOKEN], environ=environ
    )
    path = written(config, **environ)
    for secret in (KEY, TOKEN, PASSWORD, OF_ENVIRONMENT):
        assert secret not in path.read_text()
    with pytest.raises(StartupContractError) as caught:
        resolve_run_config(spec_path=path, environ={})
    for name in ("hyperparams.api_key", "hyperparams.note", "uploads.metrics_url", "capability_token", "notes"):
        assert f"`{name}` holds <hidden>" in str(caught.value)
    given = ["hyperparams.api_key=k", "hyperparams.note=n", "hyperparams.from_environment=e", "notes=null"]
    again = resolve_run_config(
        spec_path=path,
        overrides=[*given, "uploads.metrics_url=https://host/m"],
        environ={"TRAINER_CAPABILITY_TOKEN": TOKEN},
    )
    assert again.hyperparams == {"api_key": "k", "note": "n", "from_environment": "e", "lr": 0.1}


def test_a_file_of_the_user_is_not_replaced(job):
    config = resolve_run_config(spec_path=job(), environ={})
    config.artifacts_dir.mkdir(parents=True)
    own = config.artifacts_dir / JOB_NAME
    own.write_text(json.dumps(JOB))
    assert not write_job(config, {})
    assert json.loads(own.read_text()) == JOB
    assert read_job(config.artifacts_dir) is None


def test_base_dir_says_where_relative_paths_modules_and_runs_are(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = job().parent
    config = resolve_run_config(spec_path=job(base_dir="../other"), environ={})
    assert config.spec_dir == tmp_path / "other"
    assert config.artifacts_dir == tmp_path / "other" / "runs" / "r1"
    assert config.dataset is not None
    assert config.dataset.parquet_paths == (str(tmp_path / "other" / "a.parquet"),)
    assert resolve_run_config(spec_path=job(), overrides=["base_dir=project"], environ={}).spec_dir == project
    with refusal(StartupContractError):
        resolve_run_config(spec_path=job(base_dir=3), environ={})


def test_every_byte_of_a_path_and_every_kind_of_number_survives(job):
    hyperparams = {"large": 2**62 + 1, "small": 1e-300, "flag": True}
    config = resolve_run_config(
        spec_path=job(hyperparams=hyperparams), overrides=["cancel_file_path=/a\udcff"], environ={}
    )
    again = resolve_run_config(spec_path=written(config), environ={})
    assert again.hyperparams == hyperparams
    assert again.cancel_file_path == config.cancel_file_path
    assert set(job_file(config)) == set(job_file(again))
