"""How command line, environment and job spec become one configuration."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import RunConfig, resolve_run_config
from genlight.adapter.job.sources import VARIABLES, ConfigErrors, read_sources
from genlight.adapter.job.spec import DatasetSpec, InputsSpec, JobSpec, UploadUrls
from genlight.adapter.job.standard_callbacks import callbacks_of_job
from genlight.adapter.plumbing.settings import keys_of
from genlight.adapter.plumbing.text import folder_name
from genlight.callbacks.write_samples import SampleRequest

MINIMAL = {"run_id": "r1", "trainer": "my_trainer:Trainer", "max_steps": 5}


@pytest.fixture
def job(tmp_path):
    """Writes a job spec of the minimal fields and those given, and returns its path."""

    def write(**fields):
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        (folder / "job.json").write_text(json.dumps({**MINIMAL, **fields}))
        return folder / "job.json"

    return write


def resolve(path, *overrides, **environ):
    return resolve_run_config(spec_path=path, overrides=overrides, environ=environ)


def refused(path, *overrides, **environ):
    with pytest.raises(StartupContractError) as caught:
        resolve(path, *overrides, **environ)
    return caught.value


def test_a_jobs_runs_folder_is_beside_its_file_wherever_it_is_started_from(job, tmp_path, monkeypatch):
    """A start from another folder finds the checkpoints of the one before."""
    path = job()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config, folder = resolve(path), path.parent / "runs" / "r1"
    assert config.warnings == ()
    assert (config.artifacts_dir, config.checkpoints_dir, config.samples_dir, config.events_path) == (
        folder,
        folder / "checkpoints",
        folder / "samples",
        folder / "metrics" / "events.jsonl",
    )
    assert resolve(path, "artifacts_dir=out").artifacts_dir == tmp_path / "elsewhere" / "out"


def test_a_start_from_the_environment_alone_writes_to_the_containers_folder(job):
    config = resolve_run_config(environ={"TRAINER_JOB_SPEC_PATH": str(job())})
    assert config.artifacts_dir == Path("/tmp/training")


DATASET = {"parquet_paths": ["x"]}
ORIGINS = {"TENSORHUB_URL": "https://hub.example/base", "TRAINER_TOKEN_ORIGINS": "https://data.example"}
UPLOADS = {"metrics_url": "https://m.example/x", "terminal_url": "http://t.example:81/y?z=1"}


@pytest.mark.parametrize(
    ("fields", "environ", "expected"),
    [
        ({}, {}, {"on_nonfinite": "warn"}),
        ({"on_nonfinite": "skip"}, {}, {"on_nonfinite": "skip"}),
        ({"max_runtime_seconds": 5}, {"TRAINER_MAX_RUNTIME_SECONDS": "0"}, {"max_runtime_seconds": 0}),
        ({"orchestrated": True}, {"TRAINER_ORCHESTRATED": "0"}, {"orchestrated": False}),
        ({}, {"TRAINER_CANCELLED": "1"}, {"canceled": True}),
        ({"hyperparams": {"lr": 1}}, {"TRAINER_PLUGIN": "other:T"}, {"trainer": "other:T", "hyperparams": {"lr": 1}}),
        ({"lightning": {"logger": False}}, {}, {"lightning": {"logger": False}}),
        ({"lightning": {"max_epochs": 1}}, {}, {"lightning": {"max_epochs": 1}}),
        (
            {"uploads": UPLOADS},
            ORIGINS,
            {
                "token_origins": {
                    *("https://m.example:443", "http://t.example:81"),
                    *("https://hub.example:443", "https://data.example:443"),
                }
            },
        ),
    ],
)
def test_sources_give_these_settings(job, fields, environ, expected):
    config = resolve(job(**fields), **environ)
    assert {name: getattr(config, name) for name in expected} == expected


# The same setting from every source: setting, field of the config, (spec, environment, --set), environment variable.
PRECEDENCE = [
    ("trainer", lambda c: c.trainer, ("s:S", "e:E", "c:C"), "TRAINER_PLUGIN"),
    ("max_runtime_seconds", lambda c: c.max_runtime_seconds, (1.0, 2.0, 3.0), "TRAINER_MAX_RUNTIME_SECONDS"),
    ("capability_token", lambda c: c.capability_token, ("s", "e", "c"), "TRAINER_CAPABILITY_TOKEN"),
    ("cancel_file_path", lambda c: c.cancel_file_path, ("/s", "/e", "/c"), "TRAINER_CANCEL_FILE"),
    (
        "uploads.metrics_url",
        lambda c: c.uploads.metrics_url,
        ("http://s", "http://e", "http://c"),
        "TRAINER_UPLOAD_METRICS_URL",
    ),
]


@pytest.mark.parametrize(("setting", "read", "values", "variable"), PRECEDENCE, ids=[row[0] for row in PRECEDENCE])
def test_command_line_beats_environment_beats_job_spec(job, setting, read, values, variable):
    in_spec, in_environment, on_command_line = values
    block, _, name = setting.rpartition(".")
    path = job(**({block: {name: in_spec}} if block else {name: in_spec}))
    environ = {variable: str(in_environment)}
    overrides = [f"{setting}={json.dumps(on_command_line)}"]

    def expected(value):
        return Path(value) if setting == "cancel_file_path" else value

    for config, value, source in [
        (resolve(path), in_spec, "job spec"),
        (resolve(path, **environ), in_environment, variable),
        (resolve(path, *overrides, **environ), on_command_line, "--set"),
    ]:
        assert read(config) == expected(value)
        assert config.source_of(setting) == source


@pytest.mark.parametrize("setting", ["artifacts_dir", "checkpoints_dir", "samples_dir", "metrics_dir", "events_path"])
def test_folders_come_from_the_command_line_before_the_environment(job, tmp_path, setting):
    variable = f"TRAINER_{setting.upper()}"
    assert getattr(resolve(job(), **{variable: "/from/environment"}), setting) == Path("/from/environment")
    config = resolve(job(), f"{setting}=/from/command/line", **{variable: "/from/environment"})
    assert getattr(config, setting) == Path("/from/command/line")
    assert (config.source_of(setting), config.source_of("max_steps")) == ("--set", "job spec")


def test_set_reaches_into_blocks_reads_json_and_keeps_texts_as_typed(job):
    config = resolve(
        job(hyperparams={"lr": 0.1, "layers": {"n": 2}}, dataset={"parquet_paths": ["/a"], "batch_size": 4}),
        *("hyperparams.lr=3e-4", "hyperparams.layers.width=64", "hyperparams.name=big", "run_id=17", "owner=null"),
        *("dataset.shuffle=true", "lightning.devices=2", "lightning.accelerator=cpu", "max_steps=7", "max_steps=9"),
    )
    assert config.job.hyperparams == {"lr": 3e-4, "layers": {"n": 2, "width": 64}, "name": "big"}
    assert (config.run_id, config.job.max_steps, config.job.owner) == ("17", 9, "")
    assert config.dataset is not None
    assert (config.dataset.batch_size, config.dataset.shuffle) == (4, True)
    assert config.lightning == {"devices": 2, "accelerator": "cpu"}
    assert (config.source_of("dataset.batch_size"), config.source_of("dataset.shuffle")) == ("job spec", "--set")
    assert config.source_of("dataset.seed") == "default"


def test_urls_of_data_are_no_relative_paths_and_count_for_the_digest_without_credentials(job):
    urls = ("hf://datasets/o/n/x.parquet", "s3://key:canary@bucket/x", "file:///data/x.parquet")
    config = resolve(job(dataset={"parquet_paths": list(urls)}))
    assert config.dataset is not None
    assert config.dataset.parquet_paths == urls
    other = resolve(job(dataset={"parquet_paths": [url.replace("key:canary@", "") for url in urls]}))
    assert config.spec_digest == other.spec_digest


def test_relative_paths_start_at_the_specs_folder_and_those_of_the_shell_at_the_working_directory(
    job, tmp_path, monkeypatch
):
    shell = tmp_path / "shell"
    shell.mkdir()
    monkeypatch.chdir(shell)
    path = job(
        dataset={"parquet_paths": ["data/x.parquet"]}, cancel_file_path="stop", resume_checkpoint_path="../c.json"
    )
    (path.parent / "cat.png").touch()
    config = resolve(path)
    assert config.dataset is not None
    assert config.dataset.parquet_paths == (str(path.parent / "data/x.parquet"),)
    assert config.cancel_file_path == path.parent / "stop"
    assert config.resume_checkpoint_path == tmp_path / "c.json"
    config = resolve(path, 'dataset.parquet_paths=["x.parquet"]', TRAINER_CANCEL_FILE="halt")
    assert config.dataset is not None
    assert config.dataset.parquet_paths == (str(shell / "x.parquet"),)
    assert config.cancel_file_path == shell / "halt"


def test_an_input_that_is_a_file_beside_the_spec_becomes_a_path_and_any_other_stays_a_reference(job):
    path = job(inputs={"base_model_ref": "owner/name", "dataset_parquet_refs": ["train.parquet", "http://h/x"]})
    (path.parent / "train.parquet").touch()
    inputs = resolve(path).inputs
    assert inputs.base_model_ref == "owner/name"
    assert inputs.dataset_parquet_refs == (str(path.parent / "train.parquet"), "http://h/x")


def test_sample_seed_is_the_seed_of_prompts_that_name_none(job):
    path = job(sample_seed=7, sample_prompts=["a", {"prompt": "b", "seed": 3, "source_image": "cat.png"}])
    (path.parent / "cat.png").touch()
    samples = callbacks_of_job(resolve(path))["WriteSamples"]
    first, second = (SampleRequest(given, index) for index, given in enumerate(samples["requests"]))
    assert (samples["seed"], first["name"], first["seed"], first["task"]) == (7, "sample-00", None, "t2i")
    assert (second["name"], second["seed"], second["source_image"]) == ("sample-01", 3, str(path.parent / "cat.png"))


@pytest.mark.parametrize(
    ("overrides", "fields", "code"),
    [
        ((), {"max_runtime_seconds": -1}, "startup.invalid_timeout"),
        ((), {"trainer": ""}, "startup.missing_trainer_import"),
        ((), {"orchestrated": True}, "startup.missing_capability_token"),
        ((), {"run_id": None}, "startup.invalid_job_spec"),
        (("max_steps=0",), {}, "startup.invalid_job_spec"),
        (("artifacts_dir=a\x00b",), {}, "startup.invalid_artifact_paths"),
        ((), {"dataset": {"batch_size": 3}}, "startup.invalid_job_spec"),
        ((), {"dataset": DATASET, "mock_batches": [1]}, "startup.invalid_job_spec"),
        ((), {"dataset": DATASET, "inputs": {"dataset_parquet_refs": ["a/b"]}}, "startup.invalid_job_spec"),
        (
            (),
            {"resume_checkpoint_path": "x", "inputs": {"resume_checkpoint_ref": "http://h/x"}},
            "startup.invalid_job_spec",
        ),
    ],
)
def test_each_startup_fault_has_its_documented_code(job, overrides, fields, code):
    error = refused(job(**fields), *overrides)
    assert error.code == code
    assert str(error).startswith(f"{code}: ")


def test_without_a_spec_the_code_is_the_missing_path_and_other_faults_are_listed_too(tmp_path):
    error = refused(None, TRAINER_MAX_RUNTIME_SECONDS="x", TRAINER_ORCHESTRATED="1")
    assert error.code == "startup.missing_job_spec_path"
    assert "TRAINER_JOB_SPEC_PATH" in error.message
    assert "startup.invalid_timeout" in error.message
    assert "startup.missing_capability_token" in error.message
    assert refused(tmp_path / "none.json").code == "startup.missing_job_spec_path"


def test_every_fault_of_every_source_is_in_one_error(job):
    error = refused(
        job(max_steps=-1, metric_every="x", dataset={"batch_size": 0}, trainer=None),
        "checkpoint_every=-2",
        TRAINER_MAX_RUNTIME_SECONDS="-5",
        TRAINER_ORCHESTRATED="yes",
    )
    assert error.code == "startup.invalid_job_spec"
    for name in (
        *("`max_steps`", "`metric_every`", "`dataset.batch_size`", "`checkpoint_every`", "startup.missing_trainer"),
        *("`TRAINER_MAX_RUNTIME_SECONDS`", "startup.missing_capability_token"),
    ):
        assert name in error.message


def test_no_secret_is_in_the_repr_or_in_an_error(job):
    path = job(
        capability_token="canary-spec",
        inputs={"base_model_url": "https://u:canary-user@h/m?sig=canary-query"},
        uploads={"metrics_url": "https://u:canary-user@h/m?sig=canary-query"},
        lightning={"logger": {"token": "canary-lightning"}},
    )
    environ = {"TRAINER_CAPABILITY_TOKEN": "canary-environment", "TENSORHUB_URL": "http://u:canary-hub@h"}
    config = resolve(path, **environ)
    assert {"canary-spec", "canary-environment"} <= set(config.secrets)
    assert "canary" not in repr((read_sources(path, [], environ, ConfigErrors()), config.uploads, config.inputs))
    assert config.capability_token == "canary-environment"
    assert "canary" not in repr(config)
    assert "canary" not in json.dumps(dict(config.spec_fields)) + config.spec_digest
    error = refused(
        job(capability_token="canary-spec", max_steps="canary-spec", owner=["canary-environment"]),
        TRAINER_CAPABILITY_TOKEN="canary-environment",
    )
    assert "`max_steps`" in error.message
    assert "canary" not in str(error) + repr(error)


BYTES_ARE_FINE = {
    *("TRAINER_ORCHESTRATED", "TRAINER_CANCELLED", "TRAINER_CANCEL_FILE", "TRAINER_EVENTS_PATH"),
    "TRAINER_SHARED_ARTIFACTS",
    *(f"TRAINER_{name}_DIR" for name in ("ARTIFACTS", "CHECKPOINTS", "SAMPLES", "METRICS")),
}


@pytest.mark.parametrize("variable", list(VARIABLES))
def test_bytes_in_the_environment_that_are_no_text_never_crash_the_start(job, variable):
    try:
        outcome = resolve(job(), **{variable: "http://h/\udcff"})
    except StartupContractError as error:
        outcome = error
    assert isinstance(outcome, RunConfig if variable in BYTES_ARE_FINE else StartupContractError)


def test_settings_that_another_one_makes_pointless_are_warned_about(job):
    path = job(sample_prompts=["3"])
    assert "`sample_prompts` has no effect" in resolve(path).warnings[0]
    assert resolve(path, "sample_every=5").warnings == ()


@pytest.mark.parametrize(
    ("run_id", "name"),
    [("a/b", "a%2Fb"), ("..", "%2E%2E"), (".", "%2E"), ("run-1.2", "run-1.2"), ("../../etc", "..%2F..%2Fetc")],
)
def test_a_run_id_never_leaves_the_runs_folder(run_id, name):
    assert folder_name(run_id) == name


def test_long_run_ids_that_begin_alike_get_folders_of_their_own():
    names = {folder_name("x" * 300 + end) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) <= 200 for name in names)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
nested_values = {
    block.__name__: st.dictionaries(
        st.sampled_from(sorted(keys_of(block))) | st.text(max_size=4), json_values, max_size=4
    )
    for block in (DatasetSpec, InputsSpec, UploadUrls)
}
field_values = st.one_of(json_values, *nested_values.values(), st.just("http://h/x"), st.integers(0, 5))
specs = st.dictionaries(
    st.sampled_from([*keys_of(JobSpec), "request_id"]) | st.text(max_size=6), field_values, max_size=12
)
overrides_strategy = st.lists(
    st.builds(
        lambda key, value: f"{key}={value}",
        st.sampled_from([*keys_of(JobSpec), "dataset.seed", "hyperparams.x", "inputs.base_model_ref"])
        | st.text(max_size=6),
        st.text(max_size=8),
    ),
    max_size=3,
)
environments = st.dictionaries(
    st.sampled_from(list(VARIABLES)),
    st.text(st.characters(exclude_categories=()), max_size=8) | st.just("~\ud800"),
    max_size=4,
)


@given(spec=specs, minimal=st.booleans(), overrides=overrides_strategy, environ=environments)
@settings(max_examples=150)
def test_any_spec_override_and_environment_give_a_config_or_one_startup_error(
    tmp_path, spec, minimal, overrides, environ
):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**MINIMAL, **spec} if minimal else spec))
    try:
        outcome = resolve_run_config(spec_path=path, overrides=overrides, environ=environ)
    except StartupContractError as error:
        outcome = error
    if isinstance(outcome, RunConfig):
        assert outcome.job.max_steps >= 1
        assert outcome.artifacts_dir.is_absolute()
    else:
        assert outcome.code.startswith("startup.")
        assert outcome.message


@given(content=st.binary(max_size=40) | st.text(alphabet='{}[]":,0 en', max_size=30).map(str.encode))
@settings(max_examples=80)
def test_any_file_gives_a_config_or_one_startup_error(tmp_path, content):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(StartupContractError):
        resolve_run_config(spec_path=path, environ={})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"on_nonfinite": "ignore"}, '"warn", "stop" or "skip"'),
        ({"lightning": {"max_steps": 3}}, "Invalid `lightning.max_steps`"),
        ({"lightning": {"limit_train_batches": 0}}, "Invalid `lightning.limit_train_batches`"),
        ({"lightning": {"limit_train_batches": 0.0}}, "Invalid `lightning.limit_train_batches`"),
        ({"lightning": {"max_epochs": 0}}, "Invalid `lightning.max_epochs`"),
        ({"lightning": {"logger": True}}, "Invalid `lightning.logger`. Expected the path of a class"),
        ({"lightning": {"logger": "wandb"}}, "Invalid `lightning.logger`. Expected the path of a class"),
        ({"run_id": None}, '`run_id` is missing. Add "run_id": "digits-1"'),
        ({"max_steps": None}, "`max_steps` is missing."),
    ],
)
def test_a_field_that_no_job_can_have_or_lack_is_refused_by_name(job, fields, said):
    assert said in str(refused(job(**fields)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("artefacts_dir=x", "Unknown key `artefacts_dir` in `--set`. Did you mean `artifacts_dir`?"),
        ("batchsize=3", "Unknown key `batchsize` in `--set`. Did you mean `dataset.batch_size`?"),
        ("shufle=true", "Unknown key `shufle` in `--set`. Did you mean `dataset.shuffle`?"),
        ("dataset.batchsize=3", "Unknown key `dataset.batchsize` in `--set`. Did you mean `batch_size`?"),
        ("validate.every_n_step=3", "Unknown key `validate.every_n_step` in `--set`. Did you mean `every_n_steps`?"),
        ("max_steps", "Invalid `--set max_steps`. Expected key=value or key.sub=value."),
        ("=hush", "Invalid `--set =…`. Expected key=value or key.sub=value."),
        ("nonsense=3", "Unknown key `nonsense` in `--set`."),
        ("trainer.x=3", "`--set trainer.x` cannot be applied: `trainer` is not an object."),
        ("a..b=hush", "Invalid `--set a..b=…`. Expected key=value or key.sub=value."),
    ],
)
def test_an_override_without_effect_is_refused_by_its_name_and_never_shows_a_value(job, override, message):
    assert refused(job(), override).message == message


@pytest.mark.parametrize(
    ("fields", "errors"),
    [
        ({"dataset": {"parquet_paths": "a.parquet"}}, 1),
        ({"dataset": {"parquet_paths": [7]}}, 1),
        ({"dataset": {"parquet_paths": ["a"], "columns": [7]}}, 1),
        ({"dataset": {}, "inputs": {"dataset_parquet_refs": "a.parquet"}}, 1),
        ({"dataset": {}}, 1),
    ],
)
def test_one_mistake_is_one_fault(job, fields, errors):
    assert len(refused(job(**fields)).message.splitlines()) == errors
