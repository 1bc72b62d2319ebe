"""The files that ranks leave for each other in the folder of a run."""

from __future__ import annotations

import os
import signal
import time

import pytest

from genlight.adapter.plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from genlight.adapter.run.rank_files import EXIT_FILE, RankFiles
from genlight.adapter.run.ranks import first_cause

FAILURE = Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED)
STOP = Failure("preempted", "preempted", resumable=True, exit_code=EXIT_STOPPED)
OWN = Failure("train-step", "train-step:RuntimeError: Connection reset by peer", resumable=True, exit_code=EXIT_FAILED)


def first(ranks):
    """The oldest failure that counts."""
    return next((note.failure for note in ranks.failures()), None)


@pytest.fixture
def ranks(tmp_path):
    return RankFiles(tmp_path)


def test_a_failure_is_reported_with_its_rank_and_a_stop_without(ranks):
    ranks.record(2, FAILURE)
    assert first(ranks).text == "train-step:ValueError: bad row (rank 2)"
    ranks.clear()
    ranks.record(2, STOP)
    assert first(ranks) == STOP


def test_of_several_failures_the_first_counts(ranks):
    ranks.record(1, FAILURE)
    ranks.record(2, STOP)
    assert first(ranks).text.endswith("(rank 1)")


def test_only_a_stop_and_no_failure_of_another_rank_is_a_reason_to_stop(ranks):
    assert ranks.stop_reason() is None
    ranks.record(1, FAILURE)
    assert ranks.stop_reason() is None
    ranks.record(1, STOP)
    assert ranks.stop_reason() == "preempted"


ELASTIC = {"TORCHELASTIC_RUN_ID": "elastic", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("recorded", "read", "began_in_s", "counts"),
    [
        ({}, {}, 1, False),
        ({"SLURM_JOB_ID": "7"}, {}, 1, True),
        ({"TORCHELASTIC_RUN_ID": "first"}, {"TORCHELASTIC_RUN_ID": "second"}, 0, False),
        (ELASTIC, {"TORCHELASTIC_RESTART_COUNT": "1"}, -1, True),
        (ELASTIC, {"TORCHELASTIC_RESTART_COUNT": "1"}, 1, False),
    ],
    ids=["killed attempt", "started later in one launch", "other launch", "later agent", "earlier attempt"],
)
def test_only_records_of_this_attempt_count(ranks, tmp_path, monkeypatch, recorded, read, began_in_s, counts):
    """An agent of torchrun counts its own restarts, so ranks of one attempt may have different counts."""
    for name, value in recorded.items():
        monkeypatch.setenv(name, value)
    ranks.record(1, FAILURE)
    for name, value in read.items():
        monkeypatch.setenv(name, value)
    assert (first(RankFiles(tmp_path, began_s=time.time() + began_in_s)) is not None) is counts


def test_ranks_that_started_before_the_end_of_rank_zero_read_its_exit_code(ranks, tmp_path):
    assert ranks.exit_code() is None
    ranks.leave_exit_code(75)
    assert ranks.exit_code() == 75
    assert RankFiles(tmp_path, began_s=time.time() + 1).exit_code() is None


def test_files_of_another_launch_or_program_are_not_an_exit_code(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("GENLIGHT_LAUNCH_ID", "first")
    ranks.leave_exit_code(75)
    monkeypatch.setenv("GENLIGHT_LAUNCH_ID", "second")
    assert ranks.exit_code() is None
    for text in ("", "{", '{"exit_code":256,"launch":"second","at_s":9e9}', "[" * 100_000):
        (tmp_path / EXIT_FILE).write_text(text)
        (tmp_path / EXIT_FILE).chmod(0o600)
        assert ranks.exit_code() is None


def test_a_rank_that_is_killed_is_the_cause_with_its_host(tmp_path, rank):
    ranks = RankFiles(tmp_path)
    ranks.scan_locks()
    assert ranks.lost() == {}
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()

    cause = first_cause(OWN, 0.0, ranks, None)
    assert cause.text.startswith("train-step:RankFailedError: rank 3 on n10 ended without a report")
    assert cause.resumable


def test_a_rank_that_leaves_or_was_never_seen_is_not_the_cause(tmp_path, rank):
    seen, unseen = RankFiles(tmp_path), RankFiles(tmp_path)
    seen.scan_locks()
    rank.communicate("")
    assert rank.returncode == 0
    assert seen.lost() == unseen.lost() == {}


def test_locks_of_a_killed_attempt_are_not_taken_for_ranks(tmp_path, rank):
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    presence = RankFiles(tmp_path)
    presence.scan_locks()
    assert presence.lost() == {}
    with presence.present(3):
        presence.scan_locks()
        assert presence.lost() == {}
    assert presence.lost() == {}


def test_a_rank_with_a_record_is_reported_by_its_record(tmp_path, rank):
    ranks = RankFiles(tmp_path)
    ranks.scan_locks()
    ranks.record(3, FAILURE)
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    assert ranks.lost() == {}
    assert first_cause(OWN, 9e12, ranks, None).text == "train-step:ValueError: bad row (rank 3)"


def test_only_rank_files_are_removed(ranks):
    ranks.record(1, FAILURE)
    (ranks.folder / "of a user").write_text("")
    ranks.clear()
    assert [path.name for path in ranks.folder.iterdir()] == ["of a user"]
