"""Changes that make a job another job, and changes that do not."""

import json

import pytest

from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.job.identity import differing_fields

JOB = {
    "run_id": "r1",
    "trainer": "t:T",
    "max_steps": 5,
    "hyperparams": {"lr": 0.1, "net": {"width": 8}},
    "dataset": {"parquet_paths": ["a.parquet"]},
    "inputs": {"base_model_url": "https://u:p@h/m?sig=1#sha256=" + "0" * 64},
}


@pytest.fixture
def config_of(tmp_path):
    def resolve(*overrides, folder="job", **environ):
        path = tmp_path / folder / "job.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(JOB))
        return resolve_run_config(spec_path=path, overrides=overrides, environ=environ)

    return resolve


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ("trainer=other:T", ["trainer"]),
        ("hyperparams.lr=0.2", ["hyperparams.lr"]),
        ("hyperparams.net.width=9", ["hyperparams.net.width"]),
        ("hyperparams.extra=1", ["hyperparams.extra"]),
        ('dataset.parquet_paths=["/b.parquet"]', ["dataset.parquet_paths"]),
        ('dataset.columns=["x"]', ["dataset.columns"]),
        ("dataset.shuffle=true", ["dataset.shuffle"]),
        ("dataset.seed=3", ["dataset.seed"]),
        ("inputs.base_model_url=https://h/other", ["inputs.base_model_ref"]),
        ("inputs.resume_checkpoint_ref=https://h/c.json", ["inputs.resume_checkpoint_ref"]),
    ],
)
def test_a_change_of_what_is_trained_changes_the_digest_and_is_named(config_of, override, fields):
    ours, theirs = config_of(), config_of(override)
    assert ours.spec_digest != theirs.spec_digest
    assert differing_fields(ours.spec_fields, theirs.spec_fields) == fields
    assert differing_fields(theirs.spec_fields, ours.spec_fields) == fields


@pytest.mark.parametrize(
    "override",
    [
        "run_id=r2",
        "max_steps=500",
        "metric_every=1",
        "checkpoint_every=2",
        "sample_every=3",
        "dataset.batch_size=1",
        "dataset.readahead=9",
        "dataset.epochs=2",
        "max_runtime_seconds=9",
        "lightning.devices=4",
        "uploads.metrics_url=https://h/x",
        "resume_from_latest=true",
        "resume_checkpoint_path=c.json",
        "capability_token=other",
        'sample_prompts=["3"]',
        "inputs.base_model_url=https://other:pw@h/m?sig=2#sha256=" + "0" * 64,
    ],
)
def test_limits_cadences_devices_credentials_and_uploads_leave_the_digest(config_of, override):
    assert config_of(override).spec_digest == config_of().spec_digest


def test_the_environments_trainer_counts_as_the_trainer(config_of):
    assert differing_fields(config_of().spec_fields, config_of(TRAINER_PLUGIN="x:Y").spec_fields) == ["trainer"]


def test_a_job_whose_folder_was_moved_is_the_same_job(config_of):
    assert config_of(folder="here").spec_digest == config_of(folder="there").spec_digest


def test_the_order_of_hyperparameters_does_not_matter_but_that_of_files_does(config_of):
    one = config_of('hyperparams={"a": 1, "b": 2}', 'dataset.parquet_paths=["/a", "/b"]')
    two = config_of('hyperparams={"b": 2, "a": 1}', 'dataset.parquet_paths=["/b", "/a"]')
    assert differing_fields(one.spec_fields, two.spec_fields) == ["dataset.parquet_paths"]


@pytest.mark.parametrize(
    ("given", "counts"),
    [("https://u:p@h:1/a?b=c#sha256=00", "https://h:1/a#sha256=00"), ("hf:owner/name@main", "hf:owner/name@main")],
)
def test_user_info_and_query_are_no_part_of_a_reference_and_a_digest_is(config_of, given, counts):
    assert config_of(f"inputs.base_model_ref={given}").spec_fields["inputs.base_model_ref"] == counts
