"""Progress of inputs for people."""

from __future__ import annotations

import logging

from genlight.adapter.inputs import progress
from genlight.adapter.inputs.progress import InputProgress, log_progress


def test_each_finished_input_is_a_line(caplog):
    caplog.set_level(logging.INFO)
    report = log_progress()
    report(InputProgress("http://h/a", 1, 2))
    report(InputProgress("http://h/a", 2_500_000, 2_500_000, finished=True))
    assert caplog.messages == ["http://h/a is here (2.5 MB)"]


def test_a_long_transfer_is_a_line_now_and_then(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    report = log_progress()
    report(InputProgress("http://h/a", 1_000_000, 4_000_000))
    report(InputProgress("http://h/b", 1_000_000, None))
    assert caplog.messages == ["http://h/a: 1.0 MB of 4.0 MB", "http://h/b: 1.0 MB"]
