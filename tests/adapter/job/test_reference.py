"""The schema and the table of a job's keys are what the types say."""

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.job.lightning_objects import instantiate
from genlight.adapter.job.sources import VARIABLES, ConfigErrors, Sources
from genlight.adapter.job.spec import JobSpec, Settings
from genlight.adapter.job.standard_callbacks import STANDARD_CALLBACKS
from genlight.adapter.plumbing.settings import keys_of
from support.jobs import write_job
from support.messages import refusal

EXAMPLES = Path(__file__).parents[3] / "examples"
reference = runpy.run_path(str(EXAMPLES / "make_reference.py"))
job_schema, job_reference = reference["job_schema"], reference["job_reference"]


def test_the_job_of_the_demo_fits_the_schema():
    jsonschema.validate(json.loads((EXAMPLES / "digits" / "job.json").read_text()), job_schema())


@pytest.mark.parametrize(
    "job",
    [
        {"max_steps": 0},
        {"max_steps": "7"},
        {"dataset": {"batch_size": 0}},
        {"dataset": {"shard": "files"}},
        {"resume_from_latest": "yes"},
        {"sample_prompts": [3]},
        {"validate": {"every_n_steps": -1}},
    ],
)
def test_what_the_schema_refuses_the_parser_refuses(job):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, job_schema())
    errors = ConfigErrors()
    Sources(errors).block(Settings, job, complete=False)
    assert errors.found


def test_a_job_may_name_its_schema_for_editors(tmp_path):
    (tmp_path / "job.json").write_text(
        '{"$schema": "job.schema.json", "request_id": "r", "trainer": "m:T", "max_steps": 1, "mock_batches": [1]}'
    )
    config = resolve_run_config(spec_path=tmp_path / "job.json", environ={})
    assert (config.run_id, config.warnings) == ("r", ())
    assert {"$schema", "request_id"} < set(job_schema()["properties"])
    assert {"base_model_ref", "base_model_url"} < set(job_schema()["$defs"]["InputsSpec"]["properties"])


def test_every_key_has_a_description():
    for shape in (job_schema(), *job_schema()["$defs"].values()):
        assert [name for name, kind in shape["properties"].items() if not kind["description"]] == []


def test_the_tables_have_every_key():
    blocks = [keys_of(JobSpec), *(keys_of(key.block) for key in keys_of(JobSpec).values() if key.block is not None)]
    for names, table in (
        ([name for keys in blocks for name in keys], job_reference()),
        (STANDARD_CALLBACKS, reference["callbacks_reference"]()),
        (VARIABLES, reference["variables_reference"]()),
    ):
        assert [name for name in names if f"| `{name}` |" not in table] == []


@pytest.fixture
def config_of(tmp_path):
    return lambda **fields: resolve_run_config(spec_path=write_job(tmp_path, **fields), environ={})


def made_callbacks(config):
    return {type(each).__name__: each for each in instantiate(config)[0].callbacks}


def test_the_defaults_of_the_table_are_those_that_a_run_has(config_of):
    rows = [line for line in job_reference().partition("### `dataset`")[0].splitlines() if line.startswith("| `")]
    for name in ("metric_every", "checkpoint_every", "sample_every", "on_nonfinite", "max_runtime_seconds"):
        (row,) = [row for row in rows if row.startswith(f"| `{name}`")]
        assert f"| `{json.dumps(getattr(config_of(), name))}` |" in row


def test_the_callbacks_of_a_job_are_those_of_the_reference(config_of):
    made = made_callbacks(config_of(validate={"every_n_steps": 1})).items()
    conditional = ("Recover", "TrainJobStatus")
    said = [name for name, callback in STANDARD_CALLBACKS.items() if callback.arguments and name not in conditional]
    assert [name for name, each in made if type(each).__module__.startswith("genlight")] == said


def test_a_job_that_recovers_reports_values_that_are_not_finite_once(config_of):
    made = made_callbacks(config_of(callbacks={"Recover": {"good_steps": 7}}))
    assert made["Recover"].good_steps == 7
    assert "WatchNonfinite" not in made
    made = made_callbacks(config_of(on_nonfinite="skip", callbacks={"Recover": {"max_attempts": 7}}))
    assert (made["Recover"].ladder, made["Recover"].good_steps, made["Recover"].max_attempts) == (("skip",), 1, 7)
    assert "WatchNonfinite" not in made
    with refusal(StartupContractError):
        made_callbacks(config_of(on_nonfinite="skip", callbacks={"Recover": {"lr_factor": 2}}))


def test_a_job_changes_removes_and_adds_callbacks(config_of):
    changes = {"Goodput": False, "WatchHangs": {"floor_s": 60}, "Heartbeat": {"interval_steps": 5}}
    checkpoints = {"every_minutes": 5, "keep_last": 0, "monitor": "x", "mode": "max", "weights": "trained"}
    made = made_callbacks(config_of(callbacks=changes, checkpoints=checkpoints))
    assert "Goodput" not in made
    assert (made["WatchHangs"].floor_s, made["WatchHangs"].directory.name) == (60, "hangs")
    assert made["Heartbeat"].interval_steps == 5
    assert (made["Checkpoint"].retention.keep_last, made["Checkpoint"].retention.mode) == (None, "max")
    assert made["Checkpoint"].weights == "trained"
