"""However ``genlight fit`` ends, its log has one terminal event, and its receiver gets one message that agrees."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events

pytestmark = pytest.mark.slow

FEED = {"class_path": "genlight.adapter.ArrowDataModule", "init_args": {"parquet_paths": "x.parquet", "batch_size": 1}}
TWO = {"devices": 2, "strategy": "ddp"}
EVENTS = {"class_path": "genlight.reporters.EventLogger", "init_args": {"path": "events.jsonl", "run_id": "fit"}}
CHECKPOINTS = {"class_path": "genlight.callbacks.Checkpoint", "init_args": {"dirpath": "checkpoints"}}
IN_FIVE_MINUTES = 300.0


def uploads(**arguments):
    return {"class_path": "genlight.callbacks.UploadArtifacts", "init_args": {"run_id": "fit", **arguments}}


@pytest.fixture
def reported(job, fit):
    """Start a fit with a log and uploads; `wait` checks that its end was reported once, and returns code and event."""

    class Reported:
        def start(self, *callbacks, critical=True, deadline_s=30.0, **arguments):
            environ = {f"TRAINER_UPLOAD_{kind}_URL": f"{job.server.url}/{kind}" for kind in ("CHECKPOINT", "TERMINAL")}
            environ["TRAINER_UPLOAD_DEADLINE_SECONDS"] = str(deadline_s)
            together = [CHECKPOINTS, uploads(critical=critical), *callbacks]
            return fit(FEED, logger=EVENTS, callbacks=together, environ=environ, **arguments)

        def wait(self, process):
            code, output = process.wait(120), job.output()
            assert validate_events(job.folder / "events.jsonl") == [], output
            *before, last = read_events(job.folder / "events.jsonl")
            assert [event["event"] for event in before if event["event"] in ("completed", "failed")] == [], output
            messages = [(each["status"], each["step"], each["error"]) for each in job.server.posted("/TERMINAL")]
            assert messages == [(last["event"], last["step"], last.get("error", ""))], output
            return code, last

    return Reported()


def test_a_fit_that_completes_reports_it_once_its_checkpoints_have_arrived(job, reported):
    code, last = reported.wait(reported.start(at="nowhere", max_steps=3))
    assert (code, last["event"], last["step"]) == (0, "completed", 3)
    assert last["final_checkpoint"] == str(job.folder / "checkpoints" / "final.json")
    assert [path for path, _ in job.server.posts] == ["/CHECKPOINT", "/TERMINAL"]
    assert job.server.posted("/TERMINAL")[0]["final_checkpoint"] == last["final_checkpoint"]


@pytest.mark.parametrize("raises", ["ValueError", "SystemExit"])
def test_an_exception_of_the_users_code_is_reported(reported, raises):
    code, last = reported.wait(reported.start(plan={"raises": raises}))
    assert (code, last["event"], last["step"]) == (1, "failed", 3)
    assert last["error"] == f"train-step:{raises}: injected"


def test_a_setting_that_lightning_refuses_during_the_fit_is_reported(job, reported):
    late = {"val_check_interval": 900, "limit_val_batches": 1, "max_epochs": 1}
    code, last = reported.wait(reported.start(at="nowhere", **late, **TWO))
    assert (code, last["event"], last["category"], last["step"]) == (2, "failed", "startup", 0)
    assert "`val_check_interval` (900) must be less than or equal" in last["error"]
    assert "Traceback" not in job.output()


def test_a_stop_while_a_completed_fit_waits_for_its_uploads_is_reported(job, reported):
    job.server.status["/CHECKPOINT"] = 503
    process = reported.start(at="nowhere", max_steps=3, deadline_s=IN_FIVE_MINUTES)
    job.wait_until(lambda: "uploads: 1 left" in job.output(), process)
    process.send_signal(signal.SIGTERM)
    code, last = reported.wait(process)
    assert (code, last["event"], last.get("error"), last.get("resumable")) == (75, "failed", "preempted", True)


@pytest.mark.parametrize("critical", [True, False])
def test_an_undelivered_upload_fails_a_fit_if_it_is_critical(job, reported, critical):
    job.server.status["/CHECKPOINT"] = 503
    code, last = reported.wait(reported.start(at="nowhere", max_steps=3, deadline_s=1.0, critical=critical))
    assert (code, last["event"]) == ((1, "failed") if critical else (0, "completed"))
    assert last.get("category") == ("upload" if critical else None)


def test_logger_and_uploads_work_in_copies_of_the_process(job):
    """The session stays in the process that starts the copies; a spawned copy imports the program again."""
    config = {
        "trainer": {
            "max_steps": 2,
            "accelerator": "cpu",
            "limit_val_batches": 0,
            "enable_model_summary": False,
            "strategy": "ddp_spawn",
            "devices": 2,
            "logger": EVENTS,
            "callbacks": [CHECKPOINTS, uploads()],
        },
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
    }
    (job.folder / "fit.json").write_text(json.dumps(config))
    environ = job.process_environ(TRAINER_UPLOAD_TERMINAL_URL=f"{job.server.url}/TERMINAL", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "genlight.adapter.cli", "fit", "--config", "fit.json"]
    done = subprocess.run(
        command, cwd=job.folder, env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fit completed at step 2\n" in done.stdout + done.stderr
    kinds = [event["event"] for event in read_events(job.folder / "events.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("completed")) == ("started", "completed", 1)
    assert [each["status"] for each in job.server.posted("/TERMINAL")] == ["completed"]


# stop signals and killed ranks


def test_a_signal_while_data_is_prepared_ends_a_fit_before_its_first_step(job, fit):
    process = fit({"class_path": "loader_data.Prepared"}, at="nowhere")
    job.wait_until(job.reached, process)
    process.send_signal(signal.SIGINT)
    job.wait_until(lambda: "SIGINT: the run saves a checkpoint" in job.output(), process)  # acknowledged at once
    job.go()

    assert process.wait(120) == 75, job.output()
    assert "Traceback" not in job.output()
    assert not list((job.folder / "checkpoints").glob("*.json"))


def test_all_ranks_of_a_stopped_fit_end_with_the_same_code(job, fit, torchrun_environs):
    ranks = [fit(FEED, rank=1, environ=environ, **TWO) for environ in torchrun_environs(2)]
    job.wait_until(lambda: job.reached(1), ranks[1])
    ranks[1].send_signal(signal.SIGTERM)
    job.go()

    assert [process.wait(120) for process in ranks] == [75, 75], job.output()
    assert list((job.folder / "checkpoints").glob("step-*.json"))
    assert {path.name[:5] for path in (job.folder / "checkpoints").glob("*.json")} == {"step-"}


def test_a_killed_rank_is_named_and_ends_a_fit_while_rank_zero_hangs(job, fit):
    process = fit(FEED, at="train_step:12", plan={"holds": 600.0}, logger=EVENTS, **TWO)
    job.wait_until(job.reached, process)
    (other,) = psutil.Process(process.pid).children()
    other.kill()

    assert process.wait(120) == 1, job.output()
    assert "rank 1 was killed by signal 9" in job.output()
    *_, last = read_events(job.folder / "events.jsonl")
    assert (last["event"], last["category"]) == ("failed", "train-step")
    assert "rank 1 was killed by signal 9" in last["error"]
