"""The progress that ``genlight run`` and ``genlight fit`` show on a terminal, also when Ctrl-C ends them."""

from __future__ import annotations

import re

import pytest

from support.seen_runs import write_job
from support.terminal import Terminal

pytestmark = pytest.mark.slow

FIT = """
trainer:
  max_epochs: 2
  accelerator: cpu
  logger: false
  enable_model_summary: false
  callbacks: [{class_path: genlight.callbacks.LogMetrics, init_args: {every_n_steps: 2}}]
model: {class_path: genlight.adapter.ContractModule, init_args: {plugin: "tiny:Tiny", job: JOB}}
data: {class_path: genlight.adapter.MockDataModule, init_args: {batches: [[[1.0, 2.0]], [[1.0, 2.0]]]}}
"""


def test_ctrl_c_leaves_one_complete_bar_and_the_next_start_shows_the_true_remainder(tmp_path):
    job = write_job(tmp_path, "live", max_steps=100_000, hyperparams={"pause_s": 0.01}, checkpoint_every=10)
    with Terminal(["run", job], columns=160, cwd=tmp_path) as terminal:
        terminal.shows("Tiny: 3 parameters, cpu, 32-true, 100,000 steps", "loss", "steps/s  eta", "lr 0.1", "saved")
        terminal.press("\x03")
        assert terminal.ended() == 75
        screen = terminal.screen
        bars = [line for line in screen.splitlines() if line.startswith("step ")]
        stopped = re.match(r"step (\d+)/100000 ", bars[-1])[1]
        assert "a second signal after 3 s ends it now" in screen
        assert "Traceback" not in screen
        assert terminal.received.rindex(b"\x1b[?25h") > terminal.received.rindex(b"\x1b[?25l"), "the cursor is back"
    with Terminal(["run", job], columns=160, cwd=tmp_path) as terminal:
        terminal.shows("100,000 steps", f"continuing after step {int(stopped):,}", "steps/s  eta 0:")
        terminal.press("\x03")
        assert terminal.ended() == 75


def test_a_fit_has_the_same_bar_with_messages_above_it(tmp_path):
    write_job(tmp_path, "x")
    config = FIT.replace("JOB", "{run_id: x, max_steps: 1000, hyperparams: {lr: 0.1}}")
    (tmp_path / "fit.yaml").write_text(config.replace("enable_model_summary: false", "enable_model_summary: true"))
    with Terminal(["fit", "--config", "fit.yaml"], columns=160, rows=60, cwd=tmp_path) as terminal:
        assert terminal.ended() == 0
        lines = terminal.screen.splitlines()
        assert "Tiny: 3 parameters, cpu, 32-true, 1,000 steps" in lines
        summary = next(number for number, line in enumerate(lines) if "Name" in line and "Params" in line)
        assert lines.index("Tiny: 3 parameters, cpu, 32-true, 1,000 steps") < summary, "Lightning's own words follow"
        assert [line for line in lines if line.startswith("WARNING: the source of batches ended")], "above the bar"
        assert [line for line in lines if line.startswith("step 4/1000 ")], terminal.screen
        assert "Epoch" not in terminal.screen
