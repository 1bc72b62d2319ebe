"""Training that makes no progress is noticed, and where every thread was is on disk."""

from __future__ import annotations

import os
import threading
import time

import pytest

from genlight.adapter.exceptions import TrainingHung
from genlight.callbacks.watch_hangs import WatchHangs, _stacks_of_others

WAIT_S = 30.0


def hanging(base, *, until, at=2):
    """A trainer that does not finish its step `at` until there is a file."""

    class Hanging(base):
        def train_step(self, batch, state, ctx):
            result = super().train_step(batch, state, ctx)
            end = time.monotonic() + WAIT_S
            while state["steps"] == at and not until() and time.monotonic() < end:
                time.sleep(0.005)
            return result

    return Hanging()


def test_a_hang_leaves_the_stacks_of_all_threads_and_training_goes_on(fit, counting_trainer, tmp_path, caplog):
    path = tmp_path / "hangs" / "rank-0-1.txt"
    trainer, _ = fit(
        hanging(counting_trainer, until=lambda: str(path) in caplog.text),  # which comes after the file
        [WatchHangs(tmp_path / "hangs", floor_s=0.05, factor=1e-6)],
    )

    text = path.read_text()
    assert "in train_step" in text
    assert text.count("hread 0x") >= 2
    assert trainer.global_step == 4
    assert str(path) in caplog.text


def test_each_hang_is_reported_once(fit, counting_trainer, tmp_path):
    second = tmp_path / "rank-0-2.txt"

    class Twice(counting_trainer):
        def train_step(self, batch, state, ctx):
            wanted = {1: tmp_path / "rank-0-1.txt", 3: second}.get(state["steps"])
            end = time.monotonic() + WAIT_S
            while wanted is not None and not wanted.exists() and time.monotonic() < end:
                time.sleep(0.005)
            if wanted is not None:
                time.sleep(0.15)  # as long again as three hangs
            return super().train_step(batch, state, ctx)

    fit(Twice(), [WatchHangs(tmp_path, floor_s=0.05, factor=1e-6)])

    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["rank-0-1.txt", "rank-0-2.txt"]


def test_steps_that_end_in_time_leave_nothing(fit, counting_trainer, tmp_path):
    fit(counting_trainer(), [WatchHangs(tmp_path / "hangs", floor_s=60.0)])

    assert not (tmp_path / "hangs").exists()


def test_what_counts_as_a_hang_is_learned_from_the_steps(tmp_path):
    """Steps of some length raise the limit above the floor, so that a longer one than that is none."""
    watch, stopped, batches = WatchHangs(tmp_path, floor_s=1.0, factor=1000.0), threading.Event(), 0
    thread = threading.Thread(target=watch._watch, args=(lambda: batches, tmp_path, 0, 1, stopped))
    thread.start()
    for _ in range(5):
        time.sleep(0.06)
        batches += 1
    time.sleep(1.3)
    stopped.set()
    thread.join()

    assert not list(tmp_path.iterdir())


def test_no_thread_is_left_after_training_whether_it_ended_well_or_not(fit, counting_trainer, tmp_path):
    class Breaking(counting_trainer):
        def train_step(self, batch, state, ctx):
            raise ZeroDivisionError

    fit(counting_trainer(), [WatchHangs(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        fit(Breaking(), [WatchHangs(tmp_path)])

    watchers = [thread for thread in threading.enumerate() if thread.name == "genlight-hangs"]
    for thread in watchers:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in watchers)


def test_the_message_names_rank_duration_and_file(tmp_path):
    assert str(TrainingHung(3, 61.5, tmp_path / "x")) == (
        f"no step was finished on rank 3 for 62 s; stacks of all threads: {tmp_path / 'x'}"
    )


def test_the_newest_stacks_of_each_other_rank_are_named(tmp_path):
    """Not those of an earlier attempt."""
    for name, age_s in (("rank-0-1", 0), ("rank-1-1", 900), ("rank-1-2", 60), ("rank-1-3", 30), ("rank-2-1", 30)):
        path = tmp_path / f"{name}.txt"
        path.touch()
        os.utime(path, (time.time() - age_s, time.time() - age_s))

    found = _stacks_of_others(tmp_path, 0, 3, time.time() - 600)

    assert [path.name for path in found] == ["rank-1-3.txt", "rank-2-1.txt"]


@pytest.mark.parametrize("name", ["factor", "floor_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_numbers_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"Invalid `{name}`. Expected a number > 0"):
        WatchHangs(**{name: value})
