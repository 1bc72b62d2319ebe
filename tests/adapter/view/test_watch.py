"""``genlight watch`` on a pseudo-terminal."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from genlight.adapter.cli import main
from support.seen_runs import start
from support.terminal import Terminal

pytestmark = [pytest.mark.promise(name="events"), pytest.mark.slow]


def test_runs_are_shown_on_eighty_columns_and_keys_change_the_view(runs, tmp_path):
    done, broken = str(runs / "done"), str(runs / "broken")
    with Terminal(["watch", done, broken, str(tmp_path / "later")]) as terminal:
        screen = terminal.shows("train/loss, over steps", "completed", "failed", "waiting", "40/40", "checkpoints")
        assert "⢕⢕ done" in screen, "the curves lie over each other, with their names"
        assert "⢕⢕ broken" in screen
        assert "final  " in screen
        assert all(len(line) <= 80 for line in screen.splitlines())
        for key in ("n p metric", "+ - smooth", "t time", "tab run", "scroll", "s stop", "q quit"):
            terminal.shows(key)  # the footer is drawn last

        terminal.press("+")
        terminal.shows("train/loss, smoothed 0.6, over steps")
        terminal.press("-t")
        terminal.shows("train/loss, over minutes")
        terminal.press("tp")
        terminal.press("n")
        terminal.shows("train/loss, over steps")
        terminal.press("ppp")
        terminal.shows("bell\\x07, over steps")
        terminal.press("p")
        terminal.shows("<img src=x onerror=alert(1)>, over steps")
        terminal.press("\t")
        terminal.shows("no <b>luck</b>")
        terminal.press("s")
        terminal.shows("broken is not running")
        terminal.press("\t")
        terminal.shows("later has not started")
        shutil.copytree(runs / "killed", tmp_path / "later")
        terminal.shows("lost", "It was lost")
        terminal.press("q")
        assert terminal.ended() == 0
    assert b"bell\x07" not in terminal.received


def test_everything_of_a_run_is_there_and_scrolls(runs, tmp_path):
    folder = shutil.copytree(runs / "done", tmp_path / "done")
    (folder / "uploads").mkdir()
    (folder / "uploads/000000001.json").write_text("{}")
    with Terminal(["watch", str(folder)], columns=100, rows=120) as terminal:
        terminal.shows("picture.png", "fake.png  <script>alert(1)</script>", "a <b>cat</b>", "1 wait")
        terminal.shows("ranks", "accelerator cpu", "machine")
        terminal.press("q")
        assert terminal.ended() == 0
    with Terminal(["watch", str(folder)]) as terminal:
        assert "machine" not in terminal.shows("samples")
        terminal.press("\x1b[B" * 60)
        terminal.shows("machine")
        terminal.press("q")
        assert terminal.ended() == 0


def test_a_live_run_continues_until_a_key_stops_it(tmp_path):
    folder = tmp_path / "runs/live"
    with Terminal(["watch", str(folder)]) as terminal:
        terminal.shows("waiting")
        process = start(tmp_path, "live", max_steps=1_000_000, hyperparams={"pause_s": 0.005})
        try:
            terminal.shows("running", "/s")
            terminal.press("sy")
            terminal.shows("requested")
            terminal.shows("It was stopped (canceled)")
            assert process.wait(timeout=120) == 75
        finally:
            process.kill()
            process.communicate()
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.press("q")
        assert terminal.ended() == 0


def _ignore_hang_ups():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.parametrize("preexec", [None, _ignore_hang_ups], ids=["terminal of no session", "nohup"])
def test_a_view_ends_with_its_terminal(runs, preexec):
    with Terminal(["watch", str(runs / "done")], preexec=preexec) as terminal:
        terminal.shows("train/loss, over steps")
        terminal.close()
        assert terminal.process.wait(timeout=120) == -signal.SIGHUP


def test_watch_refuses_a_file_and_needs_a_terminal(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["watch", str(tmp_path / "file")]) == 2
    assert main(["watch", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is not a folder" in said
    assert "it needs a terminal" in said
