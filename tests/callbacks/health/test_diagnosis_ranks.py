"""All ranks reach the same verdict, also about a fault that only one of them saw."""

import platform
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter import ContractModule
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Diagnosis
from genlight.reporters.telemetry import read_events
from support.rank import Rank
from support.rank_processes import on_ranks
from support.trainer_class import Trains

pytestmark = pytest.mark.slow


STEPS = 12
SLEEP_S = 0.25


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of_batch(model: nn.Module, batch: torch.Tensor, fault: str) -> torch.Tensor:
    """Slow down a step or break a batch on rank 1."""
    if dist.get_rank() == 1 and fault == "sleeps":
        time.sleep(SLEEP_S)
    if dist.get_rank() == 1 and fault == "nan":
        batch = batch * float("nan")
    return (model(batch) - 1).square().mean()


class Plain(pl.LightningModule):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net, self.fault = net(), fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of_batch(self.net, batch, self.fault)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Contract(Trains):
    """The same as a trainer class."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def model(self) -> nn.Module:
        return net()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    def loss(self, batch: torch.Tensor, state: Any) -> torch.Tensor:
        return loss_of_batch(state["model"], batch, self.fault)


def faults_of(rank: Rank, module: pl.LightningModule, fault: str, name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0 if fault == "shared" else rank.number)
    batches = [torch.randn(3, 4, generator=generator) for _ in range(STEPS)]
    diagnosis = Diagnosis(6, path=rank.folder / f"{name} {fault}.jsonl")
    strategy = rank.strategy("sharded", save_distributed_checkpoint=False) if name == "sharded" else "ddp"
    trainer = rank.trainer(diagnosis, strategy=strategy, max_steps=STEPS, max_epochs=1)
    with rank.group(f"store {name} {fault}"):
        trainer.fit(module, BatchStream(batches))
    return {kind: [found.text, found.step, dict(found.figures)] for kind, found in diagnosis.faults.items()}


def diagnose_on_rank(rank: Rank) -> dict[str, Any]:
    found = {}
    for fault in ("none", "sleeps", "nan", "shared"):
        found[f"contract {fault}"] = faults_of(rank, ContractModule(Contract(fault)), fault, "contract")
        found[f"plain {fault}"] = faults_of(rank, Plain(fault), fault, "plain")
    found["sharded nan"] = faults_of(rank, ContractModule(Contract("nan")), "nan", "sharded")
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("diagnosis")
    return folder, on_ranks(diagnose_on_rank, folder)[0]


def test_every_rank_has_the_same_verdict_and_only_rank_zero_writes_it(outcomes) -> None:
    folder, (first, second) = outcomes
    assert first == second
    for name, faults in first.items():
        written = read_events(folder / f"{name}.jsonl")
        assert [event["artifacts"]["fault"] for event in written] == list(faults)


@pytest.mark.parametrize("module", ["contract", "plain"])
def test_the_planted_faults_are_reported(outcomes, module: str) -> None:
    _, (found, _) = outcomes
    text, _, figures = found[f"{module} sleeps"]["straggler"]
    assert figures["rank"] == 1
    assert figures["host"] == platform.node()
    assert figures["step_seconds"] >= 0.25
    assert text.startswith(f"rank 1 on {platform.node()} takes")

    assert found[f"{module} nan"]["nonfinite_loss"][2]["first_step"] == 1
    assert found[f"{module} nan"]["nonfinite_gradients"][1] == 6

    assert found[f"{module} shared"]["repeated_data"][0] == "all ranks train on the same batch"

    for fault in ("none", "nan", "sleeps"):  # each rank has its own data
        assert "repeated_data" not in found[f"{module} {fault}"]


def test_sharded_parameters_are_named_on_all_ranks(outcomes) -> None:
    _, (found, _) = outcomes
    assert set(found["sharded nan"]) == {"nonfinite_loss", "nonfinite_gradients"}
    assert found["sharded nan"]["nonfinite_gradients"][2]["count"] == 4
