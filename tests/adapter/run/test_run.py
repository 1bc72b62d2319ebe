"""`genlight run` from a job spec to its exit code, its event log and its artifacts."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genlight.adapter.plumbing.failures import Failure
from genlight.adapter.run.ranks import RankFiles
from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks.checkpoint import read_record, verify
from genlight.callbacks.checkpoint.format.record import RECORD_MARKER
from genlight.callbacks.stop.sources import process_age_s
from genlight.reporters import read_events
from genlight.reporters.events.json_lines import Position, complete_lines
from genlight.reporters.events.validation import validate_events
from support.forked import Forked, run_forked

TRAINER = '''
import time
from pathlib import Path
from gen_worker.trainer import StepContext, StepResult


class Summing:
    """Adds numbers up; what goes wrong is said by the hyperparameters."""

    def setup(self, ctx: StepContext) -> None:
        self.p = dict(ctx.job.hyperparams)
        if self.p.get("fails_in") == "setup":
            raise RuntimeError("no weights under token-canary")

    def configure(self, ctx):
        return {"total": 0, "steps": 0, "lr": 0.5}

    def prepare_batch(self, raw, state, ctx):
        return sum(raw["x"].to_pylist()) if hasattr(raw, "schema") else raw

    def train_step(self, batch, state, ctx):
        state["steps"] += 1
        if self.p.get("fails_at") == state["steps"]:
            raise ZeroDivisionError("bad batch")
        if self.p.get("returns_dict"):
            return {"loss": 1.0}
        time.sleep(self.p.get("sleep", 0))
        state["total"] += batch
        return StepResult(metrics={"loss": 1.0 / state["steps"], "total": state["total"]})

    def state_dict(self, state):
        return {"total": state["total"], "steps": state["steps"]}

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)

    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        Path(output_dir, "total.txt").write_text(str(state["total"]))
        return {"primary_path": "total.txt"}

    def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx):
        assert Path(checkpoint_dir, "total.txt").read_text() == str(payload["total"])


class Signalled(Summing):
    """Gets the signals that its hyperparameters name, where they say."""

    def setup(self, ctx):
        super().setup(ctx)
        self._raise("setup")

    def train_step(self, batch, state, ctx):
        self._raise("train_step")
        return super().train_step(batch, state, ctx)

    def _raise(self, where):
        import signal

        if self.p["signalled_in"] == where:
            signal.raise_signal(signal.Signals[self.p["signal"]])


class Overflows(Summing):
    """Its loss becomes infinite at step 3."""

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        return StepResult(metrics={"loss": float("inf") if state["steps"] >= 3 else 1.0})


class Learns(Summing):
    """Its loss is infinite at step 3."""

    def configure(self, ctx):
        import torch

        model = torch.nn.Linear(1, self.p.get("width", 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=self.p.get("lr", 0.01))
        return {**super().configure(ctx), "model": model, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)
        loss = state["model"].weight.sum() * (float("inf") if state["steps"] == 3 else 1.0)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})


class Cancels(Summing):
    """Requests a stop in its own process while it runs."""

    def train_step(self, batch, state, ctx):
        import os

        os.environ["TRAINER_CANCELLED"] = "1"
        time.sleep(0.1)
        return super().train_step(batch, state, ctx)


class Misspells(Summing):
    def save_checkpoints(self, **_): ...
    def rollouts(self): ...

    save_checkpoint = None


class LacksHooks:
    def setup(self, ctx): ...


class BreaksInConstructor:
    setup = configure = prepare_batch = train_step = state_dict = load_state_dict = lambda self: None

    def __init__(self):
        raise TypeError("constructor() got an unexpected keyword")
'''


ACCUMULATES = {
    "class_path": "lightning.pytorch.callbacks.GradientAccumulationScheduler",
    "init_args": {"scheduling": {"0": 2}},
}
STOPS_EARLY = {
    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
    "init_args": {"monitor": "train/loss", "mode": "y"},
}


@pytest.fixture
def write_job(tmp_path, monkeypatch):
    """Writes a job and its trainer; the run's artifacts go to ``out`` next to it."""
    monkeypatch.chdir(tmp_path)
    name = f"summing_{abs(hash(str(tmp_path)))}"  # one module for each test, because an imported module stays imported
    (tmp_path / f"{name}.py").write_text(TRAINER)
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "x.parquet", row_group_size=6)

    def write(**fields):
        job = {
            "run_id": "sums",
            "trainer": f"{name}:Summing",
            "max_steps": 5,
            "metric_every": 2,
            "dataset": {"parquet_paths": ["x.parquet"], "batch_size": 4},
            "lightning": {"accelerator": "cpu"},
            **fields,
        }
        if isinstance(job["trainer"], str) and job["trainer"].startswith(":"):
            job["trainer"] = name + job["trainer"]
        path = tmp_path / "job.json"
        path.write_text(json.dumps({key: value for key, value in job.items() if value is not ...}))
        return path

    return write


def run(job, *overrides, **options):
    """Run a job in this process."""
    return run_job(RunOptions(spec_path=job, overrides=(f"artifacts_dir={job.parent}/out", *overrides), **options))


def events(job):
    """The event log, after proving it sound."""
    path = job.parent / "out" / "metrics" / "events.jsonl"
    assert validate_events(path) == []
    return list(read_events(path))


def names(job):
    return [event["event"] for event in events(job)]


def test_a_run_leaves_its_log_checkpoints_samples_and_final_artifact(write_job):
    """The layout of the artifacts, and one terminal event that names the end."""
    job = write_job(checkpoint_every=2, sample_every=4)
    assert run(job) == 0
    out = job.parent / "out"
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        ".witness",
        "final",
        "final.json",
        "step-00000002",
        "step-00000002.json",
        "step-00000004",
        "step-00000004.json",
    ]
    assert [path.name for path in (out / "samples").iterdir()] == ["step-00000004.txt"]
    log = events(job)
    assert log[0]["event"] == "started"
    assert log[-1]["event"] == "completed"
    assert (log[-1]["step"], log[-1]["final_checkpoint"]) == (5, str(out / "checkpoints/final/trainer/total.txt"))
    final = verify(out / "checkpoints" / "final.json")
    assert (final.final, final.step, final.run_id, final.max_steps) == (True, 5, "sums", 5)
    assert final.state == {"total": sum(range(20)), "steps": 5}
    assert (out / "checkpoints" / "final" / "trainer" / "total.txt").read_text() == str(sum(range(20)))


def test_metrics_have_the_contracts_names_and_steps(write_job):
    """Loss and learning rate appear at the boundaries of the cadence, other metrics as the trainer logged them."""
    job = write_job()
    run(job)
    metrics = [(event["step"], event["name"], event["value"]) for event in events(job) if event["event"] == "metric"]
    waits = [metric for metric in metrics if metric[1] == "data/wait_fraction"]
    assert [step for step, _, _ in waits] == [2, 4]
    assert all(0.0 <= value <= 1.0 for _, _, value in waits)
    assert [metric for metric in metrics if metric not in waits] == [
        (2, "train/loss", 0.5),
        (2, "total", 28.0),
        (2, "train/lr", 0.5),
        (4, "train/loss", 0.25),
        (4, "total", 120.0),
        (4, "train/lr", 0.5),
    ]


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (["Reads"], "Reads reads 'nobody_writes', which no hook writes"),
        (["First", "Second"], "hooks wait for each other: First, Second, First; each reads what the next one writes"),
    ],
)
def test_hooks_that_cannot_be_ordered_are_a_mistake_of_the_user(write_job, caplog, hooks, words):
    """Nothing is trained, and no traceback hides what is wrong."""
    job = write_job(lightning={"accelerator": "cpu", "callbacks": [{"class_path": f"unordered.{h}"} for h in hooks]})
    (job.parent / "unordered.py").write_text(
        "from genlight.callbacks import Hook\n"
        "class Reads(Hook):\n    reads = ('nobody_writes',)\n"
        "class First(Hook):\n    reads, writes = ('a',), ('b',)\n"
        "class Second(Hook):\n    reads, writes = ('b',), ('a',)\n"
    )
    assert run(job) == 2
    assert words in events(job)[-1]["error"]
    assert events(job)[-1]["category"] == "startup"
    assert "Traceback" not in caplog.text


DAMAGED = {
    "cut": b'{"event":"metric","na',
    "without its time": b'{"event":"metric","name":"x","step":1,"value":1.0}',
    "with another time": b'{"event":"metric","name":"x","step":1,"timestamp_ms":"now","value":1.0}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_of_an_earlier_attempt_does_not_fail_a_run_that_completes(write_job, caplog, line):
    """Nor does it keep the job from going on once more."""
    job = write_job(max_steps=3, checkpoint_every=2, resume_from_latest=True)
    assert run(job) == 0
    log = job.parent / "out" / "metrics" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))

    for _ in range(2):
        caplog.clear()
        assert run(write_job(max_steps=5, checkpoint_every=2, resume_from_latest=True)) == 0
        assert "Traceback" not in caplog.text
    assert list(complete_lines(log, Position()))[-1].startswith(b'{"event":"completed"')


def test_checkpoint_events_name_the_hooks_primary_path(write_job):
    """The report contains the name that the trainer's hook gave the checkpoint."""
    job = write_job(checkpoint_every=5)
    run(job)
    (event, *_) = [event for event in events(job) if event["event"] == "checkpoint"]
    assert event["path"].endswith("step-00000005/trainer/total.txt")
    assert Path(event["path"]).exists()


def test_epochs_bound_the_run(write_job):
    """Two passes over five batches end a run of a hundred steps, with the reason in the event."""
    job = write_job(max_steps=100, dataset={"parquet_paths": ["x.parquet"], "batch_size": 4, "epochs": 2})
    assert run(job) == 0
    assert (events(job)[-1]["step"], events(job)[-1]["stopped"]) == (10, "data_exhausted")


def test_without_epochs_the_data_repeats(write_job):
    """Twelve steps over five batches."""
    job = write_job(max_steps=12)
    assert run(job) == 0
    assert events(job)[-1]["step"] == 12


def test_mock_batches_are_one_pass_and_reach_the_trainer_as_they_are(write_job):
    """Numbers in the job are the batches."""
    job = write_job(dataset=..., mock_batches=[1, 2, 3], max_steps=10)
    assert run(job) == 0
    assert events(job)[-1]["step"] == 3
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").state["total"] == 6


@pytest.mark.parametrize(
    ("fields", "category", "words", "code"),
    [
        ({"hyperparams": {"fails_in": "setup"}}, "model-load", "no weights", 1),
        ({"hyperparams": {"fails_at": 3}}, "train-step", "bad batch", 1),
        ({"hyperparams": {"returns_dict": True}}, "train-step", "return StepResult", 1),
        ({"trainer": ":LacksHooks"}, "startup", "configure, prepare_batch, train_step", 2),
        ({"trainer": ":BreaksInConstructor"}, "model-load", "unexpected keyword", 1),
        ({"trainer": "no_such_module:X"}, "startup", "no_such_module", 2),
        ({"dataset": {"parquet_paths": ["x.parquet"], "columns": ["y"]}}, "input", "y", 1),
        ({"dataset": {"parquet_paths": ["missing.parquet"]}}, "input", "missing.parquet", 1),
        ({"max_steps": 0}, "startup", "max_steps", 2),
        ({"lightning": {"no_such_argument": 1}}, "startup", "no_such_argument", 2),
        ({"lightning": {"precision": "bf17"}}, "startup", "cannot be used: `lightning.precision`: Expected ", 2),
        ({"lightning": {"callbacks": [ACCUMULATES]}}, "startup", "GradientAccumulationScheduler: the trainer class", 2),
        ({"lightning": {"callbacks": [STOPS_EARLY]}}, "startup", "cannot be used: `mode` can be min, max, got y", 2),
        ({"lightning": {"precision": "bf17", "logger": "no.Such"}}, "startup", "`lightning.logger`: Problem with ", 2),
        ({"lightning": {"val_check_interval": 9}}, "startup", "cannot be used: `val_check_interval` (9) must ", 2),
        ({"validate": {"every_n_steps": 1}}, "startup", "Summing has no `evaluate(state, ctx)`", 2),
        ({"uploads": {"targets": ["nothing://x"]}}, "startup", "Invalid upload target 'nothing://x'. Protocol not", 2),
        ({"dataset": ...}, "startup", "names no data", 2),
    ],
)
def test_bad_input_is_one_failed_event_and_a_documented_exit_code(write_job, caplog, fields, category, words, code):
    """Each fault has its category, names the thing, and is the only terminal event; a fault of a job is a sentence."""
    job = write_job(**fields)
    assert run(job) == code
    (failed,) = [event for event in events(job) if event["event"] == "failed"]
    assert failed["category"] == category
    assert words in failed["error"]
    assert names(job)[-1] == "failed"
    assert code == 1 or "Traceback" not in caplog.text


def test_every_fault_of_a_spec_is_in_the_event_beside_the_key_that_was_misspelled(
    write_job,
):
    """One start shows all that is wrong."""
    job = write_job(max_steps=..., max_stepss=5, metric_every="often")
    assert run(job) == 2
    error = events(job)[-1]["error"]
    assert error.startswith("startup:startup.invalid_job_spec: 2 errors; ")
    assert "Invalid `metric_every`" in error
    assert "Unknown key `max_stepss`. Did you mean `max_steps`?" in error


def test_an_error_of_the_trainer_shows_its_own_frames_and_names_the_file_with_all(write_job, caplog):
    """Fifty frames of Lightning would bury the one line of the user's that counts."""
    job = write_job(hyperparams={"fails_at": 1, "token": "token-canary"}, capability_token="token-canary")
    assert run(job) == 1
    (whole,) = (job.parent / "out" / "failures").iterdir()
    assert "run/run.py" in whole.read_text()
    assert whole.stat().st_mode & 0o777 == 0o600
    (said,) = [record.getMessage() for record in caplog.records if "failure:" in record.getMessage()]
    _, place, line, error, last = said.splitlines()
    assert (place.split(", ")[-1], line) == ("in train_step", '    raise ZeroDivisionError("bad batch")')
    assert error == "ZeroDivisionError: bad batch"
    assert last == f"  the complete traceback is in out/failures/{whole.name}"


def test_a_token_is_in_no_byte_that_a_failed_run_leaves(write_job, caplog):
    """Neither in the log nor in any file, though the exception holds it."""
    job = write_job(hyperparams={"fails_in": "setup"}, capability_token="token-canary")
    assert run(job) == 1
    assert "token-canary" not in caplog.text
    for path in (job.parent / "out").rglob("*"):
        assert not path.is_file() or b"token-canary" not in path.read_bytes()


def test_a_completed_run_is_recognized_and_not_trained_again(write_job):
    """A new attempt in the log, no training, exit 0."""
    job = write_job(resume_from_latest=True)
    assert run(job) == 0
    before = (job.parent / "out" / "checkpoints" / "final.json").read_bytes()
    assert run(job) == 0
    assert names(job)[-2:] == ["started", "completed"]
    assert events(job)[-2]["attempt"] == 2
    assert (job.parent / "out" / "checkpoints" / "final.json").read_bytes() == before


def test_a_completed_run_removes_files_that_a_kill_left_after_its_last_checkpoint(write_job):
    job = write_job(resume_from_latest=True)
    assert run(job) == 0
    checkpoints = job.parent / "out" / "checkpoints"
    before = set(os.listdir(checkpoints))
    (checkpoints / ".tmp-step-00000002-1-00").mkdir()  # An old checkpoint that was being removed.
    assert run(job) == 0
    assert set(os.listdir(checkpoints)) == before


def test_a_completed_run_removes_the_rank_files_of_a_killed_attempt(write_job):
    job = write_job()
    ranks = RankFiles(job.parent / "out")
    ranks.record(1, Failure("train-step", "train-step:RuntimeError: connection closed", resumable=True, exit_code=1))

    assert run(job) == 0
    assert not ranks.folder.exists()


def test_a_higher_step_limit_continues_from_the_final_checkpoint(write_job, caplog):
    """The run logs that it continues from its end, and the result equals one run of that length."""
    caplog.set_level("INFO", logger="genlight")
    assert run(write_job(resume_from_latest=True, max_steps=7)) == 0
    assert "going on" not in caplog.text
    job = write_job(resume_from_latest=True, max_steps=9)
    assert run(job) == 0
    assert "continuing after step 7 of 9, from out/checkpoints/final.json" in caplog.messages
    (resumed,) = [event for event in events(job) if event.get("name") == "trainer/resumed_from_step"]
    assert resumed["step"] == resumed["value"] == 7
    expected = sum(range(20)) + sum(range(16))
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").state == {"total": expected, "steps": 9}


def test_artifacts_of_another_run_are_not_touched(write_job, caplog):
    """Without a resume, with another run_id, or with another job the directory is refused, with the ways out."""
    assert run(write_job()) == 0
    for code, fields in (
        ("artifacts_in_use", {}),
        ("artifacts_in_use", {"resume_from_latest": True, "run_id": "other"}),
        ("job_changed", {"resume_from_latest": True, "hyperparams": {"sleep": 0.0}}),
    ):
        job = write_job(**fields)
        assert run(job) == 2
        assert f"startup.{code}" in caplog.text
        assert names(job)[-1] == "completed"
    own = job.parent / "out" / "job.json"
    assert f"another job. Changed since final: hyperparams.sleep ({own} has the earlier job)" in caplog.text
    assert run(job, allow_changed=True) == 0


def test_weights_of_another_shape_are_reported_with_the_way_out(write_job, caplog):
    assert run(write_job(trainer=":Learns", max_steps=2)) == 0
    job = write_job(trainer=":Learns", max_steps=4, hyperparams={"width": 3}, resume_from_latest=True)
    assert run(job, allow_changed=True) == 1
    error = events(job)[-1]["error"]
    assert error.startswith("model-load:The weights of the checkpoint do not fit the model that was built: ")
    assert "size mismatch for model.weight: copying a param with shape torch.Size([1, 1]) from checkpoint, " in error
    assert "`genlight run --fresh`" in error
    assert "Traceback" not in caplog.text
    assert run(job, fresh=True) == 0


def test_fresh_moves_earlier_artifacts_aside(write_job):
    """Nothing is overwritten: the old checkpoints are in a separate folder."""
    job = write_job()
    assert run(job) == 0
    assert run(job, fresh=True) == 0
    (aside,) = (job.parent / "out").glob("before-*")
    assert (aside / "checkpoints" / "final.json").exists()
    old = list(read_events(aside / "metrics" / "events.jsonl"))
    assert [old[0]["event"], old[-1]["event"]] == ["started", "completed"]
    new = list(read_events(job.parent / "out" / "metrics" / "events.jsonl"))
    assert (new[0]["event"], new[0]["seq"]) == ("started", old[0]["seq"])
    assert "attempt" not in new[0]
    assert (job.parent / "out" / "checkpoints" / "final.json").exists()


def test_fresh_moves_nothing_that_no_run_wrote(write_job):
    """Files, folders and links that a user put next to checkpoints and samples stay, and do not disturb a run."""
    job = write_job(checkpoint_every=2, max_steps=4)
    checkpoints, samples = job.parent / "out" / "checkpoints", job.parent / "out" / "samples"
    for folder in (checkpoints / "exported", samples / "chosen"):
        folder.mkdir(parents=True)
        (folder / "model.gguf").write_text("mine")
    (checkpoints / "config.json").write_text("{}")
    os.symlink("step-00000002", checkpoints / "good")
    before = set(checkpoints.iterdir())
    assert run(job) == 0
    whole = verify(checkpoints / "step-00000002.json")

    assert run(job, fresh=True) == 0

    (aside,) = (job.parent / "out").glob("before-*")
    moved = verify(aside / "checkpoints" / "step-00000002.json")
    assert (moved.digest, moved.folder) == (whole.digest, "step-00000002")
    assert before <= set(checkpoints.iterdir())
    assert not any((aside / "checkpoints" / path.name).exists() for path in before)
    assert (samples / "chosen" / "model.gguf").read_text() == "mine"
    assert (checkpoints / "config.json").read_text() == "{}"


def test_files_of_a_run_are_closed_to_other_users_even_after_fresh(write_job):
    """The user's folder is open to all; files of earlier attempts stay private when they are moved aside."""
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


def test_a_file_of_a_checkpoints_name_that_is_none_is_named_before_training(write_job):
    job = write_job()
    taken = job.parent / "out" / "checkpoints" / "step-00000002.json"
    taken.parent.mkdir(parents=True)
    taken.write_text("{}")
    assert run(job, fresh=True) == 2
    failed = list(read_events(job.parent / "out" / "metrics" / "events.jsonl"))[-1]
    assert "startup.artifacts_in_use" in failed["error"]
    assert "step-00000002.json' is not a checkpoint" in failed["error"]
    assert taken.read_text() == "{}"


def test_fresh_moves_what_an_older_runtime_wrote_with_the_folder_of_its_trainer(
    write_job,
):
    job = write_job()
    checkpoints = job.parent / "out" / "checkpoints"
    (checkpoints / "final").mkdir(parents=True)
    (checkpoints / "final" / "lora.bin").write_text("old")
    (checkpoints / "final.json").write_text(json.dumps({"step": 3, "state": {"total": 100, "steps": 3}}))
    assert run(job, fresh=True) == 0
    (aside,) = (job.parent / "out").glob("before-*")
    assert (aside / "checkpoints" / "final" / "lora.bin").read_text() == "old"
    assert verify(checkpoints / "final.json").folder == "final"


@pytest.mark.parametrize("named", ["checkpoints/step-00000002.json", "checkpoints/step-00000002", "checkpoints", ""])
def test_a_named_checkpoint_is_resumed_from(write_job, named):
    """`resume_checkpoint_path` names the record to continue from, in any directory; a folder means its newest."""
    job = write_job(checkpoint_every=2)
    assert run(job, "max_steps=3") == 0
    (job.parent / "out").rename(job.parent / "moved")
    job = write_job(resume_checkpoint_path=f"moved/{named}")
    assert run(job) == 0
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").state["total"] == sum(range(20))


def test_changes_since_a_downloaded_checkpoint_are_reported_too(write_job, caplog):
    assert run(write_job(max_steps=2)) == 0
    ref = {"resume_checkpoint_ref": "moved/checkpoints/final.json"}
    job = write_job(max_steps=3, hyperparams={"sleep": 0.0}, inputs=ref)
    (job.parent / "out").rename(job.parent / "moved")
    assert run(job) == 0
    assert "The run continues from final, but its job has changed since: hyperparams.sleep" in caplog.text


def test_a_record_of_an_older_runtime_is_resumed_from(write_job):
    """It holds only the trainer's state, and its step."""
    job = write_job(resume_checkpoint_path="old.json")
    (job.parent / "old.json").write_text(json.dumps({"step": 3, "state": {"total": 100, "steps": 3}}))
    assert run(job) == 0
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").state == {
        "total": 100 + sum(range(8)),
        "steps": 5,
    }


def test_a_broken_newest_checkpoint_is_skipped_with_a_warning(write_job, caplog):
    """One flipped bit: the one before it is taken."""
    caplog.set_level("INFO", logger="genlight")
    job = write_job(checkpoint_every=2, max_steps=5, resume_from_latest=True)
    assert run(job) == 0
    checkpoints = job.parent / "out" / "checkpoints"
    (checkpoints / "final.json").unlink()
    victim = next(path for path in (checkpoints / "step-00000004").iterdir() if path.is_file() and path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert run(job) == 0
    assert "step-00000004 is broken" in caplog.text
    assert "continuing after step 2 of 5, from out/checkpoints/step-00000002.json" in caplog.messages
    (resumed,) = [event for event in events(job) if event.get("name") == "trainer/resumed_from_step"]
    assert resumed["step"] == 2


@pytest.mark.parametrize("name", ["step-00000004.json", "final.json"])
@pytest.mark.parametrize("content", [b"", b'{"step": 4, "sta', None], ids=["empty", "cut off", "folder"])
def test_a_run_gets_past_a_record_that_an_older_runtime_left_torn(write_job, caplog, name, content):
    """The name is free again before the first step, so the save of that step does not end the run on each start."""
    job = write_job(checkpoint_every=2, resume_from_latest=True)
    assert run(job, "max_steps=3") == 0
    torn = job.parent / "out" / "checkpoints" / name
    (torn.parent / "final.json").unlink()
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


def test_the_hint_after_a_failure_names_the_checkpoint_that_the_next_start_takes(write_job, caplog):
    job = write_job(checkpoint_every=2, resume_from_latest=True, hyperparams={"fails_at": 5})
    assert run(job, "max_steps=3") == 0
    (job.parent / "out" / "checkpoints" / "step-00000008.json").write_bytes(RECORD_MARKER)
    assert run(job) == 1
    assert "The next start continues from out/checkpoints/step-00000004.json." in caplog.text
    assert events(job)[-1]["resumable"] is True


def test_a_users_file_next_to_checkpoints_makes_no_failure_resumable(write_job):
    job = write_job(hyperparams={"fails_at": 1}, resume_from_latest=True)
    (job.parent / "out" / "checkpoints").mkdir(parents=True)
    (job.parent / "out" / "checkpoints" / "notes.json").write_text("{}")
    assert run(job) == 1
    assert events(job)[-1]["resumable"] is False


def test_a_loss_that_becomes_infinite_is_logged_once_and_reported(write_job, caplog):
    job = write_job(trainer=":Overflows", metric_every=2, max_steps=5)
    assert run(job) == 0
    (told,) = [message for message in caplog.messages if "not finite" in message]
    assert told.startswith("the metric 'loss' is not finite at step 4; all was finite at step 2.")
    (found,) = [event for event in events(job) if event.get("name") == "trainer/nonfinite_step"]
    assert (found["step"], found["value"]) == (4, 4.0)


def test_a_run_reports_final_weights_that_are_not_finite(write_job, capsys):
    job = write_job(trainer=":Learns", max_steps=4)
    assert run(job) == 0
    assert events(job)[-1]["finite"] is False
    last = capsys.readouterr().err
    assert "completed at step 4, but its final weights are not finite" in last


def test_a_run_that_is_to_stop_where_something_is_not_finite_ends_with_step_and_name(
    write_job,
):
    job = write_job(trainer=":Overflows", metric_every=2, checkpoint_every=2, max_steps=9, on_nonfinite="stop")
    assert run(job) == 3
    failed = events(job)[-1]
    assert failed["error"].startswith("train-step:the metric 'loss' is not finite at step 4; all was finite at step 2")
    assert sorted(path.name for path in (job.parent / "out" / "checkpoints").glob("*.json")) == ["step-00000002.json"]


def test_a_run_that_skips_what_is_not_finite_completes_with_finite_weights(write_job, caplog):
    job = write_job(trainer=":Learns", metric_every=2, max_steps=6, on_nonfinite="skip")
    assert run(job) == 0
    assert [(e["step"], e["value"]) for e in events(job) if e.get("name") == "recover/skip"] == [(3, 1.0)]
    assert "step 3: the loss is not finite since step 3. The update is skipped (attempt 1)" in caplog.messages
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").finite_weights is True


def test_a_run_that_recovers_completes(write_job, caplog):
    job = write_job(
        trainer=":Learns", metric_every=2, max_steps=6, callbacks={"Recover": {"ladder": ["skip"], "good_steps": 2}}
    )
    assert run(job) == 0
    assert [(e["step"], e["value"]) for e in events(job) if e.get("name") == "recover/attempt"] == [(3, 1.0), (5, 0.0)]
    assert read_record(job.parent / "out" / "checkpoints" / "final.json").finite_weights is True


def test_a_run_that_cannot_be_recovered_ends_once_and_reports_its_attempts(write_job):
    """The class is broken in its third step, whatever the batch is."""
    job = write_job(
        trainer=":Learns",
        checkpoint_every=2,
        max_steps=6,
        callbacks={"Recover": {"ladder": ["roll_back"], "max_attempts": 3}},
    )
    assert run(job) == 1
    assert [e["value"] for e in events(job) if e.get("name") == "trainer/rolled_back_to_step"] == [2.0] * 3
    (failed,) = (e for e in events(job) if e["event"] in ("completed", "failed"))
    assert failed["error"].startswith(
        "train-step:training could not be recovered: the loss is not finite since step 3, at step 3, after 3 attempts "
        "since step 3: roll_back at step 3, roll_back at step 3, roll_back at step 3. Mend the cause"
    )
    assert failed["resumable"]
    assert validate_events(job.parent / "out/metrics/events.jsonl") == []


def test_a_misspelled_optional_hook_is_named(write_job, caplog):
    assert run(write_job(trainer=":Misspells", max_steps=1)) == 0
    told = [message for message in caplog.messages if "is not a hook" in message]
    assert told == ["`rollouts` is not a hook and is never called; did you mean `rollout`?"]


def test_a_run_without_a_complete_checkpoint_is_refused(write_job, caplog):
    """Training from step 0 would prune checkpoints that somebody may still want to restore."""
    job = write_job(checkpoint_every=2, max_steps=5, resume_from_latest=True)
    checkpoints = job.parent / "out" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("step-00000004", "final"):
        (checkpoints / f"{name}.json").write_bytes(RECORD_MARKER)
    assert run(job) == 2
    assert "started" not in names(job)
    failed = events(job)[-1]
    assert "startup.artifacts_in_use: no checkpoint in" in failed["error"]
    assert "checkpoint final is broken" in caplog.text
    assert "checkpoint step-00000004 is broken" in caplog.text
    assert "`genlight run --fresh`" in caplog.text
    assert run(job, fresh=True) == 0
    assert "trainer/resumed_from_step" not in names(job)


@pytest.mark.parametrize(
    ("fields", "environ"), [({"cancel_file_path": "cancel"}, {}), ({}, {"TRAINER_CANCELLED": "yes"})]
)
def test_a_run_cancelled_before_it_started_trains_nothing(write_job, fields, environ):
    """Exit 75, and the reason as the error."""
    job = write_job(**fields)
    (job.parent / "cancel").touch()
    assert run(job, environ={**os.environ, **environ}) == 75
    failed = events(job)[-1]
    assert (failed["error"], failed["category"], failed["step"], failed["resumable"]) == (
        "canceled",
        "canceled",
        0,
        True,
    )


@pytest.mark.slow
def test_a_variable_that_is_set_while_the_run_trains_stops_it(write_job, monkeypatch):
    monkeypatch.delenv("TRAINER_CANCELLED", raising=False)
    monkeypatch.setitem(os.environ, "TRAINER_CANCELLED", "0")  # and is put back afterwards
    job = write_job(trainer=":Cancels", max_steps=5000)
    assert run(job) == 75
    assert (events(job)[-1]["error"], events(job)[-1]["resumable"]) == ("canceled", True)


def test_a_time_limit_counts_from_the_call_if_a_program_calls_the_runtime(write_job):
    job = write_job(max_steps=2)
    limit = f"max_runtime_seconds={max(1.0, process_age_s())}"  # this process is as old as that
    assert run(job, limit) == 0
    assert run(job, limit, f"artifacts_dir={job.parent}/other", began_with_process=True) == 75


def test_a_second_process_on_the_same_artifacts_is_refused(write_job):
    """The first one's log and lock stay as they are."""
    job = write_job(max_steps=100_000, hyperparams={"sleep": 0.01})
    first = start(job)
    try:
        wait_for_event(job, "started")
        assert run(job) == 2
    finally:
        first.terminate()
        assert first.wait(120) == 75
    assert names(job).count("failed") == 1


def test_a_run_completes_once_though_nobody_reads_its_progress(write_job):
    """This happens under ``| head``, or when the log collector of a container has died."""
    job = write_job(max_steps=20)
    reader, writer = os.pipe()
    os.close(reader)
    words = ("run", str(job), "--set", f"artifacts_dir={job.parent}/out")
    process = subprocess.Popen([sys.executable, "-m", "genlight.adapter.cli", *words], cwd=job.parent, stderr=writer)
    os.close(writer)
    assert process.wait(120) == 0
    assert [name for name in names(job) if name in ("started", "completed", "failed")] == ["started", "completed"]


def start(job):
    """The job in a process of the fork server, through the command line."""
    words = ("run", job, "--set", f"artifacts_dir={job.parent}/out")
    return Forked("genlight.adapter.cli", *words, environ=os.environ, folder=job.parent, log=job.parent / "log")


def wait_for_event(job, name):
    """Return once the log of `job` has an event of that name."""
    path = job.parent / "out" / "metrics" / "events.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if path.exists() and any(event["event"] == name for event in read_events(path)):
            return
        time.sleep(0.02)
    raise AssertionError(f"no event {name!r} came")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_stop_signal_is_answered_at_once_in_one_line(write_job, capfd, name):
    """A user who sees nothing presses again, and loses the steps since the last checkpoint."""
    hyperparams = {"signalled_in": "train_step", "signal": name}
    assert run(write_job(trainer=":Signalled", hyperparams=hyperparams)) == 75
    what_next = "the run saves a checkpoint after the current step, and stops"
    assert capfd.readouterr().err.count(f"{name}: {what_next}; a second signal after 3 s ends it now\n") == 1


def test_a_stop_signal_before_training_is_answered_too(write_job, capfd):
    """No checkpoint is promised by a start that has nothing to save yet."""
    job = write_job(trainer="signalled_at_import:Trainer")
    (job.parent / "signalled_at_import.py").write_text("import signal; signal.raise_signal(signal.SIGTERM)\n" + TRAINER)
    run(job)
    assert "SIGTERM: the run stops before it trains; a second signal after 3 s ends it now\n" in capfd.readouterr().err


def test_a_remaining_cancel_file_is_named(write_job, tmp_path, caplog):
    """Otherwise every later start would stop at once without saying why."""
    (tmp_path / "cancel").touch()
    assert run(write_job(cancel_file_path="cancel")) == 75
    assert (
        f"stopped: canceled. No step was trained. Remove the cancel file {tmp_path / 'cancel'} first. To continue:"
        in caplog.text
    )


def test_a_variable_that_would_stop_the_next_start_too_is_named(write_job, monkeypatch, caplog):
    monkeypatch.setenv("TRAINER_CANCELLED", "1")
    assert run(write_job()) == 75
    assert "stops before its first step, since it is canceled by `TRAINER_CANCELLED`" in caplog.text


@pytest.fixture
def serve():
    """Serves a folder over HTTP to whoever shows a token, and keeps what is posted in ``posted.jsonl``."""
    servers = []

    def start_server(folder, token):
        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def send_head(self) -> Any:
                if self.headers.get("Authorization") != f"Bearer {token}":
                    return self.send_error(401)
                return super().send_head()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                shown = self.headers.get("Authorization") == f"Bearer {token}"
                with (folder / "posted.jsonl").open("ab") as file:
                    file.write(body + b"\n")
                self.send_response(200 if shown else 401)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start_server
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_the_orchestrated_path_from_end_to_end(write_job, serve, tmp_path):
    """Token from the environment, Parquet and a checkpoint by URL, uploads acknowledged before the terminal event."""
    first = write_job(run_id="earlier", checkpoint_every=2)
    assert run(first) == 0
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "out").rename(store / "out")
    (tmp_path / "x.parquet").rename(store / "x.parquet")
    url = serve(store, "token-canary")
    job = write_job(
        dataset={"batch_size": 4},
        checkpoint_every=4,
        inputs={
            "dataset_parquet_urls": [f"{url}/x.parquet"],
            "resume_checkpoint_url": f"{url}/out/checkpoints/step-00000002.json",
        },
        uploads={f"{kind}_url": f"{url}/{kind}" for kind in ("metrics", "checkpoint", "sample", "terminal")},
    )
    environ = {
        **os.environ,
        "TRAINER_JOB_SPEC_PATH": str(job),
        "TRAINER_ORCHESTRATED": "1",
        "TRAINER_PRIVATE_HOSTS": "127.0.0.1",  # serves the data and the checkpoint of this test
        "TRAINER_CAPABILITY_TOKEN": "token-canary",
        "TRAINER_ARTIFACTS_DIR": str(tmp_path / "out"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = run_forked("run", environ=environ, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (resumed,) = [event for event in events(job) if event.get("name") == "trainer/resumed_from_step"]
    assert resumed["step"] == 2
    assert read_record(tmp_path / "out" / "checkpoints" / "final.json").state["total"] == sum(range(20))
    posted = [json.loads(line) for line in (store / "posted.jsonl").read_text().splitlines()]
    assert [body["kind"] for body in posted if body["kind"] != "metrics"] == ["checkpoint", "checkpoint", "terminal"]
    assert (posted[-1]["status"], posted[-1]["step"]) == ("completed", 5)
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"token-canary" not in path.read_bytes()


def test_an_unwritable_upload_queue_is_reported_at_the_start(write_job):
    """The message has its path and the way out."""
    job = write_job(uploads={"metrics_url": "http://127.0.0.1:9/metrics"})
    (job.parent / "out").mkdir()
    (job.parent / "out" / "uploads").write_text("a file")
    assert run(job) == 2
    (failed,) = events(job)
    assert failed["error"].startswith("startup:startup.invalid_artifact_paths: The upload queue ")
    assert "TRAINER_ARTIFACTS_DIR" in failed["error"]


def test_uploads_waiting_for_a_removed_url_are_reported(write_job, caplog):
    """A start without one would look as if all had arrived."""
    away = {"checkpoint_url": "http://127.0.0.1:9/checkpoint"}
    assert (
        run(
            write_job(
                uploads=away,
            ),
            environ={"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.1"},
        )
        == 1
    )
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
    functions = {(io, "open"): io.open, (os, "open"): os.open}

    def opens(real):
        def opened(given, *rest, **options):
            if given == path or (isinstance(given, Path) and str(given) == path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(given, *rest, **options)

        return opened

    for (module, function), real in functions.items():
        monkeypatch.setattr(module, function, opens(real))
    assert run(job, "max_steps=9") == code
    assert f"failure: {said.format(path)}" in caplog.text


def test_an_unreadable_queue_does_not_stop_a_run_without_uploads(write_job):
    job = write_job()
    (job.parent / "out").mkdir()
    (job.parent / "out" / "uploads").write_text("a file")
    assert run(job) == 0


@pytest.mark.parametrize("block", [..., {}])
def test_a_job_may_leave_the_trainers_arguments_to_their_defaults(write_job, block):
    """Most jobs have no ``lightning`` block."""
    job = write_job(lightning=block)
    assert run(job) == 0
    assert names(job)[-1] == "completed"


def test_a_changed_rate_is_reported_and_applied_like_batch_size_and_precision(write_job, caplog):
    assert run(write_job(trainer=":Learns", max_steps=2, hyperparams={"lr": 0.01})) == 0
    job = write_job(
        trainer=":Learns",
        max_steps=5,
        hyperparams={"lr": 0.5},
        resume_from_latest=True,
        dataset={"parquet_paths": ["x.parquet"], "batch_size": 2},
        lightning={"accelerator": "cpu", "precision": "bf16-mixed"},
    )
    assert run(job, 'resume.keep=["lrr"]', allow_changed=True) == 1
    assert "'lrr' cannot be kept on a resume" in caplog.text
    assert run(job, 'resume.keep=["lr"]', allow_changed=True) == 0
    assert "The run continues from final, but its job has changed since: hyperparams.lr (" in caplog.text
