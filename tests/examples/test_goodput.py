"""A run that is killed three times accounts for all of its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest


@pytest.mark.slow
def test_the_parts_of_a_run_that_is_killed_three_times_sum_to_its_wall_time(examples, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=290
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    began_s = time.time()
    shown = run(str(examples / "goodput" / "killed_run.py"))
    real_s = time.time() - began_s

    assert shown.count("killed after step") == 3
    assert "s in 4 attempts;" in shown
    account = json.loads(run("-m", "genlight", "events", "runs/killed", "--goodput", "--json"))
    seconds = account["seconds"]
    assert account["attempts"] == 4
    assert sum(seconds.values()) == pytest.approx(account["wall_s"], rel=0.01)
    assert account["wall_s"] <= real_s
    for part in ("steps", "start_up", "lost", "idle", "checkpoint"):
        assert seconds[part] > 0, part
    assert min(seconds.values()) >= 0
