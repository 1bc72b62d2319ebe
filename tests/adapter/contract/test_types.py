"""The vocabulary of the trainer contract: frozen records with documented defaults that refuse nonsense by name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract import types as contract
from genlight.adapter.contract.types import (
    ArrowFeedConfig,
    DownloadedInputs,
    LifecycleLease,
    ModelRuntimeConfig,
    ResolvedRef,
    StepContext,
    StepControlHints,
    StepResult,
    TrainerAuthContext,
    TrainerPlugin,
    TrainingJobSpec,
)

JOB = TrainingJobSpec(run_id="r", max_steps=3)

RECORDS = {
    TrainingJobSpec: {
        "run_id": "r",
        "max_steps": 3,
        "trainer_api_version": "v1",
        "metric_every": 10,
        "checkpoint_every": 0,
        "sample_every": 0,
        "owner": "",
        "release_ref": "",
        "hyperparams": {},
    },
    StepContext: {
        "job": JOB,
        "model_handles": {},
        "dataset": None,
        "optimizer": None,
        "scheduler": None,
        "device": "cuda:0",
        "dtype": "bf16",
        "is_canceled": None,
        "rank": 0,
        "world_size": 1,
        "run_state": None,
        "job_context": None,
    },
    StepResult: {"metrics": {}, "debug": {}, "control": None},
    StepControlHints: {"skip_cadence_emit": False, "backoff_seconds": None},
    TrainerAuthContext: {"owner": "o", "token": "", "scope": ""},
    LifecycleLease: {"run_id": "r", "lease_id": "l"},
    ResolvedRef: {"owner": "o", "repo": "m", "digest": "d"},
    DownloadedInputs: {"model_dir": None, "dataset_dir": None, "resume_checkpoint": None},
    ModelRuntimeConfig: {"device": "cuda:0", "dtype": "bf16"},
    ArrowFeedConfig: {"batch_size": 32, "readahead": 2, "columns": None},
}


def required(record, values):
    names = [field.name for field in dataclasses.fields(record) if _has_no_default(field)]
    return {name: values[name] for name in names}


def _has_no_default(field):
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@pytest.mark.parametrize(("record", "values"), RECORDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_record_has_the_fields_and_defaults_of_the_contract_in_this_order(record, values):
    made = record(**required(record, values))

    assert list(values) == [field.name for field in dataclasses.fields(record)]
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(("record", "values"), RECORDS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_record_is_made_from_keywords_and_cannot_be_changed(record, values):
    made = record(**values)

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, next(iter(values)), "other")


def test_every_record_of_the_module_is_covered_here():
    records = {cls for _, cls in inspect.getmembers(contract, dataclasses.is_dataclass)}

    assert records == set(RECORDS)


def test_two_records_do_not_share_a_mutable_default():
    assert TrainingJobSpec(run_id="a", max_steps=1).hyperparams is not TrainingJobSpec("b", 1).hyperparams
    assert StepResult().metrics is not StepResult().metrics


@pytest.mark.parametrize("name", ["run_id", "trainer_api_version"])
@pytest.mark.parametrize("value", ["", "  ", None])
def test_an_empty_identity_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"Invalid `{name}`. Expected a non-empty string"):
        TrainingJobSpec(**{"run_id": "r", "max_steps": 1, name: value})


@pytest.mark.parametrize("version", ["v2", "V1", "1", "v1.0"])
def test_another_version_than_v1_is_refused(version):
    with pytest.raises(ValueError, match=f"Invalid `trainer_api_version`. Expected 'v1', but received '{version}'"):
        TrainingJobSpec(run_id="r", max_steps=1, trainer_api_version=version)


@pytest.mark.parametrize("name", ["max_steps", "metric_every", "checkpoint_every", "sample_every"])
def test_a_negative_number_is_refused_by_name_and_zero_is_not(name):
    assert getattr(TrainingJobSpec(**{"run_id": "r", "max_steps": 1, name: 0}), name) == 0
    with pytest.raises(ValueError, match=rf"Invalid `{name}`. Expected an integer >= 0, but received -3\."):
        TrainingJobSpec(**{"run_id": "r", "max_steps": 1, name: -3})


@pytest.mark.parametrize("value", [1.0, "10", None, True, float("nan")])
def test_a_number_that_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="Invalid `metric_every`"):
        TrainingJobSpec(run_id="r", max_steps=1, metric_every=value)


@pytest.mark.parametrize("value", [None, [("lr", 1)], "lr=1"])
def test_hyperparams_that_are_no_mapping_are_refused(value):
    with pytest.raises(TypeError, match=r"Invalid `hyperparams`. Expected a mapping"):
        TrainingJobSpec(run_id="r", max_steps=1, hyperparams=value)


@settings(max_examples=40)
@given(
    run_id=st.text(min_size=1).filter(str.strip),
    numbers=st.lists(st.integers(min_value=0), min_size=4, max_size=4),
    hyperparams=st.dictionaries(st.text(), st.integers()),
)
def test_whatever_is_in_range_is_kept_as_it_is(run_id, numbers, hyperparams):
    names = ("max_steps", "metric_every", "checkpoint_every", "sample_every")
    spec = TrainingJobSpec(run_id=run_id, hyperparams=hyperparams, **dict(zip(names, numbers, strict=True)))

    assert spec.run_id == run_id
    assert [getattr(spec, name) for name in names] == numbers
    assert spec.hyperparams == hyperparams


@pytest.mark.parametrize(("name", "value", "least"), [("batch_size", 0, 1), ("readahead", -1, 0)])
def test_a_feed_without_rows_or_with_negative_readahead_is_refused(name, value, least):
    with pytest.raises(ValueError, match=rf"Invalid `{name}`. Expected an integer >= {least}, but received {value}\."):
        ArrowFeedConfig(**{name: value})


def test_a_token_does_not_show_in_repr():
    assert "s3cret" not in repr(TrainerAuthContext(owner="me", token="s3cret"))


def test_a_class_with_the_six_hooks_is_a_trainer_and_one_that_lacks_a_hook_is_none(counting_trainer):
    class Half:
        def setup(self, ctx): ...
        def configure(self, ctx): ...

    assert isinstance(counting_trainer(), TrainerPlugin)
    assert not isinstance(Half(), TrainerPlugin)


def test_the_required_hooks_are_those_of_the_protocol():
    hooks = [name for name, value in vars(TrainerPlugin).items() if inspect.isfunction(value) and name[0] != "_"]

    assert tuple(hooks) == contract.REQUIRED_HOOKS


@pytest.mark.parametrize(
    ("protocol", "methods"),
    [
        (
            contract.TrainingReporter,
            {
                "started": {"run_id"},
                "metric": {"name", "value", "step"},
                "checkpoint": {"path", "step"},
                "sample": {"path", "step"},
                "completed": {"step", "final_checkpoint"},
                "failed": {"step", "error"},
                "is_canceled": set(),
            },
        ),
        (
            contract.ArtifactWriter,
            {
                "write_checkpoint": {"step", "state_payload", "trainer", "state", "ctx"},
                "write_samples": {"step", "state", "ctx"},
                "finalize": {"state_payload", "trainer", "state", "ctx"},
            },
        ),
        (
            contract.ArtifactUploader,
            {
                "upload_metrics": {"metrics", "step"},
                "upload_checkpoint": {"local_path", "step"},
                "upload_sample": {"local_path", "step"},
            },
        ),
    ],
    ids=["reporter", "writer", "uploader"],
)
def test_what_a_caller_brings_is_called_with_these_keywords(protocol, methods):
    found = {}
    for name, value in vars(protocol).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            parameters = list(inspect.signature(value).parameters.values())[1:]
            assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
            found[name] = {parameter.name for parameter in parameters}

    assert found == methods
