"""Training without progress is noticed, and the stacks of all threads are written to disk."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import TrainingHungError
from genlight.adapter.contract.types import StepControlHints, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Checkpoint, Evaluate, WriteSamples
from genlight.callbacks.watch_hangs import WatchHangs, _stacks_of_others
from support.trainers import quiet_trainer

pytestmark = pytest.mark.promise(name="stop")

WAIT_S = 120.0


def hanging(base, *, until, at=2):
    """Return a trainer that does not finish step `at` before `until` returns True."""

    class Hanging(base):
        def train_step(self, batch, state, ctx):
            result = super().train_step(batch, state, ctx)
            end = time.monotonic() + WAIT_S
            while state["steps"] == at and not until() and time.monotonic() < end:
                time.sleep(0.005)
            return result

    return Hanging()


def test_a_hang_leaves_the_stacks_of_all_threads_and_training_continues(fit, counting_trainer, tmp_path, caplog):
    def reported():
        """Return the file of this hang; a busy machine may have an earlier one too."""
        texts = {path: path.read_text() for path in (tmp_path / "hangs").glob("rank-0-*.txt")}
        return [path for path, text in texts.items() if "in train_step" in text and str(path) in caplog.text]

    trainer, _ = fit(
        hanging(counting_trainer, until=reported), [WatchHangs(tmp_path / "hangs", floor_s=0.05, factor=1e-6)]
    )

    (path,) = reported()
    assert path.read_text().count("hread 0x") >= 2
    assert trainer.global_step == 4


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Let a watch run for some seconds of a clock that advances when the watch waits; return its files."""

    class Clock:
        def __init__(self, seconds):
            self.now, self.end = 0.0, seconds

        def wait(self, seconds):
            self.now += seconds
            return self.now >= self.end

    def watch(watch, batches, *, seconds, rank=0, ranks=1):
        clock = Clock(seconds)
        passing = SimpleNamespace(monotonic=lambda: clock.now, time=time.time)
        monkeypatch.setattr("genlight.callbacks.watch_hangs.time", passing)
        watch._watch(lambda: batches(clock.now), tmp_path, rank, ranks, clock)
        return sorted(path.name for path in tmp_path.glob("*.txt"))

    return watch


def test_each_hang_is_reported_once(tmp_path, watched):
    """Steps take a second, except two that take ten times the limit."""
    ends = [1, 2, 102, 103, 104, 204, 205]

    def batches(now):
        return sum(end <= now for end in ends)

    assert watched(WatchHangs(tmp_path, floor_s=10.0, factor=1e-6), batches, seconds=210) == [
        "rank-0-1.txt",
        "rank-0-2.txt",
    ]


@pytest.mark.parametrize(("factor", "files"), [(1.5, ["rank-0-1.txt"]), (100.0, [])])
def test_the_limit_is_learned_from_the_steps(tmp_path, watched, factor, files):
    """Long steps raise the limit above the floor."""

    def batches(now):
        return min(5, now // 0.9)

    assert watched(WatchHangs(tmp_path, floor_s=1.0, factor=factor), batches, seconds=30) == files


# work that training waits for


def works_from(watch, began, ended, what="evaluation"):
    """Return batches for `watched`: steps of a second, with work between two of them."""

    def batches(now):
        if began <= now < ended and watch._work is None:
            watch.on_hold_up(None, None, what)
        elif now >= ended and watch._work is not None:
            watch.on_hold_up(None, None, None)
        return int(now if now < began else began if now < ended else began + now - ended)

    return batches


@pytest.mark.parametrize(
    ("work_limit_s", "longest", "files"),
    [(300.0, {}, 0), (50.0, {}, 1), (50.0, {"evaluation": 100.0}, 0), (50.0, {"samples": 100.0}, 1)],
)
def test_work_between_steps_has_its_own_limit(tmp_path, watched, work_limit_s, longest, files):
    watch = WatchHangs(tmp_path, floor_s=10.0, factor=3.0, work_limit_s=work_limit_s)
    watch._longest = longest
    assert len(watched(watch, works_from(watch, 20, 220), seconds=300)) == files
    assert watch._longest["evaluation"] == pytest.approx(200.0, abs=5)


@pytest.mark.parametrize(("age_s", "files"), [(0, 0), (600, 1)])
def test_a_rank_waits_while_another_one_works(tmp_path, watched, age_s, files):
    (tmp_path / "rank-0.works").touch()
    os.utime(tmp_path / "rank-0.works", (time.time() - age_s, time.time() - age_s))
    watch = WatchHangs(tmp_path, floor_s=10.0, factor=1e-6)
    assert len(watched(watch, lambda now: min(now, 20), seconds=300, rank=1, ranks=2)) == files


def test_a_working_rank_tells_the_others_until_its_limit(tmp_path, watched):
    watch, seen = WatchHangs(tmp_path, floor_s=10.0, factor=1e-6, work_limit_s=100.0), []
    busy = works_from(watch, 20, 300)

    def batches(now):
        path = tmp_path / "rank-0.works"
        seen.append((now, path.exists()))
        path.unlink(missing_ok=True)
        return busy(now)

    assert len(watched(watch, batches, seconds=350, ranks=2)) == 1
    touched = [now for now, exists in seen if exists]
    assert (min(touched), max(touched)) == (pytest.approx(22, abs=3), pytest.approx(120, abs=3))
    assert not (tmp_path / "rank-0.works").exists()


@pytest.mark.parametrize("work", ["evaluate", "generate_sample", "save_checkpoint", "rollout", "backoff"])
def test_work_that_genlight_times_is_no_hang(counting_trainer, tmp_path, work):
    def take_long(*_, **__):
        time.sleep(0.6)
        return {"score": 1.0} if work == "evaluate" else {} if work != "rollout" else [1, 2]

    class Working(counting_trainer):
        def configure(self, ctx):
            return {**super().configure(ctx), **({"generate_sample": take_long} if work == "generate_sample" else {})}

        def train_step(self, batch, state, ctx):
            result = super().train_step(batch, state, ctx)
            if work != "backoff":
                return result
            return StepResult(metrics=result.metrics, control=StepControlHints(backoff_seconds=0.6))

    if work not in ("generate_sample", "backoff"):
        setattr(Working, work, staticmethod(take_long) if work == "rollout" else lambda self, *a, **k: take_long())
    callbacks = {
        "evaluate": [Evaluate(every_n_steps=1)],
        "generate_sample": [WriteSamples(tmp_path / "samples", every_n_steps=1)],
        "save_checkpoint": [Checkpoint(tmp_path / "checkpoints", every_n_steps=1)],
    }
    hangs = tmp_path / "hangs"
    watch = WatchHangs(hangs, floor_s=0.2, factor=1e-6)
    trainer = quiet_trainer(*callbacks.get(work, []), watch, max_steps=1, default_root_dir=tmp_path)
    trainer.fit(ContractModule(Working()), None if work == "rollout" else BatchStream([0]))
    place = "_pause" if work == "backoff" else "take_long"
    assert [path for path in hangs.glob("*.txt") if f"in {place}" in path.read_text()] == []


def test_no_thread_remains_after_training(fit, counting_trainer, tmp_path):
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
    assert list(tmp_path.iterdir()) == [], "steps that end in time leave nothing"


@pytest.mark.parametrize(("silent", "names"), [((1,), "rank 1"), ((0, 2), "ranks 0, 2")])
def test_the_message_names_ranks_that_left_no_stacks(tmp_path, silent, names):
    text = str(TrainingHungError(3, 61.5, tmp_path / "x", silent=silent))
    assert text.endswith(f"{tmp_path / 'x'}; no stacks from {names}, which may be lost, paused, or not hanging")


def test_the_newest_stacks_of_each_other_rank_are_named(tmp_path):
    """Stacks of an earlier attempt are ignored."""
    for name, age_s in (("rank-0-1", 0), ("rank-1-1", 900), ("rank-1-2", 60), ("rank-1-3", 30), ("rank-2-1", 30)):
        path = tmp_path / f"{name}.txt"
        path.touch()
        os.utime(path, (time.time() - age_s, time.time() - age_s))

    found = _stacks_of_others(tmp_path, 0, 3, time.time() - 600)

    assert {rank: path.name for rank, path in found.items()} == {1: "rank-1-3.txt", 2: "rank-2-1.txt"}
