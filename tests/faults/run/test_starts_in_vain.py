"""Starts that cannot advance a run: after a mistake, a completion, or a stop or failure that would repeat."""

import os

import pytest

from genlight.adapter.run.run import RunOptions, run_job


def deliver(job, **environ):
    """Start the job as an orchestrator does, from the environment."""
    places = {"TRAINER_JOB_SPEC_PATH": str(job.spec), "TRAINER_ARTIFACTS_DIR": str(job.out)}
    return run_job(RunOptions(environ={**os.environ, **places, **environ}))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def terminals(job):
    return [posted["status"] for posted in job.server.posted("/terminal")]


# mistakes

MISTAKES = {
    "a misspelled key": (["max_stepz=3"], 2),
    "a value of another type": (["max_steps=many"], 2),
    "a trainer that is not there": (["trainer=nowhere:Trainer", "resume_from_latest=true"], 2),
    "an unknown argument of Lightning": (["lightning.devicez=1", "resume_from_latest=true", "max_steps=9"], 2),
    "a changed job": (['hyperparams={"lr": 3}', "resume_from_latest=true"], 2),
    "existing checkpoints": ([], 2),
    "a checkpoint that is not there": (["resume_checkpoint_path=nowhere.json"], 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_command_does_not_change_a_completed_run(job, mistake, caplog):
    assert job.run() == 0
    before = contents(job.out)
    overrides, code = MISTAKES[mistake]

    assert job.run(*overrides) == code
    assert contents(job.out) == before
    assert terminals(job) == ["completed"]
    assert "failure:" in caplog.text
    if mistake == "existing checkpoints":
        assert "resume_from_latest=true" in caplog.text
        assert "--fresh" in caplog.text


@pytest.mark.parametrize("environ", [{}, {"TRAINER_ORCHESTRATED": "1", "TRAINER_CAPABILITY_TOKEN": "t"}])
def test_a_mistake_is_reported_to_the_orchestrator(job, environ):
    assert job.run() == 0
    job.write(max_stepz=3)
    assert deliver(job, **environ) == 2
    assert job.terminal_event()["category"] == "startup"
    assert terminals(job) == ["completed", "failed"]


def test_a_mistake_in_a_job_without_a_trained_step_is_logged(job):
    assert job.run("max_stepz=3") == 2
    assert job.run("max_stepz=3") == 2
    assert [event["event"] for event in job.events()] == ["failed", "failed"]


# completed jobs


@pytest.mark.parametrize("environ", [{}, {"TRAINER_ORCHESTRATED": "1", "TRAINER_CAPABILITY_TOKEN": "t"}])
def test_a_completed_job_that_is_delivered_again_completes_and_posts_nothing(job, environ):
    assert [deliver(job, **environ) for _ in range(3)] == [0, 0, 0]
    assert terminals(job) == ["completed"]
    assert [event["event"] for event in job.events()][-2:] == ["started", "completed"]


@pytest.mark.parametrize(
    "change",
    [{"max_steps": 9}, {"hyperparams": {"lr": 3}}, {"run_id": "another"}],
    ids=lambda change: next(iter(change)),
)
def test_another_job_for_the_same_folder_is_refused(job, change):
    assert deliver(job) == 0
    job.write(**change)
    assert deliver(job) == 2
    assert "startup.artifacts_in_use" in job.terminal_event()["error"]


# stops before the first step

STOPS = {
    "a flag": ({}, {"TRAINER_CANCELLED": "1"}, "canceled"),
    "a cancel file": ({"cancel_file_path": "job.json"}, {}, "canceled"),
    "a time limit": ({"max_runtime_seconds": 0.001}, {}, "timeout"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_before_the_first_step_promises_no_progress_the_second_time(job, stop, caplog):
    fields, environ, reason = STOPS[stop]
    job.write(resume_from_latest=True, **fields)
    job.environ = environ

    assert job.run() == 75
    assert "No step was trained. " in caplog.text
    assert "genlight run" in caplog.text
    caplog.clear()
    assert job.run() == 1
    failed = job.terminal_event()
    assert (failed["error"], failed["category"], failed["resumable"]) == (reason, reason, False)
    assert "No step was trained. The previous attempt" in caplog.text
    assert "genlight run" not in caplog.text
    assert terminals(job) == ["failed", "failed"]


def test_stops_before_the_first_step_count_from_one_checkpoint(job):
    def attempt(*, at=None):
        job.environ = {} if at else {"TRAINER_CANCELLED": "1"}
        job.write(resume_from_latest=True, plan=at and {"at": f"train_step:{at}", "raises": "KeyboardInterrupt"})
        return job.run(allow_changed=True)

    assert attempt() == 75
    assert attempt(at=3) == 75  # the checkpoint is of step 2
    assert [attempt(), attempt(), attempt()] == [75, 1, 1]
    assert attempt(at=5) == 75
    assert attempt() == 75
    job.environ = {}
    job.write(resume_from_latest=True)
    assert job.run(allow_changed=True) == 0


# failures that repeat


def test_no_command_is_suggested_after_a_failure_that_repeats(job, caplog):
    job.write(resume_from_latest=True, plan={"at": "train_step:4", "raises": "ValueError", "text": "bad row"})
    assert job.run() == 1
    assert job.terminal_event()["resumable"]
    assert "To continue:" in caplog.text
    caplog.clear()

    assert job.run() == 1
    assert not job.terminal_event()["resumable"]
    assert "To continue:" not in caplog.text
    assert "it failed in step 4. The same start would fail there again" in caplog.text


def test_a_failure_elsewhere_does_not_repeat(job, caplog):
    for step, text in ((4, "bad row"), (5, "bad row"), (5, "bad column")):
        caplog.clear()
        job.write(resume_from_latest=True, plan={"at": f"train_step:{step}", "raises": "ValueError", "text": text})
        assert job.run(allow_changed=True) == 1
        assert job.terminal_event()["resumable"]
        assert "To continue:" in caplog.text
