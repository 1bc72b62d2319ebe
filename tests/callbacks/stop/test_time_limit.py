"""Whether a stop is a preemption or the time limit is read from the job's end time."""

import os
import signal
import time

import pytest

from genlight.callbacks.stop.signals import StopSignals
from genlight.callbacks.stop.time_limit import announces_time_limit, job_end_time_s, stop_grace_s


@pytest.mark.parametrize(
    ("left_s", "grace_s", "is_limit"),
    [
        (3600, None, False),
        (3600, 300, False),
        (400, 300, False),
        (350, 300, True),  # a minute early
        (300, 300, True),
        (100, None, False),
        (90, None, True),
        (-1, None, True),
    ],
)
def test_a_signal_near_the_end_is_the_time_limit(left_s, grace_s, is_limit):
    assert announces_time_limit(1000.0 + left_s, grace_s, now_s=1000.0) is is_limit


def test_without_an_end_every_signal_is_a_preemption():
    assert announces_time_limit(None, 300.0) is False


def test_both_times_are_variables():
    assert job_end_time_s({"SLURM_JOB_END_TIME": "1700000000"}) == 1700000000.0
    assert stop_grace_s({"TRAINER_STOP_GRACE_SECONDS": "120"}) == 120.0
    assert job_end_time_s({}) is stop_grace_s({"TRAINER_STOP_GRACE_SECONDS": "soon"}) is None


@pytest.mark.parametrize(("left_s", "reason"), [(10_000, "preempted"), (60, "timeout"), (None, "preempted")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_reason_of_a_stop_says_which_it_was(monkeypatch, left_s, reason, number):
    if left_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    with StopSignals().installed() as signals:
        os.kill(os.getpid(), number)
        while signals.reason is None:
            time.sleep(0.01)
    assert signals.reason == reason


def test_an_interrupt_cancels_however_near_the_end_is(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    with StopSignals().installed() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        while signals.reason is None:
            time.sleep(0.01)
    assert signals.reason == "canceled"
