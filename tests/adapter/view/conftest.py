"""Runs as they are on disk: completed, failed, and killed."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest

from support.seen_runs import start, wait_for_step

SCORED = {"validate": {"every_n_steps": 10}, "checkpoints": {"monitor": "score", "mode": "max", "keep_last": 0}}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with the runs ``done``, ``broken`` (an error after 15 steps) and ``killed``; no test writes to it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make_runs(tmp_path_factory.mktemp("seen"))
    folder = tmp_path_factory.getbasetemp().parent / "seen"  # all processes of pytest-xdist share it
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            folder.mkdir()
            make_runs(folder)
            (folder / "complete").touch()
    return folder / "runs"


def make_runs(folder):
    done, broken = start(folder, "done", **SCORED), start(folder, "broken", hyperparams={"fails_at": 15, "lr": 0.2})
    killed = start(folder, "killed", max_steps=50_000, hyperparams={"pause_s": 0.002})
    try:
        wait_for_step(folder / "runs/killed", 12)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        errors = [process.communicate()[1] for process in (done, broken, killed)]
    assert (done.returncode, broken.returncode) == (0, 1), errors
    return folder / "runs"
