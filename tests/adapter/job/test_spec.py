"""The job spec: every error at once, by name, value and way out."""

import json
from pathlib import Path

import pytest

from genlight.adapter.job.config import read_run_config
from genlight.adapter.job.sources import ConfigErrors, read_job_file
from genlight.adapter.job.spec import SampleRequest, UploadUrls, ValidateSpec

MINIMAL = {"run_id": "r", "trainer": "m:T", "max_steps": 5}


@pytest.fixture
def parse(tmp_path):
    """Resolves a job of the minimal fields and those given; gives it, its errors and its warnings."""

    def parsed(**fields):
        (tmp_path / "job.json").write_text(json.dumps({**MINIMAL, **fields}))
        config, errors = read_run_config(spec_path=tmp_path / "job.json", environ={})
        return config, [error.text for error in errors.found], errors.warnings

    return parsed


def test_further_targets_of_uploads_are_urls(parse):
    spec, errors, _ = parse(uploads={"targets": ["hf://me/digits", "s3://bucket/runs"]})
    assert (spec.uploads.targets, errors) == (("hf://me/digits", "s3://bucket/runs"), [])
    wrong = ["/tmp/x", "s3://", "hf://me", "hf://a/b/c", "hf:///b"]
    _, errors, _ = parse(uploads={"targets": [*wrong, "hf://me/d@main"]})
    assert errors == [
        f"Invalid `uploads.targets[{index}]`. Expected a URL such as hf://owner/name or s3://bucket/folder, "
        f'but received "{url}".'
        for index, url in enumerate(wrong)
    ]


WRONG = [
    ("run_id", 7, "a string without control characters, but received 7"),
    ("run_id", "a\nb", "a string without control characters"),
    ("trainer", ["m:C"], 'a string without control characters, but received ["m:C"]'),
    ("trainer_api_version", "v2", 'Expected "v1", but received "v2"'),
    ("max_steps", 0, "an integer >= 1, but received 0"),
    ("max_steps", -1, "an integer >= 1, but received -1"),
    ("max_steps", 1.5, "an integer >= 1, but received 1.5"),
    ("max_steps", True, "an integer >= 1, but received true"),
    ("max_steps", 10**30, "an integer >= 1 and below 2**63, but received 1000000000000000000000000000000"),
    ("metric_every", -3, "an integer >= 0, but received -3"),
    ("checkpoint_every", "10", 'an integer >= 0, but received "10"'),
    ("sample_every", {}, "an integer >= 0, but received {}"),
    ("hyperparams", [], "an object, but received []"),
    ("dataset", "x.parquet", 'an object, but received "x.parquet"'),
    ("mock_batches", {"a": 1}, 'a list, but received {"a": 1}'),
    ("resume_from_latest", "yes", 'true or false, but received "yes"'),
    ("sample_seed", -1, "an integer >= 0"),
    ("orchestrated", 1, "true or false, but received 1"),
    ("max_runtime_seconds", -0.5, "a number of seconds >= 0, but received -0.5. 0 means no limit."),
    ("max_runtime_seconds", "60", 'a number of seconds >= 0, but received "60"'),
    ("lightning", "gpu", 'an object, but received "gpu"'),
    ("validate", True, "an object, but received true"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_field_of_the_wrong_type_or_out_of_range_is_named_with_its_value(name, value, text, parse):
    _, errors, _ = parse(**{name: value})
    assert len(errors) == 1
    assert errors[0].startswith(f"Invalid `{name}`. Expected ")
    assert text in errors[0]


@pytest.mark.parametrize(
    ("block", "name", "value"),
    [
        ("dataset", "batch_size", 0),
        ("dataset", "readahead", -1),
        ("dataset", "parquet_paths", "x.parquet"),
        ("dataset", "shuffle", 1),
        ("dataset", "seed", -2),
        ("dataset", "epochs", 0),
        ("dataset", "shard", "files"),
        ("dataset", "columns", []),
        ("inputs", "base_model_ref", 3),
        ("inputs", "dataset_parquet_refs", "hf:a/b"),
        ("uploads", "metrics_url", "ftp://host/x"),
        ("uploads", "terminal_url", "https://"),
        ("uploads", "sample_url", "http://host:port/"),
    ],
)
def test_a_fault_within_a_block_is_named_by_its_dotted_name(block, name, value, parse):
    _, errors, _ = parse(**{block: {name: value}})
    assert len(errors) == 1
    assert errors[0].startswith(f"Invalid `{block}.{name}`. Expected ")


def test_entries_of_lists_are_named_by_their_place(parse):
    _, errors, _ = parse(dataset={"parquet_paths": ["a", 2, ""]}, sample_prompts=["3", 4, {"prompt": 5, "seed": "x"}])
    assert [error.split("`")[1] for error in errors] == [
        "dataset.parquet_paths[1]",
        "dataset.parquet_paths[2]",
        "sample_prompts[1]",
        "sample_prompts[2].prompt",
        "sample_prompts[2].seed",
    ]


def test_a_column_that_is_asked_for_twice_is_a_fault_beside_the_others(parse):
    _, errors, _ = parse(dataset={"columns": ["a", "b", "a"], "batch_size": 0})
    size, columns = sorted(errors)
    assert size == "Invalid `dataset.batch_size`. Expected an integer >= 1, but received 0."
    assert columns == (
        'Invalid `dataset.columns`. Expected a list of different column names, but received ["a", "b", "a"]. '
        "Omit it to read all columns."
    )


def test_all_faults_of_a_spec_are_found_in_one_go(parse):
    _, errors, _ = parse(**{name: value for name, value, _ in reversed(WRONG)})
    assert len(errors) == len({name for name, _, _ in WRONG})


def test_an_unknown_key_is_a_warning_and_an_error_where_a_known_one_is_near_at_every_depth(parse):
    """A run that drops `checkpoint_evry` in silence would train without checkpoints."""
    _, errors, warnings = parse(
        metrics_every=3, zzz=1, dataset={"batchsize": 4, "yyy": 1}, sample_prompts=[{"promt": "a"}], sample_every=1
    )
    assert errors == [
        "Unknown key `metrics_every`. Did you mean `metric_every`?",
        "Unknown key `dataset.batchsize`. Did you mean `batch_size`?",
        "Unknown key `sample_prompts[0].promt`. Did you mean `prompt`?",
    ]
    assert warnings == ["Unknown key `zzz` is ignored.", "Unknown key `dataset.yyy` is ignored."]


def test_null_and_blank_texts_count_as_absent(parse):
    spec, errors, warnings = parse(seed=None, owner="  ", dataset=None, uploads={"sample_url": ""})
    assert (spec.seed, spec.owner, spec.dataset, spec.uploads, errors, warnings) == (
        None,
        "",
        None,
        UploadUrls(),
        [],
        [],
    )


def test_request_id_is_an_alias_that_run_id_beats_with_a_warning(parse):
    assert parse(request_id="r")[0].run_id == "r"
    spec, errors, warnings = parse(request_id="r", run_id="x")
    assert (spec.run_id, errors) == ("x", [])
    assert warnings == ["`run_id` and `request_id` are one setting with two values; `run_id` is used."]
    assert parse(request_id="r", run_id="r")[2] == []


def test_sample_prompts_are_texts_or_objects(parse):
    spec, errors, _ = parse(sample_prompts=["3", {"prompt": "cat", "task": "i2i", "seed": 4, "name": "cat"}])
    assert errors == []
    assert spec.sample_prompts == (
        SampleRequest(prompt="3"),
        SampleRequest(name="cat", task="i2i", prompt="cat", seed=4),
    )


def test_ref_and_url_are_two_spellings_of_one_input_and_two_different_ones_a_fault(parse):
    spec, errors, _ = parse(inputs={"base_model_url": "http://h/m", "dataset_parquet_urls": ["http://h/a"]})
    assert errors == []
    assert spec.inputs.base_model_ref == "http://h/m"
    assert spec.inputs.dataset_parquet_refs == ("http://h/a",)
    _, errors, _ = parse(inputs={"base_model_url": "http://h/m", "base_model_ref": "a/b"})
    (error,) = errors
    assert "`inputs.base_model_ref` and `inputs.base_model_url` are one setting with two values." in error


def test_an_object_of_the_command_line_is_spelled_as_one_of_the_file(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(MINIMAL))
    config, errors = read_run_config(
        spec_path=tmp_path / "job.json", environ={}, overrides=['inputs={"base_model_url": "http://h/m"}']
    )
    assert (config.inputs.base_model_ref, errors.found) == ("http://h/m", [])
    assert config.source_of("inputs.base_model_ref") == "--set"
    assert config.source_of("inputs.resume_checkpoint_ref") == "default"


def test_neither_repr_nor_fault_shows_a_token_or_a_url_query(parse):
    spec, _, _ = parse(capability_token="canary-1")
    assert "canary" not in repr(spec)
    _, errors, _ = parse(
        capability_token=["canary-2"],
        uploads={"metrics_url": "ftp://user:canary-3@host/x?sig=canary-4", "sample_url": 5},
        max_steps="http://canary-5:x@h/p?canary-6",
    )
    assert len(errors) == 4
    assert "canary" not in "".join(errors)
    assert "ftp://host/x" in "".join(errors)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty. Expected a JSON object, {...}."),
        (b" \n", "is empty. Expected a JSON object, {...}."),
        (b"# a job\n{}", "is not JSON: Expecting value: line 1 column 1 (char 0)."),
        (b'{"a" 1}', "is not JSON: Expecting ':' delimiter: line 1 column 6 (char 5)."),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b"[" * 5000, "is nested too deeply."),
        (b"[1]", "holds no JSON object, {...}."),
        (b"null", "holds no JSON object, {...}."),
        (b'{"a": "\xff"}', "is not utf-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "value has 5000 digits"),
    ],
)
def test_a_file_that_is_no_json_object_is_one_clear_fault(tmp_path, content, reason):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    errors = ConfigErrors()
    assert read_job_file(path, errors) is None
    assert len(errors.found) == 1
    assert reason in errors.found[0].text
    assert str(path) in errors.found[0].text
    assert errors.found[0].code == "startup.invalid_job_spec"


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    errors = ConfigErrors()
    assert read_job_file(tmp_path / "none.json", errors) is None
    assert read_job_file(tmp_path, errors) is None
    assert [error.code for error in errors.found] == ["startup.missing_job_spec_path", "startup.invalid_job_spec"]


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "job.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"run_id": "r"}).encode())
    assert read_job_file(path, ConfigErrors()) == {"run_id": "r"}


def test_a_validate_block_names_its_cadence(parse):
    assert parse(validate={"every_n_step": 10})[1] == [
        "Unknown key `validate.every_n_step`. Did you mean `every_n_steps`?"
    ]
    missing = '`validate.every_n_steps` is missing. Add "every_n_steps": 100, or remove `validate`.'
    assert parse(validate={"critical": True})[1] == parse(validate={})[1] == [missing]
    spec, errors, _ = parse(validate={"every_n_steps": 10, "critical": True})
    assert (spec.validate, errors) == (ValidateSpec(every_n_steps=10, critical=True), [])
    assert parse(validate={"every_n_steps": "x"})[1] == [
        'Invalid `validate.every_n_steps`. Expected an integer >= 0, but received "x".'
    ]


def test_checkpoints_are_one_block_whose_cadence_has_its_old_name_too(parse):
    spec, errors, _ = parse(checkpoints={"every_n_steps": 7, "keep_best": 3, "monitor": "eval/x", "mode": "max"})
    assert (spec.checkpoint_every, spec.job.checkpoint_every, errors) == (7, 7, [])
    assert parse(checkpoint_every=7)[0].checkpoints.every_n_steps == 7
    _, errors, _ = parse(checkpoint_every=7, checkpoints={"every_n_steps": 8})
    assert errors == [
        "`checkpoint_every` is 7 and `checkpoints.every_n_steps` is 8. They mean the same; give one of them."
    ]


def test_the_seed_of_a_job_is_that_of_its_data_unless_the_dataset_has_one(parse):
    data = {"parquet_paths": ["x"]}
    assert parse(seed=3, dataset=data)[0].dataset.seed == 3
    assert parse(seed=3, dataset={**data, "seed": 4})[0].dataset.seed == 4
    assert parse(dataset=data)[0].dataset.seed == 0
    assert parse(seed=2**32)[1] == [
        "Invalid `seed`. Expected an integer from 0 to 4294967295, but received 4294967296."
    ]


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ({"SystemMonitr": False}, "There is no callback `SystemMonitr`. Did you mean `SystemMonitor`?"),
        ({"SystemMonitor": 3}, "`SystemMonitor` takes true, false or an object of arguments."),
        ({"Checkpoint": False}, "`Checkpoint` cannot be removed, because it saves checkpoints as `checkpoints` says."),
        ({"Evaluate": {}}, "`Evaluate` is set by the key `validate` of the job; give its arguments there."),
    ],
)
def test_callbacks_are_changed_by_names_that_exist(parse, chosen, fault):
    (error,) = parse(callbacks=chosen)[1]
    assert error.startswith(f"Invalid `callbacks`. {fault}")
    assert parse(callbacks={"SystemMonitor": False, "WatchHangs": {"floor_s": 60}, "Heartbeat": True})[1] == []


def test_what_only_the_environment_says_is_named_where_a_job_file_says_it(parse):
    spec, errors, warnings = parse(artifacts_dir="/elsewhere", shared_artifacts=True)
    assert (errors, spec.shared_artifacts) == ([], False)
    said = "`{}` is ignored in a job file. Set `TRAINER_{}`, or give `--set {}=...`."
    assert sorted(warnings) == [said.format(name, name.upper(), name) for name in ("artifacts_dir", "shared_artifacts")]


def test_a_target_on_the_hub_without_a_login_is_said_before_anything_is_trained(parse, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (warning,) = parse(uploads={"targets": ["hf://me/digits"]})[2]
    assert "run `hf auth login`, or set `HF_TOKEN`" in warning
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_1")
    assert parse(uploads={"targets": ["hf://me/digits"]})[2] == []


def test_a_number_that_is_written_as_a_text_is_said(parse):
    assert parse(hyperparams={"lr": "0.01", "name": "v1"})[2] == [
        '`hyperparams.lr` is the text "0.01". If the class expects a number, write it without quotes.'
    ]


def test_a_file_without_end_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("genlight.adapter.job.sources.LARGEST_FILE_BYTES", 1 << 20)
    errors = ConfigErrors()
    assert read_job_file(Path("/dev/zero"), errors) is None
    assert [error.text for error in errors.found] == ["The job spec '/dev/zero' has more than 1 MiB. Name a JSON file."]
