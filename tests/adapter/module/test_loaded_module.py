"""``ContractModule.load_from_checkpoint``: a trainer class from a checkpoint, without a Lightning trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint
from genlight.callbacks.checkpoint.export import export_lightning
from support.messages import refusal
from support.trainer_class import Trains
from support.trainers import quiet_trainer

JOB = TrainingJobSpec(run_id="r", max_steps=3, hyperparams={"width": 2})


class Remembers(Trains):
    """A model, a number that is only in the trainer's own payload, and files of the trainer."""

    def configure(self, ctx: Any) -> dict[str, Any]:
        model = torch.nn.Linear(ctx.job.hyperparams["width"], 1).to(ctx.device)
        return {"model": model, "optimizer": self.optimizer(model.parameters()), "seen": 0, "files": ""}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["seen"] += len(batch)
        return super().train_step(batch, state, ctx)

    def state_dict(self, state: Any) -> dict[str, object]:
        return {"seen": state["seen"]}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["seen"] = payload["seen"]

    def save_checkpoint(self, *, state: Any, step: int, output_dir: str, final: bool, ctx: Any) -> None:
        Path(output_dir, "notes").write_text(f"of step {step}")

    def load_checkpoint(self, *, state: Any, checkpoint_dir: str, payload: Any, ctx: Any) -> None:
        state["files"] = Path(checkpoint_dir, "notes").read_text()


def fit(module: ContractModule, folder: Path, *, steps: int = 3, **options: Any) -> None:
    trainer = quiet_trainer(Checkpoint(folder / "checkpoints"), max_steps=steps)
    trainer.fit(module, DataLoader(torch.randn(12, 2), batch_size=2), **options)


@pytest.fixture
def trained(tmp_path: Path) -> ContractModule:
    """A module that was trained for three steps; its checkpoint is in the test's folder."""
    module = ContractModule(Remembers(), JOB)
    fit(module, tmp_path)
    return module


@pytest.mark.parametrize("named", ["checkpoints/final.json", "checkpoints/final", "checkpoints", ""])
def test_weights_payload_and_files_are_those_of_the_checkpoint(
    trained: ContractModule, tmp_path: Path, named: str
) -> None:
    loaded = ContractModule.load_from_checkpoint(tmp_path / named, plugin=Remembers(), job=JOB)

    assert torch.equal(loaded.contract_state["model"].weight, trained.contract_state["model"].weight)
    assert (loaded.contract_state["seen"], loaded.contract_state["files"]) == (6, "of step 3")
    assert loaded.hosted_trainer.restored_step == 3
    assert (loaded.ctx.device, loaded.ctx.dtype) == ("cpu", "fp32")


def test_an_exported_checkpoint_loads_only_weights(trained: ContractModule, tmp_path: Path) -> None:
    exported = export_lightning(tmp_path / "checkpoints" / "final", tmp_path / "x.ckpt")

    loaded = ContractModule.load_from_checkpoint(exported, plugin=Remembers(), job=JOB)

    assert torch.equal(loaded.contract_state["model"].weight, trained.contract_state["model"].weight)
    assert loaded.contract_state["seen"] == 0


def test_a_loaded_module_can_be_trained_from_its_weights(trained: ContractModule, tmp_path: Path) -> None:
    loaded = ContractModule.load_from_checkpoint(tmp_path, plugin=Remembers(), job=JOB)
    before = loaded.contract_state["model"].weight.clone()

    fit(loaded, tmp_path / "again", steps=2)

    assert loaded.completed_steps == 2
    assert loaded.contract_state["seen"] == 6 + 4
    assert not torch.equal(loaded.contract_state["model"].weight, before)


def test_a_trainer_finds_its_files_however_the_checkpoint_was_named(trained: ContractModule, tmp_path: Path) -> None:
    for named in ("checkpoints/final.json", "checkpoints/final", "checkpoints"):
        module = ContractModule(Remembers(), JOB)
        fit(module, tmp_path / "other", steps=4, ckpt_path=str(tmp_path / named))
        assert module.contract_state["files"] == "of step 3"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs `plugin`, the trainer class of the checkpoint"),
        ({"plugin": Remembers(), "hparams_file": "h.yaml"}, "takes no `hparams_file`; pass `job`"),
    ],
)
def test_missing_or_unusable_arguments_are_refused(
    trained: ContractModule, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        ContractModule.load_from_checkpoint(tmp_path / "checkpoints" / "final.json", **arguments)


def test_weights_of_another_shape_are_refused_by_name(trained: ContractModule, tmp_path: Path) -> None:
    wider = TrainingJobSpec(run_id="r", max_steps=3, hyperparams={"width": 5})
    with refusal(RuntimeError):
        ContractModule.load_from_checkpoint(tmp_path, plugin=Remembers(), job=wider)
