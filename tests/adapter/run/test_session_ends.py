"""Attempts that end in any way and in any phase: one terminal event each, and the exit code that belongs to it."""

import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from genlight.adapter.contract.exceptions import (
    AuthError,
    InputError,
    NonfiniteError,
    StartupContractError,
    TrainingCanceled,
    UploadError,
    UsageError,
)
from genlight.adapter.run.session import Completion, Session
from genlight.callbacks.stop.sources import StopSources
from genlight.reporters import EventLog, read_events
from genlight.reporters.events.validation import validate_events

pytestmark = pytest.mark.promise(name="stop")

ENDS = {
    ValueError: (None, 1),
    MemoryError: (None, 1),
    OSError: (None, 1),
    GeneratorExit: (None, 1),
    SystemExit: (None, 1),
    InputError: ("input", 1),
    AuthError: ("auth", 1),
    UploadError: ("upload", 1),
    lambda text: UploadError(text, auth=True): ("auth", 1),
    UsageError: ("startup", 2),
    lambda text: StartupContractError("startup.invalid_trainer", text): ("startup", 2),
    NonfiniteError: (None, 3),
    KeyboardInterrupt: ("canceled", 75),
    lambda _: TrainingCanceled("timeout"): ("timeout", 75),
}
"""Category and exit code of each kind of exception; the category None is that of the phase."""


class Refuses:
    """An uploader whose required upload never arrives."""

    def settle(self, **_):
        return UploadError("checkpoint of step 1: refused")

    def deliver_terminal(self, *_, **__):
        return None

    def close(self):
        pass


class Attempts(RuleBasedStateMachine):
    """A run that is started again and again."""

    def __init__(self):
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.ends, self.session, self.idle_stops = [], None, 0
        self.begin()

    def begin(self):
        self.session = Session(stop=StopSources(), deadline_s=0.0)
        self.session.place(self.folder, None)
        self.session.event_log = EventLog(self.folder / "events.jsonl", run_id="r")
        self.session.count_steps = lambda: self.step
        self.phase, self.step, self.signal = "model-load", 0, None

    @precondition(lambda self: self.phase == "model-load")
    @rule()
    def start_training(self):
        self.session.event_log.started()
        self.phase = "train-step"

    @precondition(lambda self: self.phase == "train-step")
    @rule()
    def train(self):
        self.step += 1

    @rule(number=st.sampled_from([signal.SIGTERM, signal.SIGINT]))
    def receive(self, number):
        """A repetition of the first signal changes nothing."""
        self.signal = self.signal or number
        self.session.stop.signals._receive(self.signal, is_late=False)

    @rule(kind=st.sampled_from(list(ENDS)))
    def fail(self, kind):
        category, code = ENDS[kind]
        self.ended(self.session.fail(kind("broken")), "failed", category or self.phase, code)

    @precondition(lambda self: self.signal)
    @rule()
    def stop(self):
        reason = {signal.SIGTERM: "preempted", signal.SIGINT: "canceled"}[self.signal]
        with pytest.raises(TrainingCanceled) as stopped:
            self.session.stop.raise_if_stopped()
        self.ended(self.session.fail(stopped.value), "failed", reason, 75)

    @precondition(lambda self: self.phase == "train-step")
    @rule()
    def complete(self):
        self.ended(self.session.complete(Completion(self.step, None)), "completed", None, 0)

    @precondition(lambda self: self.phase == "train-step")
    @rule()
    def complete_without_a_required_upload(self):
        self.session.uploader = Refuses()
        with pytest.raises(UploadError) as refused:
            self.session.complete(Completion(self.step, None))
        self.ended(self.session.fail(refused.value), "failed", "upload", 1)

    @rule()
    def is_killed(self):
        self.session.event_log.close()
        if self.phase == "train-step":  # otherwise it has left no line
            self.idle_stops = 0
        self.begin()

    def ended(self, code, event, category, expected):
        self.ends.append((event, category))
        is_idle = expected == 75 and self.step == 0
        if is_idle and self.idle_stops:  # a further start would stop there again
            expected = 1
        self.idle_stops = self.idle_stops + 1 if is_idle else 0
        assert code == expected == self.session.stop.signals.exit_code
        with self.session:
            pass
        assert validate_events(self.folder / "events.jsonl") == []
        log = list(read_events(self.folder / "events.jsonl"))
        assert (log[-1]["event"], log[-1].get("category"), log[-1]["step"]) == (event, category, self.step)
        told = [(each["event"], each.get("category")) for each in log if each["event"] in ("completed", "failed")]
        assert told == self.ends
        self.begin()

    def teardown(self):
        self.session.event_log.close()
        self.temporary.cleanup()


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(max_examples=40, stateful_step_count=20)
