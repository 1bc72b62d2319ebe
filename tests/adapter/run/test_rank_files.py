"""The files that ranks leave for each other in the folder of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from genlight.adapter.plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from genlight.adapter.run.rank_files import EXIT_FILE, RankFiles
from genlight.adapter.run.ranks import first_cause

FAILURE = Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED)
STOP = Failure("preempted", "preempted", resumable=True, exit_code=EXIT_STOPPED)
OWN = Failure("train-step", "train-step:RuntimeError: Connection reset by peer", resumable=True, exit_code=EXIT_FAILED)

RANK = """
import sys, time
from pathlib import Path
from genlight.adapter.run.rank_files import RankFiles
with RankFiles(Path(sys.argv[1])).present(3):
    print("there", flush=True)
    sys.stdin.read()
"""


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


def test_records_of_a_killed_attempt_do_not_count(ranks, tmp_path):
    ranks.record(1, FAILURE)
    assert first(RankFiles(tmp_path, began_s=time.time() + 1)) is None


def test_a_record_from_shortly_before_rank_zero_counts_within_one_launch(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ranks.record(1, FAILURE)
    assert first(RankFiles(tmp_path, began_s=time.time() + 1)) is not None


def test_records_of_another_launch_do_not_count(ranks, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    ranks.record(1, FAILURE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert first(ranks) is None


@pytest.mark.parametrize("is_earlier", [True, False])
def test_records_under_a_later_torchrun_agent_count_but_not_those_of_an_earlier_attempt(
    ranks, tmp_path, monkeypatch, is_earlier
):
    """An agent counts its own restarts, so ranks of one attempt may have different counts."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    ranks.record(1, FAILURE)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    later = RankFiles(tmp_path, began_s=time.time() + (1 if is_earlier else -1))
    assert (first(later) is None) == is_earlier


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


@pytest.fixture
def rank(tmp_path):
    """Another process as rank 3 on the node n10."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "SLURMD_NODENAME": "n10"}, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.communicate()


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
    ranks.record(3, Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED))
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    assert first_cause(OWN, 9e12, ranks, None).text == "train-step:ValueError: bad row (rank 3)"


def test_records_are_complete_files(ranks):
    ranks.record(1, FAILURE)
    (path,) = ranks.folder.iterdir()
    assert json.loads(path.read_bytes())["rank"] == 1


def test_only_rank_files_are_removed(ranks):
    ranks.record(1, FAILURE)
    (ranks.folder / "of a user").write_text("")
    ranks.clear()
    assert [path.name for path in ranks.folder.iterdir()] == ["of a user"]
