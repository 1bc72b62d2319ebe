"""What ranks tell rank zero of their failures, and which of it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from genlight.adapter.contract.exceptions import RankFailed, TrainingCanceled
from genlight.adapter.plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from genlight.adapter.run.ranks.failure_notes import RankFailures, watch_ranks
from genlight.adapter.run.ranks.rank_zero_watch import RankZero

FAILURE = Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED)
STOP = Failure("preempted", "preempted", resumable=True, exit_code=EXIT_STOPPED)


@pytest.fixture
def ranks(tmp_path):
    return RankFailures(tmp_path, expects_ranks=True)


def test_a_failure_is_told_with_its_rank_and_a_stop_as_it_is(ranks):
    ranks.note(2, FAILURE)
    assert ranks.found().text == "train-step:ValueError: bad row (rank 2)"
    ranks.clear()
    ranks.note(2, STOP)
    assert ranks.found() == STOP


def test_of_several_failures_the_first_counts(ranks):
    ranks.note(1, FAILURE)
    ranks.note(2, STOP)
    assert ranks.found().text.endswith("(rank 1)")


def test_only_a_stop_of_another_rank_is_a_reason_to_stop(ranks):
    assert ranks.stop_reason() is None
    ranks.note(1, FAILURE)
    assert ranks.stop_reason() is None
    ranks.note(1, STOP)
    assert ranks.stop_reason() == "preempted"


def test_what_a_killed_attempt_noted_does_not_count(ranks):
    ranks.note(1, FAILURE)
    ranks.forget_earlier(time.time() + 1)
    assert ranks.found() is None


def test_of_a_launch_whose_ranks_begin_apart_a_note_from_just_before_rank_zero_counts(ranks, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ranks.note(1, FAILURE)
    ranks.forget_earlier(time.time() + 1)
    assert ranks.found() is not None


def test_what_another_launch_noted_does_not_count(ranks, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    ranks.note(1, FAILURE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert ranks.found() is None


@pytest.mark.parametrize("is_earlier", [True, False])
def test_a_rank_whose_agent_of_torchrun_came_later_is_heard_but_no_attempt_before_this_one(
    ranks, monkeypatch, is_earlier
):
    """An agent counts its own restarts, so that ranks of one attempt may have been told different numbers."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    ranks.note(1, FAILURE)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ranks.forget_earlier(time.time() + (1 if is_earlier else -1))
    assert (ranks.found() is None) == is_earlier


@pytest.mark.parametrize(("failure", "kind"), [(FAILURE, RankFailed), (STOP, TrainingCanceled)])
def test_the_watch_ends_the_run_with_what_was_noted(ranks, failure, kind):
    ended = []
    stop = watch_ranks(ranks, lambda *told: ended.append(told))
    ranks.note(1, failure)
    while not ended:
        time.sleep(0.01)
    stop()
    assert isinstance(ended[0][0], kind)
    assert ended[0][1].category == failure.category


@pytest.mark.parametrize(("there", "looks"), [([True, False], 2), ([False, False, True, True, False], 5)])
def test_a_rank_ends_when_rank_zero_that_was_there_is_gone(tmp_path, monkeypatch, there, looks):
    monkeypatch.setattr("genlight.adapter.run.ranks.rank_zero_watch.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("genlight.adapter.run.ranks.rank_zero_watch.PATIENCE_S", 0.01)
    there = iter(there)
    seen, ended = [], []
    monkeypatch.setattr(
        "genlight.adapter.run.ranks.rank_zero_watch._is_locked", lambda _: seen.append(next(there)) or seen[-1]
    )
    RankZero(tmp_path).watch(lambda: ended.append(len(seen)))
    while not ended:
        time.sleep(0.01)
    assert ended == [looks]


def test_a_rank_that_ends_by_itself_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("genlight.adapter.run.ranks.rank_zero_watch.LOOK_EVERY_S", 0.01)
    rank_zero = RankZero(tmp_path)
    rank_zero.watch(lambda: pytest.fail("ended"))
    rank_zero.end_watch()
    time.sleep(0.05)


def test_a_rank_zero_of_another_user_is_there():
    """A rank may have given up its rights; else the first process of the machine is another user's."""
    looks = "import os; from genlight.adapter.run.ranks.rank_zero_watch import rank_zero_is_gone as gone; "
    looks += "os.getuid() == 0 and os.setuid(65534); print(gone())"
    announced = {"GENLIGHT_RANK_ZERO_PID": str(os.getpid() if os.getuid() == 0 else 1)}
    done = subprocess.run(
        [sys.executable, "-c", looks], env={**os.environ, **announced}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_notes_are_whole_files(ranks):
    ranks.note(1, FAILURE)
    (path,) = ranks.folder.iterdir()
    assert json.loads(path.read_bytes())["rank"] == 1
