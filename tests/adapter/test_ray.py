"""A job as Ray's training function, without Ray itself; `tests/examples/test_ray.py` trains under Ray."""

import subprocess
import sys

import pytest

from genlight.adapter import StartupContractError, TrainingCanceled
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.ray import _is_final, train_loop
from support.jobs import events_of, run, write_job


@pytest.fixture
def job(tmp_path):
    return lambda **fields: write_job(tmp_path, **fields)


def given_to_workers(loop):
    """The settings of the workers' job with every override."""
    path, overrides = loop.args
    return resolve_run_config(spec_path=path, overrides=overrides)


@pytest.mark.parametrize("named", [{}, {"strategy": "ddp"}, {"strategy": "auto", "devices": 4}])
def test_rays_strategy_and_environment_are_used_if_the_job_names_none(job, named, tmp_path):
    config = given_to_workers(train_loop(job(lightning=named), ["max_steps=2"]))

    assert config.lightning["strategy"] == {"class_path": "ray.train.lightning.RayDDPStrategy"}
    assert config.lightning["plugins"] == [{"class_path": "ray.train.lightning.RayLightningEnvironment"}]
    assert (config.job.max_steps, config.resume_from_latest) == (2, True)
    assert config.artifacts_dir == tmp_path / "runs/r"


def test_a_strategy_and_plugins_of_the_job_stay(job):
    theirs = {"strategy": {"class_path": "ModelParallelStrategy"}, "plugins": {"class_path": "my.Plugin"}}
    config = given_to_workers(train_loop(job(lightning=theirs)))

    assert config.lightning["strategy"] == theirs["strategy"]
    assert [plugin["class_path"] for plugin in config.lightning["plugins"]] == [
        "my.Plugin", "ray.train.lightning.RayLightningEnvironment"
    ]  # fmt: skip


def test_every_fault_of_a_job_is_reported_before_ray_starts(job):
    with pytest.raises(StartupContractError) as caught:
        train_loop(job(max_steps="many", metric_every=-1))
    assert "max_steps" in str(caught.value)
    assert "metric_every" in str(caught.value)


@pytest.mark.parametrize(("reason", "wanted"), [("canceled", True), ("timeout", True), ("preempted", False)])
def test_only_a_preempted_run_starts_again(reason, wanted):
    assert _is_final(TrainingCanceled(reason)) is wanted
    assert not _is_final(ValueError("bad row"))


def test_a_notice_of_the_caller_stops_a_run_after_its_checkpoint(job):
    asked = iter([None, None])
    path = job(max_steps=50_000, mock_batches=[1] * 50_000)
    assert run(path, stop_check=lambda: next(asked, "preempted")) == 75
    failed = events_of(path)[-1]
    assert (failed["category"], failed["resumable"]) == ("preempted", True)
    assert 0 < failed["step"] < 50_000


def test_a_driver_needs_neither_ray_nor_torch_to_describe_the_job(job):
    program = "import sys, genlight.adapter.ray as ours; ours.train_loop(sys.argv[1]);"
    program += "print({'ray', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program, job()], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
