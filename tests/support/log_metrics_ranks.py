"""One rank of the test of metrics of several ranks: ``log_metrics_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger

from genlight.adapter import ContractModule, StepControlHints, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import Hook, LogMetrics
from support.rank import Rank
from support.trainer_class import Counts

RANK = Rank.of_command_line()


class Mine(Counts):
    """Its loss is ten times the rank; rank 1 has one more metric, and suppresses the report of step 4."""

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        more = {"only/one": 7.0} if RANK.number == 1 else {}
        skips = RANK.number == 1 and ctx.step + 1 == 4
        return StepResult({"loss": 10.0 * RANK.number, **more}, {}, StepControlHints(skip_cadence_emit=skips))


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


class Heard(Hook):
    ranks = "all"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Any, step: int) -> None:
        self.losses.append(metrics["train/loss"])


def train(**arguments: Any) -> dict[str, Any]:
    logger, heard, exchanges = Recorder(), Heard(), 0
    gather = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return gather(*args, **kwargs)

    dist.all_gather_object = counted
    trainer = RANK.trainer(LogMetrics(2, **arguments), heard, max_steps=7, logger=logger)
    trainer.fit(ContractModule(Mine()), BatchStream(range(100)))
    dist.all_gather_object = gather
    return {"logged": logger.logged, "losses": heard.losses, "exchanges": exchanges}


if __name__ == "__main__":
    with RANK.group():
        RANK.leave({"zero": train(), "mean": train(reduce="mean")})
