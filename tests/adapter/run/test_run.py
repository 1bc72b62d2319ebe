"""`genlight run` from a job to its exit code, event log and artifacts; ``tests/faults/run`` has what goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.plumbing.failures import Failure
from genlight.adapter.run.folder import lock_directory
from genlight.adapter.run.rank_files import RankFiles
from genlight.callbacks.checkpoint import read_record, verify
from genlight.callbacks.checkpoint.format.record import RECORD_MARKER
from genlight.callbacks.stop.sources import process_age_s
from genlight.reporters import read_events
from genlight.reporters.events.json_lines import Position, complete_lines
from support import jobs
from support.forked import run_forked
from support.jobs import events_of, run
from support.loopback import serving

PATH = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
"""On which another process finds the trainer classes of `support`."""


@pytest.fixture
def write_job(tmp_path, monkeypatch):
    """Writes a job that sums the rows of a file; the run's artifacts go to ``out`` next to it."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "x.parquet", row_group_size=6)

    def write(*, trainer="Summing", **fields):
        usual = {"run_id": "sums", "max_steps": 5, "metric_every": 2, "mock_batches": ...}
        usual["dataset"] = {"parquet_paths": ["x.parquet"], "batch_size": 4}
        return jobs.write_job(tmp_path, trainer=f"support.summing:{trainer}", **{**usual, **fields})

    return write


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "out" / "checkpoints"


def names(job):
    return [event["event"] for event in events_of(job)]


def named(job, name):
    """Step and value of each metric of that name."""
    return [(event["step"], event["value"]) for event in events_of(job) if event.get("name") == name]


def final_state(job):
    return read_record(job.parent / "out" / "checkpoints" / "final.json").state


def test_a_run_leaves_its_log_checkpoints_samples_and_final_artifact_but_no_rank_files(write_job, checkpoints):
    job = write_job(checkpoint_every=2, sample_every=4)
    ranks = RankFiles(checkpoints.parent)  # of a killed attempt
    ranks.record(1, Failure("train-step", "train-step:RuntimeError: connection closed", resumable=True, exit_code=1))
    assert run(job) == 0

    assert not ranks.folder.exists()
    kept = ("final", "step-00000002", "step-00000004")
    assert {path.name for path in checkpoints.iterdir()} == {".witness", *kept, *(f"{name}.json" for name in kept)}
    assert [path.name for path in (checkpoints.parent / "samples").iterdir()] == ["step-00000004.txt"]
    log = events_of(job)
    assert log[0]["event"] == "started"
    total = checkpoints / "final/trainer/total.txt"
    assert (log[-1]["event"], log[-1]["step"], log[-1]["final_checkpoint"]) == ("completed", 5, str(total))
    saved = [event["path"] for event in log if event["event"] == "checkpoint"]
    assert saved[0].endswith("step-00000002/trainer/total.txt")
    final = verify(checkpoints / "final.json")
    assert (final.final, final.step, final.run_id, final.max_steps) == (True, 5, "sums", 5)
    assert final.state == {"total": sum(range(20)), "steps": 5}
    assert float(total.read_text()) == sum(range(20))


def test_metrics_have_the_contracts_names_and_steps(write_job):
    job = write_job()
    run(job)
    assert named(job, "train/loss") == [(2, 0.5), (4, 0.25)]
    assert named(job, "total") == [(2, 28.0), (4, 120.0)]
    assert named(job, "train/lr") == [(2, 0.5), (4, 0.5)]
    waits = named(job, "data/wait_fraction")
    assert [step for step, _ in waits] == [2, 4]
    assert all(0.0 <= share <= 1.0 for _, share in waits)


DAMAGED = {
    "cut": b'{"event":"metric","na',
    "without its time": b'{"event":"metric","name":"x","step":1,"value":1.0}',
    "with another time": b'{"event":"metric","name":"x","step":1,"timestamp_ms":"now","value":1.0}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_of_an_earlier_attempt_fails_no_later_one(write_job, caplog, line):
    job = write_job(max_steps=3, checkpoint_every=2, resume_from_latest=True)
    assert run(job) == 0
    log = job.parent / "out" / "metrics" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))

    for _ in range(2):
        assert run(write_job(max_steps=5, checkpoint_every=2, resume_from_latest=True)) == 0
    assert "Traceback" not in caplog.text
    assert list(complete_lines(log, Position()))[-1].startswith(b'{"event":"completed"')


TWO_EPOCHS = {"parquet_paths": ["x.parquet"], "batch_size": 4, "epochs": 2}


@pytest.mark.parametrize(
    ("fields", "steps", "stopped", "total"),
    [
        ({"max_steps": 100, "dataset": TWO_EPOCHS}, 10, "data_exhausted", 2 * sum(range(20))),
        ({"max_steps": 12}, 12, None, 2 * sum(range(20)) + sum(range(8))),
        ({"max_steps": 10, "dataset": ..., "mock_batches": [1, 2, 3]}, 3, "data_exhausted", 6),
        ({"lightning": ...}, 5, None, sum(range(20))),
        ({"lightning": {}}, 5, None, sum(range(20))),
    ],
    ids=["epochs", "data repeats", "mock batches", "no lightning", "empty lightning"],
)
def test_data_and_steps_bound_a_run(write_job, fields, steps, stopped, total):
    job = write_job(**fields)
    assert run(job) == 0
    end = events_of(job)[-1]
    assert (end["step"], end.get("stopped"), final_state(job)["total"]) == (steps, stopped, total)


def test_an_error_of_the_trainer_shows_its_own_frames_and_names_the_file_with_all(write_job, caplog):
    job = write_job(hyperparams={"fails_at": 1})
    assert run(job) == 1
    (complete,) = (job.parent / "out" / "failures").iterdir()
    assert "run/run.py" in complete.read_text()
    assert complete.stat().st_mode & 0o777 == 0o600
    (said,) = [record.getMessage() for record in caplog.records if "failure:" in record.getMessage()]
    _, place, line, error, last = said.splitlines()
    assert (place.split(", ")[-1], line) == ("in train_step", '    raise ZeroDivisionError("bad batch")')
    assert error == "ZeroDivisionError: bad batch"
    assert last == f"  the complete traceback is in out/failures/{complete.name}"


def test_a_completed_run_is_not_trained_again_but_its_debris_is_removed(write_job, checkpoints):
    job = write_job(resume_from_latest=True)
    assert run(job) == 0
    before, files = (checkpoints / "final.json").read_bytes(), set(os.listdir(checkpoints))
    (checkpoints / ".tmp-step-00000002-1-00").mkdir()  # an old checkpoint whose removal was killed
    assert run(job) == 0
    assert names(job)[-2:] == ["started", "completed"]
    assert events_of(job)[-2]["attempt"] == 2
    assert (checkpoints / "final.json").read_bytes() == before
    assert set(os.listdir(checkpoints)) == files


def test_a_higher_step_limit_continues_from_the_final_checkpoint(write_job, caplog):
    caplog.set_level("INFO", logger="genlight")
    assert run(write_job(resume_from_latest=True, max_steps=7)) == 0
    job = write_job(resume_from_latest=True, max_steps=9)
    assert run(job) == 0
    assert "continuing after step 7 of 9, from out/checkpoints/final.json" in caplog.messages
    assert named(job, "trainer/resumed_from_step") == [(7, 7.0)]
    assert final_state(job) == {"total": sum(range(20)) + sum(range(16)), "steps": 9}


def test_a_changed_job_is_refused_with_its_changes_and_continues_if_allowed(write_job, caplog):
    assert run(write_job()) == 0
    job = write_job(resume_from_latest=True, hyperparams={"sleep": 0.0})
    assert run(job) == 2
    own = job.parent / "out" / "job.json"
    assert f"another job. Changed since final: hyperparams.sleep ({own} has the earlier job)" in caplog.text
    assert run(job, allow_changed=True) == 0


def test_weights_of_another_shape_are_a_failure_with_a_way_out(write_job, caplog):
    assert run(write_job(trainer="Learns", max_steps=2)) == 0
    job = write_job(trainer="Learns", max_steps=4, hyperparams={"width": 3}, resume_from_latest=True)
    assert run(job, allow_changed=True) == 1
    error = events_of(job)[-1]["error"]
    assert error.startswith("model-load:The weights of the checkpoint do not fit the model that was built: ")
    assert "`genlight run --fresh`" in error
    assert "Traceback" not in caplog.text
    assert run(job, fresh=True) == 0


def test_fresh_moves_only_files_of_runs_aside(write_job, checkpoints):
    job = write_job(checkpoint_every=2, max_steps=4)
    samples = checkpoints.parent / "samples"
    for folder in (checkpoints / "exported", samples / "chosen"):
        folder.mkdir(parents=True)
        (folder / "model.gguf").write_text("mine")
    (checkpoints / "config.json").write_text("{}")
    os.symlink("step-00000002", checkpoints / "good")
    before = set(checkpoints.iterdir())
    assert run(job) == 0
    original = verify(checkpoints / "step-00000002.json")
    assert run(job, fresh=True) == 0

    (aside,) = checkpoints.parent.glob("before-*")
    moved = verify(aside / "checkpoints" / "step-00000002.json")
    assert (moved.digest, moved.folder) == (original.digest, "step-00000002")
    assert before <= set(checkpoints.iterdir())
    assert not any((aside / "checkpoints" / path.name).exists() for path in before)
    assert (samples / "chosen" / "model.gguf").read_text() == "mine"
    old = list(read_events(aside / "metrics" / "events.jsonl"))
    assert [old[0]["event"], old[-1]["event"]] == ["started", "completed"]
    new = events_of(job)[0]
    assert (new["event"], new["seq"], "attempt" in new) == ("started", old[0]["seq"], False)
    assert (checkpoints / "final.json").exists()


def test_fresh_moves_checkpoints_of_an_older_runtime_with_the_folder_of_its_trainer(write_job, checkpoints):
    (checkpoints / "final").mkdir(parents=True)
    (checkpoints / "final" / "lora.bin").write_text("old")
    (checkpoints / "final.json").write_text(json.dumps({"step": 3, "state": {"total": 100, "steps": 3}}))
    assert run(write_job(), fresh=True) == 0
    (aside,) = checkpoints.parent.glob("before-*")
    assert (aside / "checkpoints" / "final" / "lora.bin").read_text() == "old"
    assert verify(checkpoints / "final.json").folder == "final"


def test_files_of_a_run_are_closed_to_other_users_even_after_fresh(write_job):
    job = write_job(checkpoint_every=2, sample_every=2, max_steps=4)
    out = job.parent / "out"
    out.mkdir()
    out.chmod(0o755)
    before = os.umask(0o022)
    try:
        assert run(job) == 0
        assert run(job, fresh=True) == 0
    finally:
        os.umask(before)
    made = [path for path in out.rglob("*") if "trainer" not in path.parent.name]  # whose files the class writes
    assert len(made) > 30
    wide = {str(path.relative_to(out)): oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077}
    assert wide == {}
    assert out.stat().st_mode & 0o777 == 0o755


def test_a_users_file_with_the_name_of_a_checkpoint_is_named_before_training(write_job, checkpoints):
    job = write_job()
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000002.json").write_text("{}")
    assert run(job, fresh=True) == 2
    failed = events_of(job)[-1]
    assert "startup.artifacts_in_use" in failed["error"]
    assert "step-00000002.json' is not a checkpoint" in failed["error"]
    assert (checkpoints / "step-00000002.json").read_text() == "{}"


@pytest.mark.parametrize("path", ["checkpoints/step-00000002.json", "checkpoints/step-00000002", "checkpoints", ""])
def test_a_named_checkpoint_is_resumed_from(write_job, path):
    job = write_job(checkpoint_every=2)
    assert run(job, "max_steps=3") == 0
    (job.parent / "out").rename(job.parent / "moved")
    job = write_job(resume_checkpoint_path=f"moved/{path}")
    assert run(job) == 0
    assert final_state(job)["total"] == sum(range(20))


def test_changes_since_a_downloaded_checkpoint_are_reported_too(write_job, caplog):
    assert run(write_job(max_steps=2)) == 0
    ref = {"resume_checkpoint_ref": "moved/checkpoints/final.json"}
    job = write_job(max_steps=3, hyperparams={"sleep": 0.0}, inputs=ref)
    (job.parent / "out").rename(job.parent / "moved")
    assert run(job) == 0
    assert "The run continues from final, but its job has changed since: hyperparams.sleep" in caplog.text


def test_a_record_of_an_older_runtime_is_resumed_from(write_job):
    job = write_job(resume_checkpoint_path="old.json")
    (job.parent / "old.json").write_text(json.dumps({"step": 3, "state": {"total": 100, "steps": 3}}))
    assert run(job) == 0
    assert final_state(job) == {"total": 100 + sum(range(8)), "steps": 5}


@pytest.mark.parametrize(
    ("name", "content"),
    [("step-00000004.json", b""), ("final.json", b'{"step": 4, "sta'), ("step-00000004.json", None)],
    ids=["empty", "cut off", "folder"],
)
def test_a_run_gets_past_a_record_that_an_older_runtime_left_torn(write_job, caplog, checkpoints, name, content):
    """The name is free again before the first step, so the save of that step does not end the run on each start."""
    job = write_job(checkpoint_every=2, resume_from_latest=True)
    assert run(job, "max_steps=3") == 0
    torn = checkpoints / name
    (checkpoints / "final.json").unlink()
    if content is None:
        torn.mkdir()
    else:
        torn.write_bytes(content)
    assert run(job) == 0
    (warning,) = [message for message in caplog.messages if "not-a-checkpoint" in message]
    assert f"{name} -> {name}.not-a-checkpoint-1" in warning
    assert verify(torn).step == (5 if name == "final.json" else 4)
    aside = torn.with_name(f"{name}.not-a-checkpoint-1")
    assert aside.is_dir() if content is None else aside.read_bytes() == content


def test_the_hint_after_a_failure_names_the_checkpoint_that_the_next_start_takes(write_job, caplog, checkpoints):
    job = write_job(checkpoint_every=2, resume_from_latest=True, hyperparams={"fails_at": 5})
    assert run(job, "max_steps=3") == 0
    (checkpoints / "step-00000008.json").write_bytes(RECORD_MARKER)  # broken
    assert run(job) == 1
    assert "The next start continues from out/checkpoints/step-00000004.json." in caplog.text
    assert events_of(job)[-1]["resumable"] is True


def test_a_users_file_next_to_checkpoints_makes_no_failure_resumable(write_job, checkpoints):
    job = write_job(hyperparams={"fails_at": 1}, resume_from_latest=True)
    checkpoints.mkdir(parents=True)
    (checkpoints / "notes.json").write_text("{}")
    assert run(job) == 1
    assert events_of(job)[-1]["resumable"] is False


RECOVERS = {"callbacks": {"Recover": {"ladder": ["skip"], "good_steps": 2}}}
ROLLS_BACK = {"callbacks": {"Recover": {"ladder": ["roll_back"], "max_attempts": 3}}, "checkpoint_every": 2}


@pytest.mark.parametrize(
    ("trainer", "fields", "code", "metric", "values", "finite"),
    [
        ("Overflows", {}, 0, "trainer/nonfinite_step", [(4, 4.0)], None),
        ("Overflows", {"on_nonfinite": "stop"}, 3, "trainer/nonfinite_step", [(4, 4.0)], None),
        ("Learns", {}, 0, "trainer/nonfinite_step", [(4, 4.0)], False),
        ("Learns", {"on_nonfinite": "skip"}, 0, "recover/skip", [(3, 1.0)], True),
        ("Learns", RECOVERS, 0, "recover/attempt", [(3, 1.0), (5, 0.0)], True),
        ("Learns", ROLLS_BACK, 1, "trainer/rolled_back_to_step", [(3, 2.0)] * 3, None),
    ],
    ids=["warn", "stop", "final weights", "skip", "recover", "roll back"],
)
def test_a_job_decides_about_values_that_are_not_finite(
    write_job, capsys, checkpoints, trainer, fields, code, metric, values, finite
):
    job = write_job(trainer=trainer, max_steps=6, **fields)
    assert run(job) == code
    assert named(job, metric) == values
    *before, end = events_of(job)
    assert [event for event in before if event["event"] in ("completed", "failed")] == []
    if code == 0:
        assert finite is None or read_record(checkpoints / "final.json").finite_weights is finite
        shown = "completed at step 6, but its final weights are not finite" in capsys.readouterr().err
        assert shown is (end.get("finite") is False) is (finite is False)
    elif code == 3:
        assert end["error"].startswith("train-step:the metric 'loss' is not finite at step 4; all was finite at step 2")
    else:
        assert end["error"].startswith(
            "train-step:training could not be recovered: the loss is not finite since step 3"
        )
        assert end["resumable"]


def test_a_misspelled_optional_hook_is_named(write_job, caplog):
    assert run(write_job(trainer="Misspells", max_steps=1)) == 0
    told = [message for message in caplog.messages if "is not a hook" in message]
    assert told == ["`rollouts` is not a hook and is never called; did you mean `rollout`?"]


def test_a_run_without_a_complete_checkpoint_is_refused(write_job, caplog, checkpoints):
    """Training from step 0 would prune checkpoints that somebody may still want to restore."""
    job = write_job(checkpoint_every=2, resume_from_latest=True)
    checkpoints.mkdir(parents=True)
    for name in ("step-00000004", "final"):
        (checkpoints / f"{name}.json").write_bytes(RECORD_MARKER)
    assert run(job) == 2
    assert "started" not in names(job)
    assert "startup.artifacts_in_use: no checkpoint in" in events_of(job)[-1]["error"]
    for said in ("checkpoint final is broken", "checkpoint step-00000004 is broken", "`genlight run --fresh`"):
        assert said in caplog.text
    assert run(job, fresh=True) == 0
    assert named(job, "trainer/resumed_from_step") == []


@pytest.mark.slow
def test_a_variable_that_is_set_while_the_run_trains_stops_it(write_job, monkeypatch):
    monkeypatch.setenv("TRAINER_CANCELLED", "0")
    job = write_job(trainer="Cancels", max_steps=5000)
    assert run(job) == 75
    assert (events_of(job)[-1]["error"], events_of(job)[-1]["resumable"]) == ("canceled", True)


def test_a_time_limit_counts_from_the_call_if_a_program_calls_the_runtime(write_job):
    job = write_job(max_steps=2)
    limit = f"max_runtime_seconds={max(1.0, process_age_s())}"  # this process is as old as that
    assert run(job, limit) == 0
    assert run(job, limit, f"artifacts_dir={job.parent}/other", began_with_process=True) == 75


def test_a_run_in_a_folder_that_another_holds_is_refused_and_writes_no_event(write_job):
    job = write_job()
    (job.parent / "out").mkdir()
    lock = lock_directory(job.parent / "out", "another")
    assert run(job) == 2
    assert not (job.parent / "out" / "metrics" / "events.jsonl").exists()
    lock.release()
    assert run(job) == 0


@pytest.mark.slow
def test_a_run_completes_once_though_nobody_reads_its_progress(write_job):
    """This happens under ``| head``, or when the log collector of a container has died."""
    job = write_job(max_steps=20)
    reader, writer = os.pipe()
    os.close(reader)
    words = ("run", str(job), "--set", f"artifacts_dir={job.parent}/out")
    process = subprocess.Popen(
        [sys.executable, "-m", "genlight.adapter.cli", *words],
        cwd=job.parent,
        stderr=writer,
        env={**os.environ, "PYTHONPATH": PATH},
    )
    os.close(writer)
    assert process.wait(120) == 0
    assert [name for name in names(job) if name in ("started", "completed", "failed")] == ["started", "completed"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_signal_is_answered_at_once_in_one_line(write_job, capfd, name):
    assert run(write_job(trainer="Signalled", hyperparams={"signal": name})) == 75
    what_next = "the run saves a checkpoint after the current step, and stops"
    assert capfd.readouterr().err.count(f"{name}: {what_next}; a second signal after 3 s ends it now\n") == 1


def test_a_stop_signal_before_training_promises_no_checkpoint(write_job, capfd):
    job = write_job()
    (job.parent / "signals_itself.py").write_text(
        f"import signal; signal.raise_signal({int(signal.SIGTERM)})\nfrom support.summing import Summing as Trainer\n"
    )
    run(job, "trainer=signals_itself:Trainer")
    assert "SIGTERM: the run stops before it trains; a second signal after 3 s ends it now\n" in capfd.readouterr().err


def test_what_would_stop_the_next_start_too_is_named(write_job, tmp_path, monkeypatch, caplog):
    (tmp_path / "cancel").touch()
    assert run(write_job(cancel_file_path="cancel")) == 75
    stopped = f"stopped: canceled. No step was trained. Remove the cancel file {tmp_path / 'cancel'} first."
    assert f"{stopped} To continue:" in caplog.text
    monkeypatch.setenv("TRAINER_CANCELLED", "1")
    assert run(write_job(), f"artifacts_dir={tmp_path}/other") == 75
    assert "stops before its first step, since it is canceled by `TRAINER_CANCELLED`" in caplog.text


@pytest.mark.slow
def test_the_orchestrated_path_from_end_to_end(write_job, tmp_path):
    """Token from the environment, Parquet and a checkpoint by URL, uploads acknowledged before the terminal event."""
    assert run(write_job(run_id="earlier", checkpoint_every=2)) == 0
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "out").rename(store / "out")
    (tmp_path / "x.parquet").rename(store / "x.parquet")
    with serving(store) as server:
        inputs = {
            "dataset_parquet_urls": [f"{server.url}/files/x.parquet"],
            "resume_checkpoint_url": f"{server.url}/files/out/checkpoints/step-00000002.json",
        }
        uploads = {f"{kind}_url": f"{server.url}/{kind}" for kind in ("metrics", "checkpoint", "sample", "terminal")}
        job = write_job(dataset={"batch_size": 4}, checkpoint_every=4, inputs=inputs, uploads=uploads)
        environ = {
            **os.environ,
            "PYTHONPATH": PATH,
            "TRAINER_JOB_SPEC_PATH": str(job),
            "TRAINER_ORCHESTRATED": "1",
            "TRAINER_PRIVATE_HOSTS": "127.0.0.1",  # serves the data and the checkpoint of this test
            "TRAINER_CAPABILITY_TOKEN": "token-canary",
            "TRAINER_ARTIFACTS_DIR": str(tmp_path / "out"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        done = run_forked("run", environ=environ, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert {headers.get("Authorization") for _, headers in server.headers} == {"Bearer token-canary"}
    assert named(job, "trainer/resumed_from_step") == [(2, 2.0)]
    assert final_state(job)["total"] == sum(range(20))
    assert [path for path, _ in server.posts if path != "/metrics"] == ["/checkpoint", "/checkpoint", "/terminal"]
    (last,) = server.posted("/terminal")
    assert (last["status"], last["step"]) == ("completed", 5)
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"token-canary" not in path.read_bytes()


@pytest.mark.parametrize("uploads", [{}, {"metrics_url": "http://127.0.0.1:9/metrics"}], ids=["unused", "used"])
def test_an_unusable_upload_queue_is_reported_only_if_it_is_used(write_job, uploads):
    job = write_job(uploads=uploads)
    (job.parent / "out").mkdir()
    (job.parent / "out" / "uploads").write_text("a file")
    assert run(job) == (2 if uploads else 0)
    if uploads:
        (failed,) = events_of(job)
        assert failed["error"].startswith("startup:startup.invalid_artifact_paths: The upload queue ")
        assert "TRAINER_ARTIFACTS_DIR" in failed["error"]


def test_uploads_waiting_for_a_removed_url_are_reported(write_job, caplog):
    """A start without one would look as if all had arrived."""
    away = {"checkpoint_url": "http://127.0.0.1:9/checkpoint"}
    assert run(write_job(uploads=away), environ={"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.1"}) == 1
    caplog.clear()
    job = write_job(resume_from_latest=True)
    assert run(job) == 0
    assert "uploads of earlier starts are waiting (1), but no destination is set" in caplog.text
    assert f"see `genlight uploads list {job.parent}/out`" in caplog.text


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("checkpoints/final.json", 1, "{}: Permission denied; let this user read it, or move it away"),
        (".lock", 2, "startup.invalid_artifact_paths: '{}' cannot be opened: Permission denied. Choose another"),
    ],
)
def test_a_file_that_this_user_may_not_open_is_named_and_kept(write_job, monkeypatch, caplog, name, code, said):
    job = write_job(resume_from_latest=True)
    assert run(job) == 0
    path = str(job.parent / "out" / name)

    def refuses(real):
        def opened(given, *rest, **options):
            if isinstance(given, str | Path) and str(given) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(given, *rest, **options)

        return opened

    for module in (io, os):
        monkeypatch.setattr(module, "open", refuses(module.open))
    assert run(job, "max_steps=9") == code
    assert f"failure: {said.format(path)}" in caplog.text


def test_a_setting_to_keep_on_a_resume_is_applied_or_refused_by_name(write_job, caplog):
    assert run(write_job(trainer="Learns", max_steps=2, hyperparams={"lr": 0.01})) == 0
    job = write_job(trainer="Learns", max_steps=5, hyperparams={"lr": 0.5}, resume_from_latest=True)
    assert run(job, 'resume.keep=["lrr"]', allow_changed=True) == 1
    assert "'lrr' cannot be kept on a resume" in caplog.text
    assert run(job, 'resume.keep=["lr"]', allow_changed=True) == 0
    assert "The run continues from final, but its job has changed since: hyperparams.lr (" in caplog.text
