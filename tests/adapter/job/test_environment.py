"""Environment variables and how their texts become values."""

import pytest

from genlight.adapter.job.config import read_run_config
from genlight.adapter.job.sources import JOB_VARIABLE, VARIABLES
from genlight.adapter.plumbing.settings import is_true


@pytest.fixture
def read(tmp_path):
    """Return the settings that these variables give to a job file without settings, and their errors."""

    def read_variables(**environ):
        (tmp_path / "job.json").write_text("{}")
        config, errors = read_run_config(environ={JOB_VARIABLE: str(tmp_path / "job.json"), **environ}, complete=False)
        return config, errors

    return read_variables


def test_the_true_words_are_true_and_every_other_word_is_false():
    assert all(map(is_true, ["1", "true", "t", "yes", "y", "TRUE", " Yes "]))
    assert not any(map(is_true, ["", "0", "false", "no", "on", "2", "truee"]))


def test_a_word_that_is_neither_true_nor_false_is_a_warning(read):
    config, errors = read(TRAINER_ORCHESTRATED="maybe")
    assert config.orchestrated is False
    assert "`TRAINER_ORCHESTRATED`" in errors.warnings[0]


def test_the_documented_variables_are_read():
    assert set(VARIABLES) == {
        "TRAINER_PLUGIN",
        *(f"TRAINER_{name}_DIR" for name in ("ARTIFACTS", "CHECKPOINTS", "SAMPLES", "METRICS")),
        "TRAINER_EVENTS_PATH",
        "TRAINER_SHARED_ARTIFACTS",
        "TRAINER_ORCHESTRATED",
        "TRAINER_CAPABILITY_TOKEN",
        *(f"TRAINER_UPLOAD_{name}_URL" for name in ("METRICS", "CHECKPOINT", "SAMPLE", "TERMINAL")),
        "TENSORHUB_URL",
        "TRAINER_STOP_GRACE_SECONDS",
        "TRAINER_UPLOAD_DEADLINE_SECONDS",
        "TRAINER_TOKEN_ORIGINS",
        "TRAINER_PRIVATE_HOSTS",
        "TRAINER_CANCELLED",
        "TRAINER_CANCEL_FILE",
        "TRAINER_MAX_RUNTIME_SECONDS",
    }


def test_blank_variables_give_nothing_and_values_are_stripped(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, errors = read(TRAINER_PLUGIN="  ", TRAINER_CANCEL_FILE=" stop ", TRAINER_MAX_RUNTIME_SECONDS=" 1.5e1 ")
    assert (config.trainer, config.cancel_file_path, config.max_runtime_seconds) == ("", tmp_path / "stop", 15.0)
    assert errors.found == []


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1h", "1,5"])
@pytest.mark.parametrize("name", ["TRAINER_MAX_RUNTIME_SECONDS", "TRAINER_UPLOAD_DEADLINE_SECONDS"])
def test_a_time_that_is_no_number_of_seconds_is_an_invalid_timeout(read, name, text):
    _, errors = read(**{name: text})
    assert [error.code for error in errors.found] == ["startup.invalid_timeout"]
    assert f"Invalid `{name}`. Expected a number of seconds >= 0, but received" in errors.found[0].text


def test_a_number_is_shown_and_any_other_text_is_not_since_it_may_be_a_token(read):
    assert "received -3." in read(TRAINER_MAX_RUNTIME_SECONDS="-3")[1].found[0].text
    for name in ("TRAINER_MAX_RUNTIME_SECONDS", "TRAINER_UPLOAD_METRICS_URL", "TENSORHUB_URL", "TRAINER_TOKEN_ORIGINS"):
        text = read(**{name: "canary://x y"})[1].found[0].text
        assert f"`{name}`" in text
        assert "canary" not in text


def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(read):
    config, errors = read(TRAINER_CAPABILITY_TOKEN="canary\r\nX: y")
    assert config.capability_token is None
    assert "canary" not in errors.found[0].text


def test_a_misspelled_variable_is_a_warning_with_the_nearest_name_and_a_foreign_one_is_none(read):
    _, errors = read(TRAINER_CHECKPOINT_DIR="/x", TRAINER_REGION_OF_THE_MOON="z", PATH="/bin")
    assert errors.warnings == [
        "Unknown environment variable `TRAINER_CHECKPOINT_DIR` is ignored. Did you mean `TRAINER_CHECKPOINTS_DIR`?"
    ]
