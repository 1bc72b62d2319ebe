"""Progress of inputs for people: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from genlight.adapter.inputs import progress
from genlight.adapter.inputs.progress import InputProgress, shown_progress


def test_without_a_terminal_each_finished_input_is_a_line(caplog):
    caplog.set_level(logging.INFO)
    with shown_progress() as report:
        report(InputProgress("http://h/a", 1, 2))
        report(InputProgress("http://h/a", 2_500_000, 2_500_000, finished=True))
    assert caplog.messages == ["http://h/a is here (2.5 MB)"]


def test_a_long_transfer_is_a_line_now_and_then(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with shown_progress() as report:
        report(InputProgress("http://h/a", 1_000_000, 4_000_000))
        report(InputProgress("http://h/b", 1_000_000, None))
    assert caplog.messages == ["http://h/a: 1.0 MB of 4.0 MB", "http://h/b: 1.0 MB"]


@pytest.mark.parametrize("total", [None, 10])
def test_on_a_terminal_there_is_a_bar_for_each_input(monkeypatch, total):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with shown_progress() as report:
        report(InputProgress("http://h/folder/a.parquet", 5, total))
        report(InputProgress("http://h/folder/a.parquet", 10, total, finished=True))
    assert "a.parquet" in terminal.getvalue()
