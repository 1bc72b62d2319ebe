"""Whether a stop is a preemption or the time limit is read from the job's end time."""

import os
import signal
import time

import pytest

from genlight.callbacks.stop.signals import StopSignals, announces_time_limit, job_end_time_s


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
def test_a_signal_near_the_end_is_the_time_limit(monkeypatch, left_s, grace_s, is_limit):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(10_000 + left_s))
    if grace_s is not None:
        monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", str(grace_s))
    assert announces_time_limit(10_000.0) is is_limit


def test_without_an_end_every_signal_is_a_preemption(monkeypatch):
    monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", "300")
    assert announces_time_limit(10_000.0) is False


def test_a_grace_that_is_no_number_of_seconds_is_none(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", "soon")
    assert job_end_time_s() == 1700000000.0
    assert not announces_time_limit(1700000000.0 - 100)
    assert announces_time_limit(1700000000.0 - 90)


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
