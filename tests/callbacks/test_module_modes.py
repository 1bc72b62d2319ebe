"""Hooks of a trainer class that leave modules in another mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import StepResult
from genlight.callbacks import Checkpoint, Evaluate, WriteSamples


class Leaves:
    """One of its hooks leaves the model in another mode, and a teacher in eval mode as it was."""

    def __init__(self, hook: str) -> None:
        self.hook, self.modes = hook, []

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> Any:
        layers = [torch.nn.Linear(1, 1), torch.nn.Dropout(), torch.nn.BatchNorm1d(1).eval()]
        self.model, self.teacher = torch.nn.Sequential(*layers), torch.nn.Linear(1, 1).eval()
        return {"model": self.model, "teacher": self.teacher, "generate_sample": lambda: self.leave("generate_sample")}

    def leave(self, hook: str) -> dict[str, float]:
        if hook == self.hook:
            self.model.eval()
        if hook == "evaluate" and self.hook == "trains a frozen layer":
            self.model.train()
        return {}

    def evaluate(self, state: Any, ctx: Any) -> Any:
        return self.leave("evaluate")

    def save_checkpoint(self, *, state: Any, step: int, output_dir: str, final: bool, ctx: Any) -> Any:
        self.leave("save_checkpoint")

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: Any) -> None: ...

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        self.modes.append([part.training for part in (*self.model.modules(), self.teacher)])
        return StepResult({"loss": 1.0})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        ("evaluate", "`evaluate` changed the mode of modules"),
        ("generate_sample", "`generate_sample` changed"),
        ("save_checkpoint", "`save_checkpoint` changed"),
        ("trains a frozen layer", 'for example: state["model"].2.'),
        ("none", ""),
    ],
)
def test_training_goes_on_in_the_modes_that_it_had_and_the_hook_is_named_once(
    fit: Any, tmp_path: Path, caplog: Any, hook: str, named: str
) -> None:
    plugin = Leaves(hook)
    callbacks = [Evaluate(2), WriteSamples(tmp_path / "s", 2), Checkpoint(tmp_path / "c", every_n_steps=2)]

    fit(plugin, callbacks, steps=6, enable_checkpointing=True)

    assert plugin.modes == [[True, True, True, False, False]] * 6
    assert caplog.text.count("changed the mode of modules") == (hook != "none")
    assert named in caplog.text
    if hook in ("evaluate", "generate_sample", "save_checkpoint"):
        assert 'state["model"].' in caplog.text
        assert 'state["model"].1' not in caplog.text
