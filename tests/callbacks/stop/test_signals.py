"""Stop signals: the reason that they give, and which of them is a second one."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from genlight.callbacks.stop.launcher import announces_time_limit
from genlight.callbacks.stop.signals import REASON_OF_SIGNAL, StopSignals


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
        (100, "soon", False),
        (90, "soon", True),
        (None, 300, False),
    ],
)
def test_a_signal_near_the_end_is_the_time_limit(monkeypatch, left_s, grace_s, is_limit):
    if left_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(10_000 + left_s))
    if grace_s is not None:
        monkeypatch.setenv("TRAINER_STOP_GRACE_SECONDS", str(grace_s))
    assert announces_time_limit(10_000.0) is is_limit


@pytest.mark.parametrize(
    ("number", "left_s", "reason"),
    [
        (signal.SIGTERM, 10_000, "preempted"),
        (signal.SIGTERM, 60, "timeout"),
        (signal.SIGUSR1, 60, "timeout"),
        (signal.SIGUSR1, None, "preempted"),
        (signal.SIGINT, 1, "canceled"),
    ],
)
def test_the_reason_of_a_stop_says_which_it_was(monkeypatch, left_s, reason, number):
    if left_s is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left_s))
    with StopSignals().installed() as signals:
        os.kill(os.getpid(), number)
        while signals.reason is None:
            time.sleep(0.01)
    assert signals.reason == reason


# repeated and second signals


def run_script(script):
    """Run a script in a separate process without torch, in which a signal may be repeated within 1 s."""
    source = f"""
import ctypes, os, signal, subprocess, sys, threading, time
from genlight.callbacks.stop import signals as module
from genlight.callbacks.stop.signals import StopSignals

module.REPEATS_WITHIN_S = 1.0
SILENT = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}

def send(*numbers, to=os.getpid()):
    kills = "; ".join(f"os.kill({{to}}, {{int(number)}})" for number in numbers)
    return subprocess.Popen([sys.executable, "-c", f"import os, time; {{kills}}"])

def insist(number, to=os.getpid()):
    # Until it ends the process: on a busy machine the first ones may count as repeated.
    again = f"for _ in range(60): time.sleep(1.1); os.kill({{to}}, {{int(number)}})"
    return subprocess.Popen([sys.executable, "-c", f"import os, time\\n{{again}}"], **SILENT)

def wait_in_c():
    held = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second lock waits for itself, whatever signals come
        ctypes.CDLL(None).pthread_mutex_lock(held)

{textwrap.dedent(script)}
"""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("number", REASON_OF_SIGNAL)
def test_the_same_signal_again_counts_once_and_ends_the_process_later(number):
    done = run_script(f"""
        with StopSignals().installed() as signals:
            for _ in range(3):
                os.kill(os.getpid(), {int(number)})
            print(signals.reason, flush=True)
            insist({int(number)}).wait()
            print("still there", flush=True)
    """)

    assert done.returncode == 128 + number
    assert done.stdout == f"{REASON_OF_SIGNAL[number]}\n"


def test_a_repeated_signal_is_judged_by_its_arrival_and_not_by_the_return_of_the_main_thread():
    done = run_script("""
        with StopSignals().installed() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.reason == "preempted"
            def repeat():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2)
                libc.pthread_mutex_unlock(held)

            libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(held)
            thread = threading.Thread(target=repeat)
            thread.start()
            libc.pthread_mutex_lock(held)  # no signal interrupts this wait, so that Python's handler runs after it
            thread.join()
            print("still there", flush=True)
    """)

    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("threads", [0, 4])
def test_another_signal_ends_the_process_at_once_whichever_thread_gets_it(threads, second):
    done = run_script(f"""
        for _ in range({threads}):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        with StopSignals().installed():
            send(signal.SIGTERM, {int(second)})
            time.sleep(30)
            print("still there", flush=True)
    """)

    assert done.returncode in (128 + signal.SIGTERM, 128 + second)  # the kernel may deliver either first
    assert done.stdout == ""


def test_a_second_signal_ends_a_process_whose_main_thread_waits_in_c():
    done = run_script("""
        with StopSignals().installed():
            os.kill(os.getpid(), signal.SIGTERM)
            insist(signal.SIGTERM)
            wait_in_c()
    """)

    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("taken_by", ["the program", "asyncio"])
def test_the_program_keeps_its_wakeup_file_and_a_second_signal_still_ends_it(taken_by):
    done = run_script(f"""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        if {taken_by!r} == "the program":
            signal.set_wakeup_fd(writable)
        with StopSignals().installed() as signals:
            if {taken_by!r} == "asyncio":  # which sets one of its own, and none at its end
                signal.set_wakeup_fd(writable)
            os.kill(os.getpid(), signal.SIGTERM)
            print(signals.reason, os.read(readable, 8))
            os.kill(os.getpid(), signal.SIGTERM)
            found = signal.set_wakeup_fd(-1)
            print(found == writable, flush=True)
            insist(signal.SIGTERM).wait()
    """)

    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "preempted b'\\x0f'\nTrue\n"


def test_a_signal_after_the_reported_end_does_not_change_the_exit_code():
    done = run_script("""
        with StopSignals().installed() as signals:
            signals.exit_code = 7
            os.kill(os.getpid(), signal.SIGTERM)
            print("still there", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
    """)

    assert (done.returncode, done.stdout) == (7, "still there\n")


def test_a_signal_while_the_interpreter_ends_does_not_change_the_exit_code():
    done = run_script("""
        import atexit

        class Last:
            def __del__(self):  # when modules are torn down, after Python has given up its handlers
                os.kill(os.getpid(), signal.SIGTERM)

        module.exit_on_signal(5)
        kept = Last()
        sys.exit(5)
    """)

    assert done.returncode == 5, done.stderr


@pytest.mark.parametrize("raises", ["", "raise SystemExit(4)", "raise ValueError(number)"])
@pytest.mark.parametrize("number", REASON_OF_SIGNAL)
def test_a_handler_of_the_program_is_called_too_and_cannot_break_the_stop(number, raises):
    done = run_script(f"""
        def own(number, frame):
            print("called", number, flush=True)
            {raises}

        signal.signal({int(number)}, own)
        with StopSignals().installed() as signals:
            os.kill(os.getpid(), {int(number)})
            print(signals.reason)
        print(signal.getsignal({int(number)}) is own)
    """)

    assert done.stdout == f"called {int(number)}\n{REASON_OF_SIGNAL[number]}\nTrue\n", done.stderr
    assert ("own handler raised" in done.stderr) is bool(raises)


def test_a_forked_process_ends_on_sigterm_and_leaves_the_others_to_its_parent():
    done = run_script("""
        with StopSignals().installed() as signals:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
                time.sleep(0.1)
                os.kill(child, number)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signals.reason)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            print(signals.reason)
    """)

    assert done.stdout == "-15 None\npreempted\n"
