"""``genlight run --shadow N``: the first steps of a run beside a plain loop."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genlight.adapter.cli import main
from genlight.reporters import read_events
from genlight.reporters.events.validation import validate_events
from support import compared


@pytest.fixture
def run(tmp_path):
    """Run a class of `support.compared`; gives exit code, events and the run's folder."""

    def of(name, *arguments, run_id="beside", **keys):
        job = {
            "run_id": run_id,
            "trainer": f"support.compared:{name}",
            "max_steps": 4,
            "metric_every": 1,
            "mock_batches": compared.batches(),
            "lightning": {"accelerator": "cpu"},
            **keys,
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        code = main(["run", str(tmp_path / "job.json"), *arguments])
        folder = tmp_path / "runs" / run_id
        log = folder / "metrics" / "events.jsonl"
        return code, list(read_events(log)) if log.exists() else [], folder

    return of


def shadow_metrics(events):
    return [(event["step"], event["value"]) for event in events if event.get("name") == "trainer/shadow_difference"]


def test_a_run_that_trains_like_a_plain_loop_goes_on_and_says_so_once(run, caplog):
    caplog.set_level(logging.INFO)
    code, events, folder = run("Plain", "--shadow", "2")

    assert code == 0
    assert events[-1]["event"] == "completed"
    assert shadow_metrics(events) == [(2, 0.0)]
    assert validate_events(folder / "metrics" / "events.jsonl") == []
    assert [r.message for r in caplog.records if "--shadow" in r.message] == [
        "--shadow: the first 2 steps are those of a plain loop, to 0.0e+00"
    ]


def test_the_check_changes_nothing_of_the_run(run):
    import torch

    def losses(run_id, *arguments):
        torch.manual_seed(3)
        code, events, _ = run("Plain", *arguments, run_id=run_id)
        assert code == 0
        return [event["value"] for event in events if event.get("name") == "train/loss"]

    assert losses("checked", "--shadow", "9") == losses("alone")


def test_a_difference_ends_the_run_before_that_step_is_saved(run):
    code, events, folder = run("Remembers", "--shadow", "2", checkpoint_every=1)

    assert code == 1
    assert events[-1]["event"] == "failed"
    assert events[-1]["category"] == "train-step"
    assert "--shadow: after step 1 metric train/loss differs from that of a plain loop" in events[-1]["error"]
    assert list(folder.glob("checkpoints/*.json")) == []
    assert shadow_metrics(events) == []


def test_a_class_that_cannot_be_copied_is_refused_at_start(run):
    code, events, _ = run("LOCKED", "--shadow", "2")

    assert code == 2
    assert [event["event"] for event in events] == ["failed"]
    assert "cannot be copied for a second loop" in events[-1]["error"]


def test_a_class_that_collects_its_own_batches_is_checked_too(run):
    code, events, _ = run("Collects", "--shadow", "4", mock_batches=None)

    assert code == 0
    assert shadow_metrics(events) == [(4, 0.0)]


def test_a_resumed_run_is_not_checked_again_and_not_from_within_the_steps_to_check(run, caplog):
    caplog.set_level(logging.INFO)
    assert run("Plain", "--shadow", "1", max_steps=2)[0] == 0

    code, events, _ = run("Plain", "--shadow", "3", resume_from_latest=True)
    assert code == 2
    assert "goes on after step 2" in events[-1]["error"]

    assert run("Plain", "--shadow", "1", resume_from_latest=True)[0] == 0
    assert "--shadow: the first 1 steps are done, so there is nothing to check" in caplog.messages


def test_a_record_of_step_zero_is_no_beginning_either(run, tmp_path):
    """An older runtime's record may not tell its step, and holds trained weights all the same."""
    (tmp_path / "old.json").write_text(json.dumps({"state": {}}))

    code, events, _ = run("Plain", "--shadow", "2", resume_checkpoint_path="old.json")

    assert code == 2
    assert "the run goes on after step 0" in events[-1]["error"]


@pytest.mark.slow
def test_a_run_on_two_ranks_is_compared_with_the_rows_of_both(tmp_path):
    """A sum over rows, which the average over ranks halves, ends it; rank 0 reports."""
    job = {
        "run_id": "ranks",
        "trainer": "support.compared:SumsWithoutDropout",
        "max_steps": 2,
        "mock_batches": compared.batches(),
        "lightning": {"accelerator": "cpu", "devices": 2, "strategy": "ddp"},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "genlight", "run", "job.json", "--shadow", "2"]
    environ = {**os.environ, "PYTHONPATH": str(Path(compared.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 1, done.stderr
    last = list(read_events(tmp_path / "runs" / "ranks" / "metrics" / "events.jsonl"))[-1]
    assert last["event"] == "failed"
    assert "the loss is a sum over rows" in last["error"]


def test_dropout_on_several_ranks_is_refused_before_any_rank_is_started(run):
    code, events, _ = run("Plain", "--shadow", "2", lightning={"accelerator": "cpu", "devices": 2, "strategy": "ddp"})

    assert code == 2
    assert "Dropout layers draw other numbers on each rank" in events[-1]["error"]
