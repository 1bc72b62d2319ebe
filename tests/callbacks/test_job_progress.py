"""The progress of a run shows step, loss, speed and remaining time: one line on a terminal, several lines in a file."""

import contextlib
import os
import pty
import re
import threading
from types import SimpleNamespace

import pytest

from genlight.adapter.contract.exceptions import TrainingCanceled
from genlight.callbacks import Hook, JobProgress, LogMetrics
from genlight.callbacks.hook.events import fire, publish_scores

LINE = re.compile(
    r"step (\d+)(?:/(\d+))?(?:  loss (\S+))?(?:  ([\d.]+) steps/s)?(?:  eta (\S+))?(?:  lr (\S+))?(?:  saved (\d+))?"
)


@pytest.fixture
def lines(capsys):
    """A function that returns the progress lines on standard error; in a test, that is no terminal."""
    return lambda: [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]


@pytest.fixture
def terminal(monkeypatch):
    """A context with a terminal as standard error; its value has everything drawn after the context has ended."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")

    @contextlib.contextmanager
    def block():
        ours, theirs = pty.openpty()
        drawn = bytearray()
        reader = threading.Thread(target=read_all, args=(ours, drawn), daemon=True)
        reader.start()
        with open(theirs, "w", encoding="utf-8") as stderr, contextlib.redirect_stderr(stderr):
            yield drawn
        reader.join(timeout=60)
        os.close(ours)

    return block


def read_all(descriptor, into):
    try:
        while data := os.read(descriptor, 4096):
            into.extend(data)
    except OSError:  # on Linux: the other end was closed
        pass


def test_lines_show_step_loss_speed_and_remaining_time(fit, counting_trainer, lines):
    fit(counting_trainer(), [JobProgress(line_every_s=1e-9), LogMetrics(1)], steps=4)

    shown = [LINE.fullmatch(line) for line in lines()]
    assert all(shown)
    assert [match[1] for match in shown] == ["1", "2", "3", "4"]
    assert {match[2] for match in shown} == {"4"}
    assert [match[3] for match in shown] == ["1", "0.5", "0.3333", "0.25"]
    assert (shown[0][4], shown[0][5]) == (None, None), "the time of the first step is not typical"
    assert all(float(match[4]) > 0 for match in shown[1:])
    assert all(re.fullmatch(r"\d+:\d\d:\d\d", match[5]) for match in shown[1:-1])
    assert shown[-1][5] is None


def test_without_a_loss_and_without_a_limit_the_line_has_neither(fit_plain, lines):
    fit_plain([JobProgress(line_every_s=1e-9)], steps=-1, max_epochs=1)

    shown = lines()
    assert len(shown) == 16
    assert shown[0] == "step 1  epoch 1/1"
    line = re.compile(r"step \d+  [\d.]+ steps/s(  eta 0:00:\d\d)?  epoch 1/1")
    etas = [line.fullmatch(each)[1] for each in shown[1:]]
    assert all(etas[:-1]), "by the length of the data"
    assert etas[-1] is None


def test_speed_counts_only_the_steps_of_this_attempt(fit, counting_trainer, lines, monkeypatch):
    from genlight.adapter import ContractModule

    times = iter([130.0, 140.0, 140.0])
    # Only the name in that module: other threads of the process read the clock too.
    monkeypatch.setattr("genlight.callbacks.job_progress.time", SimpleNamespace(monotonic=lambda: next(times)))
    module = ContractModule(counting_trainer())
    module.resume_from(step=1000)

    fit(None, [JobProgress()], module=module, steps=1003)

    assert [LINE.fullmatch(line)[4] for line in lines()] == [None, "0.1", "0.2"]


class Stop(Hook):
    critical = True

    def __init__(self, at):
        self.at = at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.at:
            raise TrainingCanceled("canceled")


@pytest.mark.parametrize("columns", [120, 30])
@pytest.mark.parametrize("callbacks", [[], [Stop(3)]], ids=["ends", "is stopped"])
def test_a_terminal_gets_one_line_and_its_cursor_back(fit, counting_trainer, terminal, monkeypatch, columns, callbacks):
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal() as drawn, pytest.raises(TrainingCanceled) if callbacks else contextlib.nullcontext():
        fit(counting_trainer(), [LogMetrics(1), JobProgress(), *callbacks], steps=3)

    drawn = drawn.decode()
    last = drawn.rpartition("step 3/3  loss 0.3333")
    assert last[1]
    assert ("\u2026" if columns == 30 else "steps/s") in last[2]
    assert drawn.count("\n") == 2, "the header and this line"
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1


def test_a_header_describes_the_training(fit, fit_plain, counting_trainer, capsys):
    fit(counting_trainer(), [JobProgress()], steps=3)
    assert re.match(r"\w+: \d+ parameters, cpu, 32-true, 3 steps\n", capsys.readouterr().err)
    fit_plain([JobProgress()], steps=-1, max_epochs=2)
    assert "Plain: 5 parameters, cpu, 32-true, 2 epochs\n" in capsys.readouterr().err


def test_a_line_has_scores_returns_and_checkpoints_after_the_loss(fit, counting_trainer, lines):
    class Scores(Hook):
        writes = ("eval_scores",)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            publish_scores(trainer, {"acc\x1b[31m": 0.75}, trainer.global_step)
            fire(trainer, "on_checkpoint_durable", SimpleNamespace(step=trainer.global_step))
            pl_module.hosted_trainer.published["rollout/episode_return"] = 12.5

    fit(counting_trainer(), [LogMetrics(1), JobProgress(line_every_s=1e-9), Scores()], steps=3)
    assert "acc\\x1b[31m 0.75  rollout/episode_return 12.5  lr 0.5  saved 3" in lines()[-1]


def test_speed_is_measured_over_the_last_half_minute(fit, counting_trainer, lines, monkeypatch):
    times = iter([0.0, *(100.0 * step for step in range(1, 5)), *(400.0 + step for step in range(1, 60)), 459.0])
    monkeypatch.setattr("genlight.callbacks.job_progress.time", SimpleNamespace(monotonic=lambda: next(times)))
    fit(counting_trainer(), [JobProgress(line_every_s=1e-9)], steps=63)
    shown = {match[1]: (match[4], match[5]) for match in map(LINE.fullmatch, lines())}
    assert shown["4"] == ("0.01", "1:38:20"), "over two readings at least"
    assert shown["62"] == ("1.0", "0:00:01"), "without the slow steps at the beginning"


def test_a_stop_leaves_a_line_with_the_last_step(fit, counting_trainer, lines):
    with pytest.raises(TrainingCanceled):
        fit(counting_trainer(), [LogMetrics(1), JobProgress(line_every_s=3600), Stop(8)], steps=50)
    assert [LINE.fullmatch(line)[1] for line in lines()] == ["1", "8"]
