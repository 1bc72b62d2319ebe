"""Several threads that end one attempt: one of them reports, and nobody takes that away."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from genlight.reporters import read_events

RANK_AND_HANG = """
import os, sys, threading, time
from pathlib import Path
from genlight.adapter.contract.exceptions import RankFailed
from genlight.adapter.run.ranks.failure_notes import RankFailures
from genlight.adapter.job.config import resolve_run_config
from genlight.adapter.run.outcome import Outcome
from genlight.adapter.run.progress import Progress
from genlight.adapter.run.training import stop_sources
from genlight.callbacks import WatchHangs
from genlight.callbacks.stop.signals import StopSignals
from genlight.reporters import EventLog

spec, out = sys.argv[1:]
config = resolve_run_config(spec_path=Path(spec), overrides=(f"artifacts_dir={out}",), environ=os.environ)
event_log = EventLog(config.events_path, run_id=config.run_id)
event_log.started()
reporting, hung = threading.Event(), threading.Event()

class SlowProgress(Progress):
    @property
    def stage(self):
        reporting.set()
        hung.wait()
        time.sleep(0.5)  # in which the other thread would end the process
        return "train-step"

stop = stop_sources(config, StopSignals())
ranks = RankFailures(config.artifacts_dir, expects_ranks=False)
outcome = Outcome(config, event_log, stop, SlowProgress(event_log), ranks)

def on_hang(error):
    hung.set()
    outcome.fail_and_exit(error)

threading.Thread(target=outcome.fail_and_exit, args=(RankFailed("rank 1 ended with exit code 1"),)).start()
reporting.wait()
watch = WatchHangs(end_run=True)
watch.on_hang = on_hang
watch._report(config.artifacts_dir / "hangs", 0, 1, 5.0, time.time())
"""


@pytest.mark.slow
def test_a_hang_that_is_noticed_while_another_ranks_failure_is_reported_does_not_cut_the_report_off(tmp_path):
    spec, out = tmp_path / "job.json", tmp_path / "out"
    spec.write_text(json.dumps({"run_id": "r", "trainer": "a:B", "max_steps": 5}))
    command = [sys.executable, "-c", RANK_AND_HANG, spec, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 1, done.stderr
    *_, last = read_events(out / "metrics" / "events.jsonl")
    assert (last["event"], last["category"]) == ("failed", "train-step")
    assert "rank 1 ended with exit code 1" in last["error"]
