"""A step that runs out of memory is reported with the sizes of its parts and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlight.adapter.cli import main
from support.jobs import events_of, run, write_job

PROGRAM = """
import torch
from torch import nn
from support.trainer_class import Trains


class Large(Trains):
    def model(self):
        return nn.Linear(2, 1000, bias=False)

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw)

    def train_step(self, batch, state, ctx):
        if ctx.step == 1:
            self.loss(batch, state)
            torch.empty(10**15)  # more than any machine has: torch's own error
        return super().train_step(batch, state, ctx)
"""


def test_the_failure_names_the_line_the_sizes_a_setting_and_a_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large.py").write_text(PROGRAM)
    job = write_job(tmp_path, trainer="large:Large", mock_batches=[[[1.0, 2.0]]] * 3, seed=1)
    assert run(job) == 1
    end = events_of(job)[-1]
    assert (end["event"], end["category"], end["step"]) == ("failed", "train-step", 2)
    # 2,000 weights of 4 bytes, as many gradients, and as many values of momentum.
    assert "parameters 8.0 kB, gradients 8.0 kB, optimizer states 8.0 kB" in end["error"]
    assert "large.py:17" in end["error"]
    assert "accumulate gradients" in end["error"]
    command = end["error"].partition("`genlight ")[2].partition("`")[0].split()
    assert (command[0], command[2:]) == ("replay", ["--step", "2", "--memory"])

    capfd.readouterr()
    assert main(command) == 1, "the step runs out of memory again"
    shown = capfd.readouterr().out.partition("kept for backward")[2].split("\n")
    # The square keeps 1,000 outputs, and the layer its 2 inputs; weights are no activations.
    assert [line.split()[-2:] for line in shown if line] == [["4.0", "kB"], ["8", "B"], ["4.0", "kB"]]
    assert 'state["model"]' in shown[2]
