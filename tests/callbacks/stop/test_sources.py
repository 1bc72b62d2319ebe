"""When a run must stop so that its last checkpoint is durable before its time is over."""

import time
from types import SimpleNamespace

import pytest

from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks import Checkpoint, Hook, StopRequests
from genlight.callbacks.hook.events import fire
from genlight.callbacks.stop.launcher import job_end_time_s
from genlight.callbacks.stop.sources import Deadline, StopSources, process_age_s
from support.messages import refusal


def deadline_in(seconds, **facts):
    made = Deadline()
    made.at = 1000.0 + seconds
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("facts", "over_s"), [({"save_s": 100.0}, 10.0), ({"saves": True, "save_s": 4.0}, 4.0)])
def test_time_is_left_for_a_save_half_as_long_again_as_the_longest_if_a_stop_saves(facts, over_s):
    deadline = deadline_in(10, **facts)

    assert not Deadline().is_over(1e12), "without a limit"
    assert not deadline.is_over(1000.0 + over_s - 0.1)
    assert deadline.is_over(1000.0 + over_s)


def test_time_is_left_for_two_more_steps_too():
    """If steps take ten seconds, a check comes every ten, and ranks agree on a stop in the step after the check."""
    deadline = deadline_in(100, saves=True, save_s=20.0)
    answers = []
    for now in range(1000, 1070, 10):
        deadline.note_check(now)
        answers.append(deadline.is_over(now))

    assert answers == [False] * 5 + [True] * 2


def test_a_slow_first_step_is_forgotten_slowly():
    deadline = deadline_in(1e6, save_s=0.0)
    deadline.note_check(0.0)  # the time before training is no slow step
    deadline.begin_training(saves=True)
    deadline.note_check(1000.0)
    assert deadline.margin_s == 0.0
    deadline.note_check(1100.0)
    assert deadline.margin_s == 200.0
    for at in range(1, 1001):
        deadline.note_check(1100.0 + at * 0.1)
    assert deadline.margin_s == pytest.approx(0.2)


def test_before_the_first_save_a_share_of_the_time_is_left():
    deadline = Deadline(process_age_s() + 100.0)
    deadline.saves = True

    assert deadline.margin_s == pytest.approx(5.0, abs=0.1)
    long = Deadline(1e6)
    long.saves = True
    assert long.margin_s == 30.0


def test_the_end_of_a_slurm_job_is_a_limit_and_the_earlier_one_counts(monkeypatch):
    now = time.monotonic()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))

    assert Deadline().at == pytest.approx(now + 1000, abs=5)
    assert Deadline(process_age_s() + 10).at == pytest.approx(now + 10, abs=5)
    assert Deadline(process_age_s() + 9999).at == pytest.approx(now + 1000, abs=5)


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "NONE", "²"])
def test_an_end_time_that_says_nothing_is_none(monkeypatch, text):
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    assert job_end_time_s() is None


# shared


def test_one_object_holds_the_sources_of_all_that_share_it(tmp_path):
    """Two callbacks have different limits and files: the earlier limit and either file count for both."""
    first, second = tmp_path / "first", tmp_path / "second"
    shared = StopSources(max_runtime_s=process_age_s() + 9000)
    early = StopRequests(first, max_runtime_s=process_age_s() + 10)
    late = StopRequests(second, max_runtime_s=process_age_s() + 5000)
    early.join_run(SimpleNamespace(stop=shared))
    late.join_run(SimpleNamespace(stop=shared))

    assert shared.deadline.at == pytest.approx(time.monotonic() + 10, abs=5)
    assert (early.requested(), late.requested(), shared.reason()) == (None, None, None)
    second.touch()
    assert (shared.requested, shared.reason()) == (None, "canceled")
    with refusal(TrainingCanceled):
        shared.raise_if_stopped()
    shared.signals.reason = "preempted"
    assert (shared.requested, shared.reason()) == ("preempted", "preempted"), "before files and clocks"


# in a run


class Look(StopRequests):
    """Looks at the clock in every step."""

    poll_s = 0.0


@pytest.mark.parametrize("saves", [False, True])
def test_the_longest_save_counts_whoever_saved(fit, counting_trainer, tmp_path, saves):
    class Saver(Hook):
        def on_train_end(self, trainer, pl_module):
            measured.append(stop.sources.deadline.save_s or 0.0)
            for seconds in (3000.0, 7000.0, 5000.0):
                fire(trainer, "on_checkpoint_timed", seconds)

    stop, measured = StopRequests(), []
    savers = [Checkpoint(tmp_path, every_n_steps=2, asynchronous=False)] if saves else []
    fit(counting_trainer(), [stop, *savers, Saver()], enable_checkpointing=saves)

    assert (measured[0] > 0, stop.sources.deadline.saves) == (saves, saves)
    assert stop.sources.deadline.save_s == 7000.0


def test_a_run_stops_before_its_limit_with_a_durable_checkpoint(fit, counting_trainer, tmp_path):
    """The limit is far, but a save has taken longer than what is left."""
    stop = Look(max_runtime_s=process_age_s() + 3600)

    class Slow(Hook):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                stop.sources.deadline.save_s = 3000.0

    with pytest.raises(TrainingCanceled) as caught:
        fit(counting_trainer(), [Slow(), stop, Checkpoint(tmp_path)], steps=10, enable_checkpointing=True)

    assert caught.value.reason == "timeout"
    assert [path.name for path in tmp_path.glob("*.json")] == ["step-00000003.json"]
