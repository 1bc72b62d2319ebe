"""Signals that ask a process to stop, turned into a flag that is polled between steps."""

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
from .launcher import announces_time_limit, launcher_grace_s

_REASONS: dict[str, StopReason] = {"SIGTERM": "preempted", "SIGUSR1": "preempted", "SIGINT": "canceled"}

REASON_OF_SIGNAL = {signal.Signals[name]: why for name, why in _REASONS.items() if hasattr(signal, name)}
"""Signals that ask for a stop. Some commands also work on Windows, which lacks SIGUSR1."""

LEFT_AFTER_S = 1.0
"""Seconds that `end_watch` waits for the end of the thread that reads the wakeup file."""
REPEATS_WITHIN_S = 3.0
"""Seconds within which a repeated signal does not count as a second one: a scheduler signals every process, and an
agent such as torchrun forwards its own signal to its ranks, so a rank may receive it twice."""


class StopSignals:
    """Notes the first stop signal. A second one ends the process at once, with exit code 128 + its number.

    Schedulers signal every process of a job, and an agent such as torchrun forwards the signal once more to its ranks.
    Therefore the same signal within `REPEATS_WITHIN_S` of the first does not count. Another signal, or the same one
    later, counts as deliberate.

    The handler does nothing else, because a save in it could meet a half-finished step or a held lock. A second signal
    also ends a process whose main thread does not return to Python, for example in a hanging collective. For that, a
    separate thread reads the interpreter's wakeup file (``signal.set_wakeup_fd``) and sees each signal on arrival. If
    the program has set its own wakeup file, that file stays, and a signal counts when the main thread returns to
    Python.

    The program's earlier handlers are called too, for every signal. An exception of such a handler is printed, and the
    stop continues.

    A SIGTERM or SIGUSR1 is a preemption, unless Slurm's end time shows that the job's time is over.

    A process that is forked while the handlers are installed, such as a loader worker, ends on SIGTERM as usual. It
    ignores SIGINT and SIGUSR1, because a terminal or scheduler also sends these to the parent.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.on_stop: Callable[[], None] = _do_nothing
        """Called at each signal that asks for a stop, after `reason` is set. It runs in a signal handler or another
        thread, so it may only set a flag."""
        self.before_exit: Callable[[], None] = _do_nothing
        """Called in the same way before a second signal ends the process, to end child processes that would stay."""
        self.what_next = ""
        """What the program does if the first signal comes now; printed to standard error at that signal."""
        self.exit_code: int | None = None
        """The exit code that the run has reported at its end, and with which a second signal then ends the process."""
        self._unsaid = threading.Lock()
        self._received: list[tuple[int, float]] = []
        """Stop signals so far, each with the time (``time.monotonic``) at which it was read."""
        self._own_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._wakeup_fd: int | None = None
        self._watch: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Signals belong to a process; a copy in another process handles none until it is installed there.
        return {**vars(StopSignals()), "reason": self.reason, "_unsaid": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._unsaid = threading.Lock()

    @staticmethod
    def handling() -> StopSignals | None:
        """Return the object that handles SIGTERM in this process now; None if there is none."""
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return owner if isinstance(owner, StopSignals) else None

    @property
    def received_at(self) -> float | None:
        """Time of the first signal, on the clock of ``time.monotonic``; None before it."""
        return self._received[0][1] if self._received else None

    @property
    def killed_at(self) -> float | None:
        """Time at which the launcher kills this process, on the same clock; None before a signal, or if unknown."""
        grace_s = launcher_grace_s()
        return None if self.received_at is None or grace_s is None else self.received_at + grace_s

    def say(self, what_next: str) -> None:
        """Set `what_next`, and print it now if a signal came before it was set."""
        self.what_next = what_next
        if self._received:
            self._answer(self._received[0][0])

    @property
    def are_handled(self) -> bool:
        """Whether this object handles the signals now."""
        return all(signal.getsignal(number) == self._handle for number in REASON_OF_SIGNAL)

    def install(self) -> None:
        """Handle the signals of `REASON_OF_SIGNAL`; in any but the main thread Python refuses that, so do nothing."""
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
        """Handle the signals during a block; restore the earlier handlers afterwards."""
        before = {number: signal.getsignal(number) for number in REASON_OF_SIGNAL}
        self.install()
        try:
            yield self
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    # A handler that was not installed from Python is None, and Python cannot restore it.
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
                self._own_handlers.clear()
                self.end_watch()

    def forget(self) -> None:
        """Start over: the next signal is the first."""
        self.reason = None
        self._unsaid = threading.Lock()
        self._received, self.exit_code = [], None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        # This runs when the main thread returns to Python, perhaps long after the signal. Only the thread that reads
        # arrivals knows when a signal came, and so whether it was a second one.
        if self._hears_arrivals():
            self._note(number)
        else:
            first_at = self.received_at
            self._receive(number, is_late=first_at is not None and time.monotonic() - first_at >= REPEATS_WITHIN_S)
        if (own := self._own_handlers.get(number)) is not None:
            try:
                own(number, frame)
            except BaseException as error:  # noqa: BLE001 - raising it here would break a step before its checkpoint
                _print(f"{signal.Signals(number).name}: the program's own handler raised {error!r}; the stop continues")

    def _hears_arrivals(self) -> bool:
        """Return whether this signal went to the wakeup file that the thread reads.

        asyncio, for example, replaces the interpreter's wakeup file and then clears it. If it is cleared, set ours
        again.
        """
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
            is_late: Whether this signal certainly came too late to be a repetition of the first one.
        """
        # Append first, in one operation: the next signal may interrupt a handler anywhere.
        self._received.append((number, time.monotonic()))
        if len(self._received) == 1:
            self._note(number)
        elif is_late or number != self._received[0][0]:
            # Do not rely on the signal's default action: the kernel does not apply it to a container's first process.
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
        # Both the handler and the thread that reads arrivals call this; neither may wait for the other.
        if self.what_next and self._unsaid.acquire(blocking=False):
            again = f"a second signal after {REPEATS_WITHIN_S:g} s ends it now"
            _print(f"{signal.Signals(number).name}: {self.what_next}; {again}")

    def _watch_arrivals(self) -> None:
        """Start the thread that reads arrivals, unless the program has its own wakeup file."""
        # The kernel may deliver a signal to any thread. If another thread gets it, a main thread that sleeps or waits
        # does not wake up, and the handler runs only when the main thread returns to Python.
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
        self._watch = watch  # set before the start: the thread checks whether it is still the current one
        try:
            started(watch)
        except ThreadLimitError:  # the handlers are enough while the main thread returns to Python
            self._watch = None
            os.close(readable)
            self.end_watch()

    def _read_arrivals(self, readable: int) -> None:
        """Receive each signal on arrival.

        A signal is late if it came more than `REPEATS_WITHIN_S` after the first one. On a busy machine this thread may
        read a signal long after it came. So it counts as late only if nothing was left to read when that time was over.
        """
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        quiet_at = 0.0  # last time at which there was nothing to read
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
                    # Another handler may have replaced ours: a Trainer, for example, sets handlers when it ends.
                    is_ours = number in REASON_OF_SIGNAL and signal.getsignal(number) == self._handle
                    if is_ours and self._watch is threading.current_thread():
                        self._receive(number, is_late=0.0 < repeats_until <= quiet_at)

    def end_watch(self) -> None:
        """Release the interpreter's wakeup file after other handlers are installed; `install` sets it again."""
        if self._wakeup_fd is None:
            return
        current = signal.set_wakeup_fd(-1)
        if current != self._wakeup_fd:
            signal.set_wakeup_fd(current)
        os.close(self._wakeup_fd)
        watch, self._wakeup_fd, self._watch = self._watch, None, None
        if watch is not None:
            # Signals still unread belong to the fit that just ended; drop them. A process that was forked in C may
            # keep the other end of the pipe open; then the thread stays.
            watch.join(LEFT_AFTER_S)


def exit_on_signal(exit_code: int) -> None:
    """Let every later stop signal end this process at once, with `exit_code`. Works only in the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in REASON_OF_SIGNAL:
            signal.signal(number, lambda *_: os._exit(exit_code))
        # An exiting Python removes its handlers, and the default action would end the process with another code.
        # Ignored signals stay ignored, so they cannot change the code.
        atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    for number in REASON_OF_SIGNAL:
        signal.signal(number, signal.SIG_IGN)


def _print(line: str) -> None:
    """Write one line to standard error, bypassing Python's streams: one may be locked when the signal comes."""
    begin = "\n" if os.isatty(2) else ""  # a progress bar, or the ^C of a terminal, may be on the current line
    with contextlib.suppress(OSError):  # standard error may be closed
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
