"""Signals that ask a process to stop, as a flag that is polled between steps."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...adapter.contract.exceptions import StopReason, ThreadLimitError
from ...adapter.plumbing.threads import started

__all__ = [
    "REASON_OF_SIGNAL",
    "StopSignals",
    "announces_time_limit",
    "exit_on_signal",
    "job_end_time_s",
    "launcher_grace_s",
]

_REASONS: dict[str, StopReason] = {"SIGTERM": "preempted", "SIGUSR1": "preempted", "SIGINT": "canceled"}

REASON_OF_SIGNAL = {signal.Signals[name]: why for name, why in _REASONS.items() if hasattr(signal, name)}
"""Signals that ask for a stop. Windows, where some commands work, lacks SIGUSR1."""

SIGNAL_MAY_BE_EARLY_S = 60.0
"""Slurm looks at ``--signal`` about once a minute, and rather sends it early."""
WITHOUT_WARNING_S = 30.0
"""How long after the limit itself Slurm waits, as it is delivered (``KillWait``), where no signal was asked for."""
LEFT_AFTER_S = 1.0
"""How long a thread that reads arrivals is waited for when it is to end."""
REPEATS_WITHIN_S = 3.0
"""For so long the same signal again is no second one: schedulers signal every process, and agents forward theirs."""
TORCHRUN_GRACE_S = 30
"""Default time that torchrun leaves its ranks between a stop signal and SIGKILL."""


class StopSignals:
    """Notes the first stop signal. A second one ends the process at once, with exit code 128 + its number.

    Schedulers signal every process of a job, and an agent such as torchrun forwards the signal once more to its ranks.
    The same signal within `REPEATS_WITHIN_S` of the first therefore counts once. Another signal, or the same one later,
    is deliberate.

    Nothing else happens inside the handler: saving there could meet a half-made step or a held lock. A second signal
    also ends a process whose main thread does not return to Python, as in a collective that hangs: a separate thread
    reads what the interpreter writes to its wakeup file, at the time when it arrives. If the program has set such a
    file itself, it keeps it. A signal then counts when the main thread returns to Python.

    A handler of the program's own is called too, for every signal. If it raises something, that is printed, and the
    stop takes its course.

    A SIGTERM or SIGUSR1 is a preemption, unless Slurm's end time says that the job's time is over.

    A process that is forked meanwhile, such as a loader worker, ends on SIGTERM as usual. It leaves to its parent what
    a terminal or a scheduler sends to the whole group (SIGINT, SIGUSR1).
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.on_stop: Callable[[], None] = _do_nothing
        """Called once `reason` is set, in a signal handler or another thread: it may do no more than set a flag."""
        self.before_exit: Callable[[], None] = _do_nothing
        """Called before a second signal ends the process, as `on_stop` is: ends processes that would stay behind."""
        self.what_next = ""
        """The consequence of a first signal now, printed to standard error when it comes; empty prints nothing."""
        self.exit_code: int | None = None
        """The reported exit code once the run has ended: a signal no longer changes it."""
        self._unsaid = threading.Lock()
        self._received: list[tuple[int, float]] = []
        """The stop signals so far, each with the time (``time.monotonic``) at which it was read."""
        self._own_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._wakeup_fd: int | None = None
        self._watch: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Signals come to a process, and a copy handles none until it is installed.
        return {**vars(StopSignals()), "reason": self.reason, "_unsaid": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._unsaid = threading.Lock()

    @staticmethod
    def handling() -> StopSignals | None:
        """The object that handles SIGTERM in this process now; None if there is none."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, StopSignals) else None

    @property
    def received_at(self) -> float | None:
        """Time of the first signal, on the clock of ``time.monotonic``; None before it."""
        return self._received[0][1] if self._received else None

    @property
    def killed_at(self) -> float | None:
        """Time at which the launcher kills this process, on that clock; None before a signal, or if it never does."""
        grace_s = launcher_grace_s()
        return None if self.received_at is None or grace_s is None else self.received_at + grace_s

    def say(self, what_next: str) -> None:
        """Set `what_next`, and answer a signal that came before there was anything to say."""
        self.what_next = what_next
        if self._received:
            self._answer(self._received[0][0])

    @property
    def are_handled(self) -> bool:
        """Whether a signal that comes now is noted here."""
        return all(signal.getsignal(number) == self._handle for number in REASON_OF_SIGNAL)

    def install(self) -> None:
        """Handle the signals of `REASON_OF_SIGNAL`; a thread that is not the main one cannot, and leaves them alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in REASON_OF_SIGNAL:
            before = signal.signal(number, self._handle)
            is_ours = isinstance(getattr(before, "__self__", None), StopSignals)
            if callable(before) and before is not signal.default_int_handler and not is_ours:
                self._own_handlers[number] = before
        if self._wakeup_fd is None:
            self._watch_arrivals()

    @contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the signals for the length of a block, and as before it afterwards."""
        before = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}
        self.install()
        try:
            yield self
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    # None: it was not installed from Python, and cannot be put back from there.
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
                self._own_handlers.clear()
                self.end_watch()

    def forget(self) -> None:
        """Start over: the next signal is the first."""
        self.reason = None
        self._unsaid = threading.Lock()
        self._received, self.exit_code = [], None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # This runs once the main thread returns to Python, which may be long after the signal. The thread that reads
        # arrivals knows better whether a signal was a second one.
        if self._hears_arrivals():
            self._note(number)
        else:
            first_at = self.received_at
            self._receive(number, is_late=first_at is not None and time.monotonic() - first_at >= REPEATS_WITHIN_S)
        if (own := self._own_handlers.get(number)) is not None:
            try:
                own(number, frame)
            except BaseException as error:  # noqa: BLE001 - raised here it would break a step before its checkpoint
                _print(f"{signal.Signals(number).name}: the program's own handler raised {error!r}; the stop goes on")

    def _hears_arrivals(self) -> bool:
        """Whether the thread still reads the interpreter's wakeup file; asyncio, for one, takes it and lets it go."""
        if self._watch is None or self._wakeup_fd is None:
            return False
        current = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        if current not in (-1, self._wakeup_fd):
            signal.set_wakeup_fd(current)
        return current == self._wakeup_fd

    def _receive(self, number: int, *, is_late: bool) -> None:
        """Note a signal, or end the process if it is a second one.

        Args:
            number: The signal.
            is_late: Whether the time in which the first one may be repeated is known to be over.
        """
        # Appended first, in one step: the next signal may interrupt a handler anywhere.
        self._received.append((number, time.monotonic()))
        if len(self._received) == 1:
            self._note(number)
        elif is_late or number != self._received[0][0]:
            # Not by the default action of the signal: the kernel spares the first process of a container its own.
            try:
                self.before_exit()
            finally:
                os._exit(128 + number if self.exit_code is None else self.exit_code)

    def _note(self, number: int) -> None:
        reason = REASON_OF_SIGNAL[signal.Signals(number)]
        is_over = reason == "preempted" and announces_time_limit(time.time())
        self.reason = self.reason or ("timeout" if is_over else reason)
        self._answer(number)
        self.on_stop()

    def _answer(self, number: int) -> None:
        # The handler and the thread that reads arrivals both come here; neither may wait for the other.
        if self.what_next and self._unsaid.acquire(blocking=False):
            again = f"a second signal after {REPEATS_WITHIN_S:g} s ends it now"
            _print(f"{signal.Signals(number).name}: {self.what_next}; {again}")

    def _watch_arrivals(self) -> None:
        # The kernel may give a signal to any thread. Where that is not the main one, a main thread that sleeps or waits
        # is not woken, and its handler runs only when it returns to Python.
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        other = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            os.close(readable)
            os.close(writable)
            return
        self._wakeup_fd = writable
        watch = threading.Thread(target=self._read_arrivals, args=(readable,), name="stop-signals", daemon=True)
        self._watch = watch  # before it looks whether it still is the one
        try:
            started(watch)
        except ThreadLimitError:  # the handlers are enough where the main thread returns to Python
            self._watch = None
            os.close(readable)
            self.end_watch()

    def _read_arrivals(self, readable: int) -> None:
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        quiet_at = 0.0  # when there was nothing left to read; this thread may have waited long for the interpreter
        with open(readable, "rb", buffering=0) as arrivals:
            while True:
                repeats_until = 0.0 if self.received_at is None else self.received_at + REPEATS_WITHIN_S
                left_s = max(0.0, repeats_until - time.monotonic())
                if quiet_at < repeats_until and not poll.poll(left_s * 1000):
                    quiet_at = time.monotonic()
                    continue
                if not (numbers := arrivals.read(64)):
                    return
                for number in numbers:
                    # Others may have put a handler of their own in its place, as a Trainer does when it has ended.
                    is_ours = number in REASON_OF_SIGNAL and signal.getsignal(number) == self._handle
                    if is_ours and self._watch is threading.current_thread():
                        self._receive(number, is_late=0.0 < repeats_until <= quiet_at)

    def end_watch(self) -> None:
        """Give the interpreter's wakeup file back once other handlers are installed; `install` takes it again."""
        if self._wakeup_fd is None:
            return
        current = signal.set_wakeup_fd(-1)
        if current != self._wakeup_fd:
            signal.set_wakeup_fd(current)
        os.close(self._wakeup_fd)
        watch, self._wakeup_fd, self._watch = self._watch, None, None
        if watch is not None:
            # What it has not read yet belongs to what has ended, not to the next fit. A process that was
            # forked off in C may keep the other end of its pipe open: then it stays.
            watch.join(LEFT_AFTER_S)


def job_end_time_s() -> float | None:
    """When Slurm ends this job, in seconds since 1970; None outside of one, or where it does not say.

    Slurm sets ``SLURM_JOB_END_TIME`` from release 23 on; the script of ``genlight slurm render`` does under older ones.
    """
    return _seconds("SLURM_JOB_END_TIME")


def launcher_grace_s() -> float | None:
    """Seconds between a stop signal and SIGKILL under the launcher that started this process; None if unknown.

    torchrun's ``--shutdown-timeout`` does not show in a rank; its environment variable and its default do.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return _seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or TORCHRUN_GRACE_S


def announces_time_limit(now_s: float) -> bool:
    """Whether a stop signal that comes at `now_s` says that the job's time is over; else others want the machine.

    ``TRAINER_STOP_GRACE_SECONDS`` is how long before the end the scheduler sends it; without that it sends none before.

    Args:
        now_s: Seconds since 1970.
    """
    ends_at_s, grace_s = job_end_time_s(), _seconds("TRAINER_STOP_GRACE_SECONDS")
    before_s = (WITHOUT_WARNING_S if grace_s is None else grace_s) + SIGNAL_MAY_BE_EARLY_S
    return ends_at_s is not None and ends_at_s - now_s <= before_s


def _seconds(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    return float(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def exit_on_signal(exit_code: int) -> None:
    """From here on let a stop signal end this process at once, with `exit_code`; from the main thread only."""
    if threading.current_thread() is threading.main_thread():
        for number in REASON_OF_SIGNAL:
            signal.signal(number, lambda *_: os._exit(exit_code))
        # Python gives up its handlers before the process has ended; an ignored signal stays ignored.
        atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in REASON_OF_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


def _print(line: str) -> None:
    """One line on standard error, written past Python's streams: a signal may have come while one of them is locked."""
    begin = "\n" if os.isatty(2) else ""  # below a progress bar, and the ^C that a terminal shows
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"{begin}{line}\n".encode())


def _do_nothing() -> None:
    """The default of `on_stop` and `before_exit`."""


def _leave_to_parent() -> None:
    for number in REASON_OF_SIGNAL:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(owner, StopSignals):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
            owner.end_watch()


os.register_at_fork(after_in_child=_leave_to_parent)
