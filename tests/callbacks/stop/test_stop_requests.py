"""A run stops on request, after a complete step, whatever the source."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import pytest

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks import Hook, StopRequests
from genlight.callbacks.hook.events import run_state_of
from genlight.callbacks.hook.hook import skippable
from genlight.callbacks.stop.signals import REASON_OF_SIGNAL, StopSignals
from genlight.callbacks.stop.sources import cancel_file_is_set, process_age_s
from support.messages import refusal
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="stop")


class Doing(Hook):
    """Does something at the end of one step, and notes how many steps ended."""

    critical = True

    def __init__(self, at_step, action):
        self.at_step, self.action, self.ended = at_step, action, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended += 1
        if self.ended == self.at_step:
            self.action()


class Agreeable(StopRequests):
    """Looks at files at every step instead of at most every 50 ms."""

    poll_s = 0.0


@pytest.fixture(params=["contract", "plain"])
def train(request, fit, fit_plain, counting_trainer):
    """Train ten steps with callbacks: under genlight's loop, and under Lightning's own."""
    if request.param == "plain":
        return lambda callbacks: fit_plain(callbacks, steps=10)
    return lambda callbacks: fit(counting_trainer(), callbacks, steps=10)[0]


# the cancel file


@pytest.mark.parametrize(
    ("content", "is_set"),
    [
        *((word, True) for word in ("", "1", "true", "t", "yes", "y", "cancel", "canceled")),
        *((word, True) for word in (" TRUE\n", "Yes", "\n\t ", "CANCELED\r\n")),
        *(
            (text, True)
            for text in ("please stop", "cancelled?", "2", "no thanks", "null", "x" * 1000, "no" + " " * 1000)
        ),
        *((word, False) for word in ("0", "false", "f", "no", "n", "off", " FALSE\n", "No\r\n")),
    ],
)
def test_a_cancel_file_counts_unless_it_holds_a_word_that_means_no(tmp_path, content, is_set):
    (tmp_path / "cancel").write_text(content)

    assert cancel_file_is_set(tmp_path / "cancel") is is_set


def test_a_missing_cancel_file_does_not_count_and_an_unreadable_one_does(tmp_path):
    assert not cancel_file_is_set(tmp_path / "absent")
    assert cancel_file_is_set(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert cancel_file_is_set(tmp_path / "bytes")


def test_a_cancel_file_that_appears_stops_the_run_after_the_step(train, tmp_path):
    seen = Doing(3, (tmp_path / "cancel").touch)

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, Agreeable(tmp_path / "cancel")])

    assert caught.value.reason == "canceled"
    assert seen.ended == 3


# before the first step


@pytest.mark.parametrize("how", ["flag", "file", "signal"])
def test_a_stop_request_before_the_first_step_trains_none(train, tmp_path, how):
    signals = StopSignals()
    signals.reason = "preempted" if how == "signal" else None
    if how == "file":
        (tmp_path / "cancel").touch()
    seen = Doing(0, None)

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, StopRequests(tmp_path / "cancel", canceled=how == "flag", signals=signals)])

    assert caught.value.reason == ("preempted" if how == "signal" else "canceled")
    assert seen.ended == 0


# the limit


def test_the_limit_counts_from_the_start_of_the_process(train):
    seen = Doing(0, None)

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, StopRequests(max_runtime_s=1e-6)])

    assert caught.value.reason == "timeout"
    assert seen.ended == 0


def test_a_limit_that_passes_while_training_stops_it_after_the_step(train):
    stop = Agreeable(max_runtime_s=1e6)
    seen = Doing(4, lambda: setattr(stop.sources.deadline, "at", time.monotonic()))

    with refusal(TrainingCanceled):
        train([seen, stop])

    assert seen.ended == 4


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_no_limit_is_no_limit(train, limit):
    assert train([StopRequests(max_runtime_s=limit)]).global_step == 10


def test_the_age_of_the_process_grows_with_time_and_began_before_this_module():
    before = process_age_s()
    time.sleep(0.02)

    assert process_age_s() - before >= 0.01
    assert before > 0


# callables


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("preempted", "preempted"), ("timeout", "timeout"), ("lease lost", "canceled")],
)
def test_a_check_that_another_added_stops_the_run_with_its_reason(train, answer, reason):
    answers = []
    stop = Agreeable()
    stop.add_check(lambda: answers[0] if answers else None)
    seen = Doing(2, lambda: answers.append(answer))

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, stop])

    assert caught.value.reason == reason
    assert seen.ended == 2


def test_the_first_reason_stays():
    answers = ["timeout", "canceled"]
    stop = Agreeable()
    stop.add_check(lambda: answers.pop(0))

    assert [stop.requested(), stop.requested()] == ["timeout", "timeout"]


def test_files_are_not_checked_in_every_step():
    looks = []
    stop = StopRequests()
    stop.add_check(lambda: looks.append(1))

    for _ in range(1000):
        stop.requested()

    assert len(looks) < 1000


class Counted(StopRequests):
    """Counts the steps after which the loop called it."""

    looks = 0

    @skippable
    def on_train_batch_end(self, *event):
        self.looks += 1
        super().on_train_batch_end(*event)


def test_quick_steps_are_checked_at_every_eighth(fit, counting_trainer):
    stop = Counted()
    stop.poll_s = 3600.0

    fit(counting_trainer(), [stop], steps=80)

    assert stop.looks == len([1, 2, 4, 8, *range(16, 81, 8)])


def test_each_longer_step_is_checked(fit, counting_trainer):
    stop = Counted()
    stop.poll_s = 1e-9

    fit(counting_trainer(), [stop], steps=20)

    assert stop.looks == 20


def test_a_stop_that_a_trainer_noticed_in_a_quick_step_ends_the_run_after_it(fit, counting_trainer, tmp_path):
    steps = []

    class Asking(counting_trainer):
        def train_step(self, batch, state, ctx):
            steps.append(batch)
            if len(steps) == 42:
                (tmp_path / "cancel").touch()
                while not ctx.is_canceled():
                    time.sleep(0.001)
            return super().train_step(batch, state, ctx)

    stop = Counted(tmp_path / "cancel")
    with pytest.raises(TrainingCanceled):
        fit(Asking(), [stop], steps=80)

    assert len(steps) == 42
    assert stop.looks < 42


def test_a_trainer_learns_of_a_stop_within_a_step(fit, counting_trainer, tmp_path):
    heard = []

    class Long(counting_trainer):
        def train_step(self, batch, state, ctx):
            heard.append(ctx.is_canceled())
            if batch == 1:
                (tmp_path / "cancel").touch()
                heard.append(ctx.is_canceled())
            return super().train_step(batch, state, ctx)

    with pytest.raises(TrainingCanceled):
        fit(Long(), [Agreeable(tmp_path / "cancel")])

    assert heard == [False, False, True]


def test_the_pause_that_a_step_asked_for_ends_with_a_stop_request(fit, counting_trainer, tmp_path):
    from genlight.adapter.contract.types import StepControlHints, StepResult

    class Slow(counting_trainer):
        def train_step(self, batch, state, ctx):
            super().train_step(batch, state, ctx)
            return StepResult(control=StepControlHints(backoff_seconds=3600.0 if batch == 0 else None))

    class During(Hook):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            threading.Timer(0.05, (tmp_path / "cancel").touch).start()

    with pytest.raises(TrainingCanceled):
        fit(Slow(), [During(), StopRequests(tmp_path / "cancel")])


def test_the_reason_is_in_the_run_state_for_other_hooks(train):
    reasons = []

    class Reader(Hook):
        reads = ("stop_reason",)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            reasons.append(run_state_of(trainer).stop_reason)

    stop = Agreeable()
    stop.add_check(lambda: "preempted" if len(reasons) == 1 else None)
    with pytest.raises(TrainingCanceled):
        train([Reader(), stop])

    assert reasons == [None, "preempted"]


# the time that a launcher leaves


@pytest.mark.parametrize(("environ", "seconds"), [({}, None), ({"TORCHELASTIC_RUN_ID": "r"}, "30")])
def test_torchruns_grace_period_is_logged_at_the_start(train, monkeypatch, caplog, environ, seconds):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", "genlight"):
        train([StopRequests()])
    said = [record.getMessage() for record in caplog.records if "--shutdown-timeout" in record.getMessage()]
    assert [f"every rank {seconds} s" in text for text in said] == ([] if seconds is None else [True])


def test_a_stop_longer_than_torchruns_grace_period_is_warned_of_once(train, monkeypatch, caplog):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    stop = StopRequests()

    def save():
        for _ in range(2):
            stop.on_checkpoint_timed(seen.trainer, None, 31.0)

    seen = Doing(3, save)
    seen.on_train_start = lambda trainer, pl_module: setattr(seen, "trainer", trainer)
    train([seen, stop])
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.startswith("A step and a checkpoint take 31 s") for text in warned if "torchrun" in text] == [True]


# signals


@pytest.mark.parametrize(("number", "reason"), REASON_OF_SIGNAL.items())
def test_a_signal_stops_the_run_after_the_step(train, number, reason):
    seen = Doing(2, lambda: os.kill(os.getpid(), number))
    before = {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, StopRequests()])

    assert caught.value.reason == reason
    assert seen.ended == 2
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == before


def test_a_signal_stops_the_run_after_the_step_however_quick_steps_are(fit, counting_trainer):
    seen = Doing(42, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stop = Counted()
    stop.poll_s = 3600.0

    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [seen, stop], steps=80)

    assert seen.ended == 42
    assert stop.looks < 42


@pytest.mark.parametrize("hook", ["configure", "load_state_dict"])
def test_a_signal_before_training_begins_stops_it_before_the_first_step(fit, counting_trainer, tmp_path, hook):
    """Also while a checkpoint is restored, when Lightning would handle it."""
    from genlight.adapter import ContractModule

    class Told(counting_trainer):
        def configure(self, ctx):
            return self.told("configure") or super().configure(ctx)

        def load_state_dict(self, state, payload, ctx):
            self.told("load_state_dict")

        def told(self, here):
            if here == hook:
                os.kill(os.getpid(), signal.SIGTERM)

    module, seen = ContractModule(Told()), Doing(0, None)
    module.resume_from(step=2, payload={}, checkpoint_dir=tmp_path)
    before = {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}
    with refusal(TrainingCanceled):
        fit(None, [seen, StopRequests()], module=module)

    assert seen.ended == 0
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == before


@pytest.mark.parametrize("how", ["check", "signal"])
def test_a_fit_after_one_that_was_stopped_trains_until_it_is_stopped_itself(train, how):
    stop, asked = Agreeable(), []

    def ask():
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            asked.append("preempted")

    stop.add_check(lambda: asked.pop() if asked else None)
    for _ in range(2):
        seen = Doing(2, ask)
        with pytest.raises(TrainingCanceled) as caught:
            train([seen, stop])
        assert (caught.value.reason, seen.ended) == ("preempted", 2)
    assert train([stop]).global_step == 10


def test_a_signal_of_one_fit_is_no_signal_to_the_next():
    """However late the thread that reads what arrived comes to it."""
    signals = StopSignals()
    for _ in range(20):
        with signals.installed():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.reason == "preempted"
        signals.forget()
        with signals.installed():
            time.sleep(0.005)
            assert signals.reason is None


def test_a_module_that_was_stopped_with_another_trainer_is_not_stopped_again(fit, counting_trainer):
    told = []

    class Asking(counting_trainer):
        def train_step(self, batch, state, ctx):
            told.append(ctx.is_canceled())
            return super().train_step(batch, state, ctx)

    module = ContractModule(Asking())
    with pytest.raises(TrainingCanceled):
        fit(None, [StopRequests(canceled=True)], module=module)
    fit(None, [StopRequests()], module=module, steps=3)
    assert told == [False] * 3


def test_a_validation_after_a_fit_still_ends_on_a_signal(fit_plain):
    import lightning.pytorch as pl

    handlers = []

    class Validated(pl.LightningModule):
        def validation_step(self, batch, batch_idx):
            handlers.append(signal.getsignal(signal.SIGTERM))

    stop = StopRequests()
    fit_plain([stop]).validate(Validated(), [0], verbose=False)
    assert len(handlers) == 1
    assert handlers[0] != stop.sources.signals._handle


def test_two_of_these_callbacks_stop_a_run_and_leave_handlers_as_before(fit_plain):
    before = {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}
    seen = Doing(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with refusal(TrainingCanceled):
        fit_plain([StopRequests(), seen, StopRequests()], steps=10)
    assert seen.ended == 2
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == before


def wakeup_file():
    """The interpreter's wakeup file for signals; -1 if there is none."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


@pytest.mark.parametrize("how", ["ends", "is stopped"])
def test_the_wakeup_file_of_the_interpreter_is_free_again_when_a_fit(train, how):
    """Else a second signal would not end the next fit of the process while that waits in C."""
    seen, during = Doing(2, (lambda: os.kill(os.getpid(), signal.SIGTERM)) if how == "is stopped" else int), []
    before = wakeup_file()
    outcome = pytest.raises(TrainingCanceled) if how == "is stopped" else contextlib.nullcontext()

    with outcome:
        train([seen, Doing(1, lambda: during.append(wakeup_file())), StopRequests()])

    assert during[0] != before
    assert wakeup_file() == before


def test_the_wakeup_file_stays_with_whoever_handles_the_signals_of_a_fit(train):
    with StopSignals().installed() as signals:
        before = wakeup_file()
        train([StopRequests(signals=signals)])
        assert wakeup_file() == before != -1


def test_handlers_are_as_before_after_a_fit_that_fails_before_it_trains(fit, counting_trainer):
    class Fails(counting_trainer):
        def configure(self, ctx):
            raise ValueError("no model")

    before = {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}
    with refusal(ValueError):
        fit(Fails(), [StopRequests()])
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == before


def test_the_reasons_of_signals_are_those_of_the_contract():
    assert REASON_OF_SIGNAL == {
        signal.SIGTERM: "preempted",
        signal.SIGUSR1: "preempted",
        signal.SIGINT: "canceled",
    }


def test_handlers_are_as_before_after_the_block_and_another_thread_leaves_them_alone():
    before = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}
    inside = []

    with StopSignals().installed() as signals:
        thread = threading.Thread(target=lambda: inside.append(StopSignals().install()))
        thread.start()
        thread.join()
        assert all(signal.getsignal(number) == signals._handle for number in REASON_OF_SIGNAL)

    assert inside == [None]
    assert {number: signal.getsignal(number) for number in REASON_OF_SIGNAL} == before


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step_although_only_one_got_the_request(tmp_path):
    # At the end rank 1 fails, and rank 0 fails with it instead of waiting forever.
    run_ranks("stop_ranks.py", tmp_path, code=3)
    assert (tmp_path / "failed1").read_text() == "rank 1 broke"
    ended = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert ended[0] == ended[1]
    outcomes = ended[0].split(", ")
    # Said in step 3, and agreed on in a round that begins there or after one of the next steps.
    assert re.fullmatch("preempted after [45] contract", outcomes[0])
    assert re.fullmatch("preempted after [45] plain", outcomes[1])
    assert outcomes[2] == "canceled after 0 before"
