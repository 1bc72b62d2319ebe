"""A rank that is paused for a while, as by a debugger or on a suspended machine: the others wait for it."""

import contextlib
import os
import signal
import time

import pytest

from support.forked import is_alive

pytestmark = pytest.mark.slow

PAUSE_S = 3.0
"""Longer than the interval of any check of the run."""


@contextlib.contextmanager
def paused(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(PAUSE_S)
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_other_rank_is_paused_stops_both_at_one_step(job, two_ranks, rank):
    job.write_for_two_ranks({"at": "train_step:10", "rank": rank, "holds": 60.0})
    ranks = two_ranks()
    job.wait_until(lambda: job.reached(rank), ranks[rank])
    with paused(ranks[rank]):
        ranks[1 - rank].send_signal(signal.SIGTERM)
        job.go()

    assert [process.wait(120) for process in ranks] == [75, 75], job.output()
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("preempted", True)
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists()


@pytest.fixture
def launched_ranks(job):
    """Start rank 0, let it start rank 1, and pause rank 1; return the process of rank 0 and the id of rank 1."""

    def started():
        job.write_for_two_ranks({"at": "train_step:10", "rank": 1, "holds": 60.0})
        process = job.fork_run()
        job.wait_until(lambda: job.reached(1), process)
        other = int((job.folder / "reached-1").read_text())
        os.kill(other, signal.SIGSTOP)
        job.go()
        return process, other

    return started


def test_a_rank_that_stays_paused_when_a_stop_comes_is_named_and_ended(job, launched_ranks):
    process, other = launched_ranks()
    process.send_signal(signal.SIGTERM)

    assert process.wait(120) == 1, job.output()
    failed = job.terminal_event()
    assert failed["error"] == f"train-step:rank 1 (process {other}) is paused and did not answer the stop within 15 s"
    assert failed["resumable"]
    job.wait_until(lambda: not is_alive(other))


def test_a_second_signal_leaves_no_paused_rank_behind(job, launched_ranks):
    process, other = launched_ranks()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)  # if both come at once, the kernel may deliver the second one first
    process.send_signal(signal.SIGINT)

    assert process.wait(120) == 128 + signal.SIGINT
    job.wait_until(lambda: not is_alive(other))
