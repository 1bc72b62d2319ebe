"""One rank of the guard's tests; started once per rank: ``replica_guard_ranks.py RANK WORLD_SIZE RANK.folder``."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from genlight.adapter.contract.types import StepResult, TrainingJobSpec
from genlight.adapter.feed.data_module import MockDataModule
from genlight.adapter.module.module import ContractModule
from genlight.callbacks.replica_guard import ReplicaGuard
from support.rank import Rank
from support.trainer_class import Trains

RANK = Rank.of_command_line()


class Module(pl.LightningModule):
    """Trains as Lightning's users do; on rank 1 something may go wrong before a step."""

    def __init__(self, fault: str, at_step: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.fault, self.at_step = fault, at_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(torch.ones(3, 4)).square().mean()

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if RANK.number == 1 and batch_idx == self.at_step:
            if self.fault == "one bit":
                self.net[2].weight.view(-1)[0] = torch.nextafter(self.net[2].weight.view(-1)[0], torch.tensor(9.0))
            elif self.fault == "two signs":
                self.net[2].weight.view(-1)[[1, 3]] *= -1
            elif self.fault == "rate":
                self.optimizers().param_groups[0]["lr"] = 0.05
            elif self.fault == "buffer":
                self.net[1].running_mean.add_(1)
            elif self.fault == "all":
                for tensor in self.parameters():
                    tensor.add_(0.5)
                for tensor in self.buffers():
                    tensor.add_(1)
        if self.fault == "nan":
            self.net[0].weight.fill_(torch.nan)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(list(range(12)))


class SavesAtStepThree(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(RANK.folder / "three.ckpt")


def end_of(trainer: pl.Trainer, module: pl.LightningModule, **data: Any) -> str:
    try:
        trainer.fit(module, **data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"finished {trainer.global_step}"


def outcome(fault: str, at_step: int, every_n_steps: int | None, *others: pl.Callback) -> str:
    strategy = RANK.strategy(broadcast_buffers=fault != "buffer")
    trainer = RANK.trainer(ReplicaGuard(every_n_steps), *others, strategy=strategy, max_steps=6)
    return end_of(trainer, Module(fault, at_step))


class OwnRate(Trains):
    """Halves its learning rate by the loss of its rows; the counter is in the optimizer and in a schedule."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def configure(self, ctx: Any) -> dict[str, Any]:
        state = super().configure(ctx)
        return {**state, "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer"], patience=100)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return torch.full((3, 4), 1.0 + ctx.rank)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        result = super().train_step(batch, state, ctx)
        self.decide(state, float(result.metrics["loss"]))
        return result

    def decide(self, state: Any, loss: float) -> None:
        state["plateau"].step(1.0)
        if RANK.number == 1:
            state["optimizer"].param_groups[0]["lr"] = 0.05


class OwnSchedule(OwnRate):
    def decide(self, state: Any, loss: float) -> None:
        state["plateau"].step(loss)


class SharedRate(OwnRate):
    def decide(self, state: Any, loss: float) -> None:
        state["optimizer"].param_groups[0]["lr"] *= 0.9
        state["plateau"].step(1.0)


def sharded(cls: type[OwnRate]) -> str:
    trainer = RANK.trainer(ReplicaGuard(1), strategy="sharded", max_steps=6)
    module = ContractModule(cls(), TrainingJobSpec(run_id="guard", max_steps=6, metric_every=0))
    return end_of(trainer, module, datamodule=MockDataModule([{"row": i} for i in range(12)]))


def main() -> None:
    cases = [("none", 0, 1), ("one bit", 2, 1), ("one bit", 2, 4), ("one bit", 2, 0), ("one bit", 5, 100)]
    cases += [("two signs", 2, 1), ("buffer", 1, 2), ("all", 1, 2), ("nan", 0, 1)]
    results = {f"{fault} at {step} checked {every}": outcome(fault, step, every) for fault, step, every in cases}
    results["one bit at 2 checked by default"] = outcome("one bit", 2, None)
    results["one bit at 2 checked with a checkpoint"] = outcome("one bit", 2, None, SavesAtStepThree())
    results["rate at 2 checked 1"] = outcome("rate", 2, 1)
    results |= {f"sharded {cls.__name__}": sharded(cls) for cls in (SharedRate, OwnRate, OwnSchedule)}
    RANK.leave(results)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with RANK.group():
        main()
