"""The schema and the table of a job's keys are what the types say."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.job.errors import ConfigErrors
from genlight.adapter.job.reference import GROUPS, SCHEMA_FILE, job_reference, job_schema, schema_text
from genlight.adapter.job.spec_keys import ALIASES, inner_keys, spec_keys
from genlight.adapter.job.spec_parsing import parse_job_spec

DIGITS = Path(__file__).parents[3] / "examples" / "digits" / "job.json"


def test_the_schema_that_is_shipped_is_made_from_the_types():
    """Editors would complete keys that a job does not take."""
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run make reference"


def test_the_job_of_the_demo_fits_the_schema():
    jsonschema.validate(json.loads(DIGITS.read_text()), job_schema())


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
    parse_job_spec(job, errors)
    assert errors.found


def test_a_job_may_name_its_schema_for_editors():
    errors = ConfigErrors()
    parse_job_spec({"$schema": "job.schema.json", "request_id": "r"}, errors)
    assert (errors.found, errors.warnings) == ([], [])
    assert "$schema" in job_schema()["properties"]
    assert set(ALIASES[""]) < set(job_schema()["properties"])


def test_the_outline_has_every_key_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(spec_keys())


def test_the_table_names_every_key():
    made = job_reference()
    keys = [*spec_keys(), *(key for block in spec_keys() for key in inner_keys(block))]
    assert [key for key in keys if f"| `{key}` |" not in made] == []


def test_the_defaults_of_the_top_level_are_those_that_a_run_has(tmp_path):
    """A key that a job leaves out; the parser keeps None for it, since the environment may still say it."""
    (tmp_path / "job.json").write_text('{"run_id": "r", "trainer": "m:T", "max_steps": 1, "mock_batches": [1]}')
    config = resolve_run_config(spec_path=tmp_path / "job.json", environ={})

    found = {
        name: getattr(config.job, name, getattr(config, name, None))
        for name in ("metric_every", "checkpoint_every", "sample_every", "trainer_api_version")
    } | {
        "on_nonfinite": config.on_nonfinite,
        "resume_from_latest": config.resume_from_latest,
        "orchestrated": config.orchestrated,
        "max_runtime_seconds": config.max_runtime_s or 0,
    }
    table = job_reference().partition("#### `dataset.`")[0]
    for name, value in found.items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        assert f"| `{json.dumps(value)}` |" in row
