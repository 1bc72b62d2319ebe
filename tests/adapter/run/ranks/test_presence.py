"""A rank of another launcher that dies without a word is named."""

import os
import signal
import subprocess
import sys
import time

import pytest

from genlight.adapter.plumbing.failures import EXIT_FAILED, Failure
from genlight.adapter.run.ranks.failure_notes import RankFailures, watch_ranks
from genlight.adapter.run.ranks.presence import Presence, present

OWN = Failure("train-step", "train-step:RuntimeError: Connection reset by peer", resumable=True, exit_code=EXIT_FAILED)

RANK = """
import sys, time
from pathlib import Path
from genlight.adapter.run.ranks.presence import present
with present(Path(sys.argv[1]), 3):
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def rank(tmp_path):
    """Another process, which is rank 3 on the node n10."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "SLURMD_NODENAME": "n10"}, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.communicate()


def test_a_rank_that_is_killed_is_the_cause_with_its_host(tmp_path, rank):
    ranks = RankFailures(tmp_path, expects_ranks=True)
    ranks.presence.look()
    assert ranks.presence.lost() == {}
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()

    cause = ranks.first_cause(OWN, 0.0)
    assert cause.text.startswith("train-step:RankFailed: rank 3 on n10 ended without a word")
    assert cause.resumable


def test_a_rank_that_leaves_or_was_never_seen_is_not(tmp_path, rank):
    seen, unseen = Presence(tmp_path), Presence(tmp_path)
    seen.look()
    rank.communicate("")
    assert rank.returncode == 0
    assert seen.lost() == unseen.lost() == {}


def test_what_a_killed_attempt_left_is_not_taken_for_a_rank(tmp_path, rank):
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    presence = Presence(tmp_path)
    presence.look()
    assert presence.lost() == {}
    with present(tmp_path, 3):
        presence.look()
        assert presence.lost() == {}
    assert presence.lost() == {}


def test_a_rank_that_noted_its_failure_is_reported_by_its_note(tmp_path, rank):
    ranks = RankFailures(tmp_path, expects_ranks=True)
    ranks.presence.look()
    ranks.note(3, Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED))
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    assert ranks.first_cause(OWN, 9e12).text == "train-step:ValueError: bad row (rank 3)"


def test_rank_zero_ends_the_run_when_another_rank_is_lost_though_its_own_training_sees_nothing(tmp_path, rank):
    """Where no launcher watches, as none does over pods: a collective may wait for a lost rank for half an hour."""
    ranks = RankFailures(tmp_path, expects_ranks=True)
    ranks.presence.look()
    ended = []
    stop = watch_ranks(ranks, lambda *told: ended.append(told))
    os.kill(rank.pid, signal.SIGKILL)
    while not ended:
        time.sleep(0.01)
    stop()
    assert "rank 3 on n10 ended without a word" in ended[0][1].text
