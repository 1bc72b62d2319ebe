"""The watch over other ranks: its checks, and how it ends the attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from genlight.adapter.contract.exceptions import RankFailedError, TrainingCanceled
from genlight.adapter.plumbing.failures import EXIT_FAILED, EXIT_STOPPED, Failure
from genlight.adapter.plumbing.file_lock import FileLock
from genlight.adapter.run import ranks
from genlight.adapter.run.folder import LOCK_NAME, lock_directory
from genlight.adapter.run.rank_files import RankFiles
from genlight.adapter.run.ranks import (
    RankWatch,
    RankZero,
    after_patience,
    end_of_rank,
    failed_ranks,
    first_cause,
    paused_ranks,
    stopped_before_meeting,
    warn_of_absent_ranks,
)
from genlight.callbacks.stop.sources import StopSources

pytestmark = pytest.mark.promise(name="stop")

FAILURE = Failure("train-step", "train-step:ValueError: bad row", resumable=False, exit_code=EXIT_FAILED)
STOP = Failure("preempted", "preempted", resumable=True, exit_code=EXIT_STOPPED)
OWN = Failure("train-step", "train-step:RuntimeError: Connection closed", resumable=True, exit_code=EXIT_FAILED)


@pytest.fixture
def notes(tmp_path):
    return RankFiles(tmp_path)


def processes(*codes):
    """Those of ranks 1 and on, as far as the checks look at them."""
    failed = next((end_of_rank(rank, code) for rank, code in enumerate(codes, start=1) if code), "")
    return SimpleNamespace(failed=lambda: failed)


def first_found(*checks):
    """The error with which a watch ends the attempt."""
    found, ended = [], threading.Event()
    watching = RankWatch(lambda error: (found.append(error), ended.set()))
    with watching.looking(*checks):
        ended.wait()
    watching.close()
    return found[0]


@pytest.mark.parametrize(("failure", "kind"), [(FAILURE, RankFailedError), (STOP, TrainingCanceled)])
def test_a_record_of_a_rank_counts_before_its_exit_code(notes, failure, kind):
    notes.record(1, failure)
    found = first_found(failed_ranks(notes, processes(1)))
    assert type(found).__mro__[1 if kind is RankFailedError else 0] is kind
    assert failure.text.removeprefix("train-step:") in str(found)


@pytest.mark.parametrize(("code", "said"), [(-9, "was killed by signal 9"), (3, "ended with exit code 3")])
def test_a_process_that_ended_without_a_record_is_named(notes, code, said):
    assert f"rank 2 {said}" in str(first_found(failed_ranks(notes, processes(0, code))))


def test_an_earlier_failure_elsewhere_is_the_cause_and_a_later_one_is_not(notes, monkeypatch):
    monkeypatch.setattr(ranks, "HEARD_WITHIN_S", 0.2)
    notes.record(1, FAILURE)
    earlier = first_cause(OWN, time.time(), notes, processes())
    assert (earlier.text, earlier.resumable) == ("train-step:ValueError: bad row (rank 1)", True)
    assert first_cause(OWN, time.time() - 60, notes, processes()) == OWN
    assert "rank 1 was killed" in first_cause(OWN, time.time(), RankFiles(notes.folder), processes(-9)).text


def test_an_error_counts_after_its_patience_while_other_checks_run():
    patient = after_patience(60.0, lambda: RankFailedError("rank 1"))
    assert patient() is None
    assert str(after_patience(0.0, lambda: RankFailedError("rank 1"))()) == "rank 1"
    assert str(first_found(patient, lambda: RankFailedError("rank 2"))) == "rank 2"


def test_the_patience_starts_over_after_an_error_has_passed(monkeypatch):
    now, is_there = 0.0, True
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now)
    patient = after_patience(10.0, lambda: RankFailedError("rank 1") if is_there else None)
    assert patient() is None
    now, is_there = 6.0, False
    assert patient() is None
    now, is_there = 12.0, True
    assert patient() is None
    now = 21.0
    assert patient() is None
    now = 22.0
    assert patient() is not None


def test_checks_run_during_their_block():
    looked = threading.Semaphore(0)
    watching = RankWatch(lambda error: pytest.fail(str(error)))
    with watching.looking(looked.release):
        assert looked.acquire(timeout=60)
    watching.close()
    assert watching._checks == []


def test_a_rank_that_stays_paused_is_named_after_a_stop_request(monkeypatch):
    monkeypatch.setattr(ranks, "PAUSE_PATIENCE_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stop = StopSources()
    check = paused_ranks(lambda: {1: process.pid}, stop)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        assert check() is None
        stop.canceled = True
        assert f"rank 1 (process {process.pid}) is paused" in str(first_found(check))
    finally:
        process.kill()
        process.communicate()


def test_a_stop_ends_a_rank_that_waits_for_absent_ranks(monkeypatch):
    monkeypatch.setattr(ranks, "MEETING_PATIENCE_S", 0.1)
    stop = StopSources()
    check = stopped_before_meeting(stop)
    assert check() is None
    stop.canceled = True
    assert isinstance(first_found(check), TrainingCanceled)
    monkeypatch.setattr(ranks, "have_met", lambda: True)
    assert check() is None


@pytest.mark.parametrize(("there", "looks"), [([True, False], 2), ([False, False, True, True, False], 5)])
def test_a_rank_ends_when_rank_zero_that_was_there_is_gone(tmp_path, monkeypatch, there, looks):
    monkeypatch.setattr(ranks, "RANK_ZERO_PATIENCE_S", 0.0)
    left = list(there)
    monkeypatch.setattr(ranks, "is_held", lambda _: left.pop(0))
    monkeypatch.setattr(ranks, "_stamp", lambda _: object())  # its file changes each time
    found = first_found(RankZero(tmp_path, RankFiles(tmp_path)).check)
    assert "rank 0 has ended" in str(found)
    assert len(there) - len(left) == looks


@pytest.mark.parametrize(("waited_s", "has_met", "says"), [(9.0, False, 0), (11.0, False, 1), (11.0, True, 0)])
@pytest.mark.parametrize("under_srun", [False, True])
def test_a_rank_that_waits_for_others_warns_once(monkeypatch, caplog, waited_s, has_met, says, under_srun):
    monkeypatch.setattr(ranks, "have_met", lambda: has_met)
    monkeypatch.setattr(ranks, "in_srun_task", lambda: under_srun)
    check = warn_of_absent_ranks(0, 2)
    now = time.monotonic()
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now + waited_s))
    assert [check() for _ in range(3)] == [None] * 3
    assert caplog.text.count("rank 0 has waited 10 s for the other ranks: all 2") == says
    assert ("srun --pty" in caplog.text) is (under_srun and says == 1)


def test_ranks_that_wait_for_rank_zero_do_not_keep_it_from_its_lock(tmp_path, notes):
    """However many look, and however often: each takes the lock once, until rank zero has written into its file."""
    path = tmp_path / LOCK_NAME
    FileLock(path).release()  # an earlier attempt's
    followers = [RankZero(tmp_path, notes) for _ in range(256)]
    assert {follower.is_gone() for follower in followers} == {None}
    has_ended = threading.Event()

    def look(these):
        while not has_ended.is_set():
            for follower in these:
                follower.is_gone()

    threads = [threading.Thread(target=look, args=(followers[begin::8],)) for begin in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            FileLock(path).release()
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()

    lock = lock_directory(tmp_path, "r")
    assert {follower.is_gone() for follower in followers} == {False}
    lock.release()
    assert {follower.is_gone() for follower in followers} == {True}
    lock_directory(tmp_path, "r").release()  # the next attempt's
    assert {follower.is_gone() for follower in followers} == {True}


def test_a_rank_that_rank_zero_started_ends_with_it(tmp_path, monkeypatch):
    """Though it was gone before the first look."""
    monkeypatch.setattr(ranks, "RANK_ZERO_PATIENCE_S", 0.0)
    monkeypatch.setenv("GENLIGHT_RANK_ZERO_PID", str(os.getppid() + 1))
    assert RankZero(tmp_path, RankFiles(tmp_path)).is_gone()
    monkeypatch.setenv("GENLIGHT_RANK_ZERO_PID", str(os.getppid()))
    assert RankZero(tmp_path, RankFiles(tmp_path)).is_gone() is False


def wait(notes, *, gone, within_s=60.0, **more):
    zero = RankZero(notes.folder, notes)
    zero.is_gone = gone if callable(gone) else lambda: gone
    return zero.wait_for_end(within_s=within_s, **more)


def test_a_rank_waits_for_a_visible_rank_zero_even_after_its_exit_code(notes):
    notes.leave_exit_code(75)
    looks = iter([False, False, True])
    assert wait(notes, gone=lambda: next(looks), within_s=0.0) == 75
    assert next(looks, None) is None


def test_a_failed_rank_waits_only_for_the_exit_code_and_not_forever(notes):
    assert wait(notes, gone=False, within_s=0.0, is_bounded=True) is None
    notes.leave_exit_code(1)
    assert wait(notes, gone=False, is_bounded=True) == 1


def test_a_rank_does_not_wait_for_a_rank_zero_that_is_gone_or_invisible(notes):
    assert wait(notes, gone=True) is None
    assert wait(notes, gone=None, within_s=0.0) is None
    notes.leave_exit_code(0)
    assert wait(notes, gone=None) == 0


def test_a_rank_of_another_launcher_that_is_killed_ends_the_run_though_training_sees_nothing(notes, rank, monkeypatch):
    """Without a launcher that watches, as over pods, a collective may wait for a lost rank for half an hour."""
    monkeypatch.setattr(ranks, "have_met", lambda: True)
    check = failed_ranks(notes, processes())
    assert check() is None
    rank.kill()
    rank.communicate()
    assert "rank 3 on n10 ended without a report" in str(first_found(check))


@pytest.fixture
def seen_rank(notes, rank, monkeypatch):
    """A process of this machine whose lock is seen once, and a check that asks for locks no more."""
    monkeypatch.setattr(ranks, "have_met", lambda: True)
    monkeypatch.setattr(ranks, "SCAN_LOCKS_EVERY_S", float("inf"))
    check = failed_ranks(notes, processes())
    assert check() is None
    if not notes.processes:
        pytest.skip("this system hides which process holds a lock")
    return rank, check


def test_a_killed_process_of_this_machine_is_named_as_soon_as_it_has_ended(notes, seen_rank):
    rank, check = seen_rank
    rank.kill()
    notes.await_exit(60.0)
    assert "rank 3 on n10 ended without a report" in str(check())
    notes.await_exit(0.0)
    assert not notes.has_exited, "an exit is seen once"


@pytest.mark.parametrize("leaves", ["a record", "nothing, as planned"])
def test_a_process_of_this_machine_that_ends_by_itself_is_no_loss(notes, seen_rank, leaves):
    rank, check = seen_rank
    if leaves == "a record":
        notes.record(3, FAILURE)
        rank.kill()
    else:
        rank.communicate("")
    notes.await_exit(60.0)
    found = check()
    assert "bad row (rank 3)" in str(found) if leaves == "a record" else found is None
