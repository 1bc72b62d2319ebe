"""The vocabulary of the trainer contract: frozen records with documented defaults that refuse nonsense by name."""

import dataclasses
import inspect

import pytest

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
        "count_steps": None,
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
def test_a_record_has_the_fields_and_defaults_of_the_contract_in_this_order_and_cannot_be_changed(record, values):
    made = record(**required(record, values))

    assert list(values) == [field.name for field in dataclasses.fields(record)]
    assert {name: getattr(made, name) for name in values} == values
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record(**values), next(iter(values)), "other")


def test_every_record_of_the_module_is_covered_here():
    records = {cls for _, cls in inspect.getmembers(contract, dataclasses.is_dataclass)}

    assert records == {*RECORDS, contract.RunState}  # training changes the state


CADENCES = ("max_steps", "metric_every", "checkpoint_every", "sample_every")
REFUSED = [
    *(
        (name, value, "Expected a non-empty string")
        for name in ("run_id", "trainer_api_version")
        for value in ("", " ", None)
    ),
    *(("trainer_api_version", value, f"Expected 'v1', but received '{value}'") for value in ("v2", "V1", "1", "v1.0")),
    *((name, -3, r"Expected an integer >= 0, but received -3\.") for name in CADENCES),
    *(("metric_every", value, "") for value in (1.0, "10", None, True, float("nan"))),
    *(("hyperparams", value, "Expected a mapping") for value in (None, [("lr", 1)], "lr=1")),
]


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_a_field_that_cannot_be_is_refused_by_name(name, value, said):
    is_type = name in ("metric_every", "hyperparams") and value != -3
    with pytest.raises(TypeError if is_type else ValueError, match=rf"Invalid `{name}`.*{said}"):
        TrainingJobSpec(**{"run_id": "r", "max_steps": 1, name: value})


@pytest.mark.parametrize(("name", "value", "least"), [("batch_size", 0, 1), ("readahead", -1, 0)])
def test_a_feed_without_rows_or_with_negative_readahead_is_refused(name, value, least):
    with pytest.raises(ValueError, match=rf"Invalid `{name}`. Expected an integer >= {least}, but received {value}\."):
        ArrowFeedConfig(**{name: value})


def test_a_token_does_not_show_in_repr():
    assert "s3cret" not in repr(TrainerAuthContext(owner="me", token="s3cret"))


def test_the_required_hooks_are_those_of_the_protocol():
    hooks = [name for name, value in vars(TrainerPlugin).items() if inspect.isfunction(value) and name[0] != "_"]

    assert tuple(hooks) == contract.REQUIRED_HOOKS
