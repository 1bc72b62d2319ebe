"""Every process of a run on several ranks ends with the run's exit code, however it was launched."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def codes(processes):
    return [process.wait(120) for process in processes]


def test_exit_code_of_a_run_that_completes_or_has_completed(job, two_ranks):
    job.write_for_two_ranks(steps=3)
    assert codes(two_ranks()) == [0, 0]
    assert codes(two_ranks()) == [0, 0]


def test_exit_code_if_uploads_fail_after_training(job, two_ranks):
    job.server.status["/terminal"] = 403
    job.write_for_two_ranks(steps=3)

    assert codes(two_ranks()) == [1, 1]
    assert job.terminal_event()["category"] == "auth"


def test_exit_code_if_rank_zero_is_killed_while_it_uploads(job, two_ranks):
    """The other rank has trained to the end, but no event says that the run completed."""
    job.server.delay_s["/terminal"] = 600
    job.write_for_two_ranks(steps=3)
    both = two_ranks()
    job.wait_until(lambda: any(path == "/terminal" for path, _ in job.server.headers), both[0])
    assert both[1].poll() is None
    both[0].send_signal(signal.SIGKILL)

    assert codes(both) == [-9, 1]


REAPS = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: a process whose parent ends becomes a child of this one
run = subprocess.Popen([sys.executable, "-m", "genlight.adapter.cli", "run", sys.argv[1]])
codes = [run.wait()]
try:
    while True:
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
except ChildProcessError:
    print("codes", codes)
"""


def test_exit_code_of_a_rank_that_genlight_started(job):
    """Ranks of torchrun are tested in ``test_launchers.py``."""
    job.write_for_two_ranks({"cancels": 8}, cancel_file_path="cancel")
    done = subprocess.run(
        [sys.executable, "-c", REAPS, str(job.spec)],
        cwd=job.folder, env=job.process_environ(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert "codes [75, 75]" in done.stdout, done.stderr
    assert job.terminal_event()["error"] == "canceled"
