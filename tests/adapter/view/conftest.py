"""Runs as they are on disk: completed, failed, and killed."""

from __future__ import annotations

import os
import signal

import pytest

from support.seen_runs import start, wait_for_step

SCORED = {"validate": {"every_n_steps": 10}, "checkpoints": {"monitor": "score", "mode": "max", "keep_last": 0}}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with the runs ``done``, ``broken`` (an error after 15 steps) and ``killed``."""
    folder = tmp_path_factory.mktemp("seen")
    done, broken = start(folder, "done", **SCORED), start(folder, "broken", hyperparams={"fails_at": 15, "lr": 0.2})
    killed = start(folder, "killed", max_steps=100000, hyperparams={"pause_s": 0.002})
    try:
        wait_for_step(folder / "runs/killed", 12)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        errors = [process.communicate()[1] for process in (done, broken, killed)]
    assert (done.returncode, broken.returncode) == (0, 1), errors
    return folder / "runs"
