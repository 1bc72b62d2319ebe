"""Hooks of a trainer class that change the mode of modules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genlight.adapter import StepResult
from genlight.callbacks import Checkpoint, Evaluate, WriteSamples
from support.trainer_class import Counts


class ChangesMode(Counts):
    """One of its hooks changes the mode of the model, but not of a teacher in eval mode."""

    def __init__(self, hook: str) -> None:
        self.hook, self.modes = hook, []

    def configure(self, ctx: Any) -> Any:
        layers = [torch.nn.Linear(1, 1), torch.nn.Dropout(), torch.nn.BatchNorm1d(1).eval()]
        self.model, self.teacher = torch.nn.Sequential(*layers), torch.nn.Linear(1, 1).eval()
        return {
            "model": self.model,
            "teacher": self.teacher,
            "generate_sample": lambda: self.change_mode("generate_sample"),
        }

    def change_mode(self, hook: str) -> dict[str, float]:
        if hook == self.hook:
            self.model.eval()
        if hook == "evaluate" and self.hook == "trains a frozen layer":
            self.model.train()
        return {}

    def evaluate(self, state: Any, ctx: Any) -> Any:
        return self.change_mode("evaluate")

    def save_checkpoint(self, *, state: Any, step: int, output_dir: str, final: bool, ctx: Any) -> Any:
        self.change_mode("save_checkpoint")

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: Any) -> None: ...

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        self.modes.append([part.training for part in (*self.model.modules(), self.teacher)])
        return StepResult({"loss": 1.0})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("evaluate", "`evaluate` changed the mode of 3 modules, the first of them model"),
        ("generate_sample", "`generate_sample` changed the mode of 3 modules, the first of them model"),
        ("save_checkpoint", "`save_checkpoint` changed the mode of 3 modules, the first of them model"),
        ("trains a frozen layer", "`evaluate` changed the mode of 1 modules, the first of them model.2"),
        ("none", ""),
    ],
)
def test_training_continues_in_its_modes_and_the_hook_is_named(
    fit: Any, tmp_path: Path, caplog: Any, hook: str, message: str
) -> None:
    plugin = ChangesMode(hook)
    callbacks = [Evaluate(2), WriteSamples(tmp_path / "s", 2), Checkpoint(tmp_path / "c", every_n_steps=2)]

    fit(plugin, callbacks, steps=6, enable_checkpointing=True)

    assert plugin.modes == [[True, True, True, False, False]] * 6
    assert caplog.text.count("changed the mode of") == (hook != "none")
    assert message in caplog.text
