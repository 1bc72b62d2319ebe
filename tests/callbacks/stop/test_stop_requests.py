"""A run stops on request, after a complete step, whatever the source."""

import contextlib
import os
import signal
import threading
import time

import lightning.pytorch as pl
import pytest

from genlight.adapter import ContractModule
from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.adapter.contract.types import StepControlHints, StepResult
from genlight.callbacks import Hook, StopRequests
from genlight.callbacks.hook.hook import skippable
from genlight.callbacks.stop.signals import REASON_OF_SIGNAL, StopSignals
from genlight.callbacks.stop.sources import cancel_file_is_set


class Doing(Hook):
    critical = True

    def __init__(self, at_step, action):
        self.at_step, self.action, self.ended = at_step, action, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended += 1
        if self.ended == self.at_step:
            self.action()


class Agreeable(StopRequests):
    poll_s = 0.0


@pytest.fixture(params=["contract", "plain"])
def train(request, fit, fit_plain, counting_trainer):
    if request.param == "plain":
        return lambda callbacks: fit_plain(callbacks, steps=10)
    return lambda callbacks: fit(counting_trainer(), callbacks, steps=10)[0]


# the cancel file


@pytest.mark.parametrize(
    ("content", "is_set"),
    [
        *((word, True) for word in ("", "1", "CANCELED\r\n", "\n\t ", "2", "no thanks", "no" + " " * 1000, "\udcff")),
        *((word, False) for word in ("0", "false", "f", "no", "n", "off", " FALSE\n", "No\r\n")),
    ],
)
def test_a_cancel_file_counts_unless_it_is_absent_or_holds_a_word_that_means_no(tmp_path, content, is_set):
    (tmp_path / "cancel").write_text(content, errors="surrogateescape")

    assert cancel_file_is_set(tmp_path / "cancel") is is_set
    assert cancel_file_is_set(tmp_path), "what cannot be read counts"
    assert not cancel_file_is_set(tmp_path / "absent")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("file", "canceled"),
        ("limit", "timeout"),
        # What a check that another part added says.
        *(("preempted", "preempted"), ("timeout", "timeout"), ("lease lost", "canceled")),
        *REASON_OF_SIGNAL.items(),
    ],
)
def test_a_stop_of_any_source_ends_the_run_after_the_step(train, tmp_path, how, reason):
    answers, stop = [], Agreeable(tmp_path / "cancel", max_runtime_s=1e6)
    stop.add_check(lambda: answers[0] if answers else None)

    def act():
        if how == "file":
            (tmp_path / "cancel").touch()
        elif how == "limit":
            stop.sources.deadline.at = time.monotonic()
        elif isinstance(how, signal.Signals):
            os.kill(os.getpid(), how)
        else:
            answers.append(how)

    seen, handlers = Doing(3, act), {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}
    with pytest.raises(TrainingCanceled) as caught:
        train([StopRequests(), seen, stop])

    assert (caught.value.reason, seen.ended) == (reason, 3)
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == handlers


# before the first step


@pytest.mark.parametrize(
    ("how", "reason"), [("flag", "canceled"), ("file", "canceled"), ("signal", "preempted"), ("limit", "timeout")]
)
def test_a_stop_request_before_the_first_step_trains_none(train, tmp_path, how, reason):
    signals = StopSignals()
    signals.reason = "preempted" if how == "signal" else None
    if how == "file":
        (tmp_path / "cancel").touch()
    seen, limit_s = Doing(0, None), 1e-6 if how == "limit" else None  # it counts from the start of the process

    with pytest.raises(TrainingCanceled) as caught:
        train([seen, StopRequests(tmp_path / "cancel", max_runtime_s=limit_s, canceled=how == "flag", signals=signals)])

    assert (caught.value.reason, seen.ended) == (reason, 0)


# the limit


# the cadence of checks


class Counted(StopRequests):
    looks = 0

    @skippable
    def on_train_batch_end(self, *event):
        self.looks += 1
        super().on_train_batch_end(*event)


@pytest.mark.parametrize(("poll_s", "looks"), [(3600.0, len([1, 2, 4, 8, *range(16, 81, 8)])), (1e-9, 80)])
def test_quick_steps_are_checked_at_every_eighth_and_longer_ones_at_each(fit, counting_trainer, poll_s, looks):
    stop = Counted()
    stop.poll_s = poll_s

    fit(counting_trainer(), [stop], steps=80)

    assert stop.looks == looks


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


def test_the_pause_that_a_step_asked_for_ends_with_a_stop_request(fit, counting_trainer, tmp_path):
    class Slow(counting_trainer):
        def train_step(self, batch, state, ctx):
            super().train_step(batch, state, ctx)
            return StepResult(control=StepControlHints(backoff_seconds=3600.0 if batch == 0 else None))

    class During(Hook):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            threading.Timer(0.05, (tmp_path / "cancel").touch).start()

    with pytest.raises(TrainingCanceled):
        fit(Slow(), [During(), StopRequests(tmp_path / "cancel")])


# the time that a launcher leaves


@pytest.mark.parametrize("has_agent", [False, True])
def test_torchruns_grace_period_is_logged_and_a_longer_stop_warned_of_once(train, monkeypatch, caplog, has_agent):
    if has_agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    caplog.set_level("INFO", "genlight")
    stop = StopRequests()

    def save():
        for _ in range(2):
            stop.on_checkpoint_timed(seen.trainer, None, 31.0)

    seen = Doing(3, save)
    seen.on_train_start = lambda trainer, pl_module: setattr(seen, "trainer", trainer)
    train([seen, stop])
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "torchrun" in record.getMessage()]
    assert [level for level, _ in told] == (["INFO", "WARNING"] if has_agent else [])
    assert all("every rank 30 s" in text for _, text in told)
    assert not told or told[1][1].startswith("A step and a checkpoint take 31 s")


# signals


@pytest.mark.parametrize("hook", ["configure", "load_state_dict", "fails"])
def test_a_signal_before_training_begins_stops_it_before_the_first_step(fit, counting_trainer, tmp_path, hook):
    """Also while a checkpoint is restored, when Lightning would handle it."""

    class Told(counting_trainer):
        def configure(self, ctx):
            if hook == "fails":
                raise ValueError("no model")
            return self.told("configure") or super().configure(ctx)

        def load_state_dict(self, state, payload, ctx):
            self.told("load_state_dict")

        def told(self, here):
            if here == hook:
                os.kill(os.getpid(), signal.SIGTERM)

    module, seen = ContractModule(Told()), Doing(0, None)
    module.resume_from(step=2, payload={}, checkpoint_dir=tmp_path)
    before = {each: signal.getsignal(each) for each in REASON_OF_SIGNAL}
    with pytest.raises(ValueError if hook == "fails" else TrainingCanceled):
        fit(None, [seen, StopRequests()], module=module)

    assert seen.ended == 0
    assert {each: signal.getsignal(each) for each in REASON_OF_SIGNAL} == before


@pytest.mark.parametrize(("how", "reason"), [("check", "preempted"), ("signal", "preempted"), ("flag", "canceled")])
def test_a_fit_after_one_that_was_stopped_trains_until_it_is_stopped_itself(train, how, reason):
    stop, asked = Agreeable(), []

    def ask():
        if how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif how == "flag":
            stop.sources.canceled = True
        else:
            asked.append("preempted")

    stop.add_check(lambda: asked.pop() if asked else None)
    for _ in range(2):
        seen = Doing(2, ask)
        with pytest.raises(TrainingCanceled) as caught:
            train([seen, stop])
        assert (caught.value.reason, seen.ended) == (reason, 2)
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
    handlers = []

    class Validated(pl.LightningModule):
        def validation_step(self, batch, batch_idx):
            handlers.append(signal.getsignal(signal.SIGTERM))

    stop = StopRequests()
    fit_plain([stop]).validate(Validated(), [0], verbose=False)
    assert len(handlers) == 1
    assert handlers[0] != stop.sources.signals._handle


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
    with StopSignals().installed() as signals:
        before = wakeup_file()
        train([StopRequests(signals=signals)])
        assert wakeup_file() == before != -1, "it stays with whoever handles the signals"


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
