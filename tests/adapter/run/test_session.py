"""The end of an attempt: which thread reports it, and how long it may take."""

from __future__ import annotations

import signal

import pytest

from genlight.adapter.run.session import Session
from genlight.callbacks.stop.sources import StopSources
from genlight.reporters import read_events
from support.forked import run_forked

pytestmark = pytest.mark.promise(name="stop")

RANK_AND_HANG = """
import sys, threading, time
from pathlib import Path
from genlight.adapter.contract.exceptions import RankFailedError
from genlight.adapter.run.session import Session
from genlight.callbacks import WatchHangs
from genlight.callbacks.stop.sources import StopSources
from genlight.reporters import EventLog

out = Path(sys.argv[1])
reporting, hung = threading.Event(), threading.Event()

class SlowSession(Session):
    @property
    def stage(self):
        reporting.set()
        hung.wait()
        time.sleep(0.5)  # in which the other thread would end the process
        return "train-step"

session = SlowSession(stop=StopSources())
session.place(out, out / "checkpoints")
session.event_log = EventLog(out / "events.jsonl", run_id="r")
session.event_log.started()

def on_hang(error):
    hung.set()
    session.end_now(error)

threading.Thread(target=session.end_now, args=(RankFailedError("rank 1 ended with exit code 1"),)).start()
reporting.wait()
watch = WatchHangs(end_run=True)
watch.on_hang = on_hang
watch._report(out / "hangs", 0, 1, 5.0, time.time())
"""


@pytest.mark.slow
def test_a_hang_that_is_noticed_while_another_ranks_failure_is_reported_does_not_cut_the_report_off(tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    program = tmp_path / "rank_and_hang.py"
    program.write_text(RANK_AND_HANG)
    done = run_forked(out, program=str(program), folder=tmp_path)

    assert done.returncode == 1, done.stderr
    *_, last = read_events(out / "events.jsonl")
    assert (last["event"], last["category"]) == ("failed", "train-step")
    assert "rank 1 ended with exit code 1" in last["error"]


@pytest.mark.parametrize(
    ("environ", "within_s"),
    [
        ({}, 60),
        ({"TORCHELASTIC_RUN_ID": "r"}, 25),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40"}, 35),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}, 5),  # it is tried in any case
    ],
)
def test_after_a_stop_signal_the_end_waits_no_longer_than_the_launcher_lets_it_live(monkeypatch, environ, within_s):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    session = Session(stop=StopSources(), deadline_s=60.0)
    assert 50 < session._left_s() <= 60
    session.stop.signals._receive(signal.SIGTERM, is_late=False)
    assert within_s - 1 < session._left_s() <= within_s
