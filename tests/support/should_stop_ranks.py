"""One rank whose training is ended by rank zero alone: ``should_stop_ranks.py RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from rank_environment import Ranks

from genlight.adapter import ContractModule, StepResult
from genlight.adapter.training_loop import BatchStream
from genlight.callbacks import EarlyStopping, LogMetrics
from genlight.callbacks.compat import Callback, CallbackList

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Improves:
    """Its loss falls for longer on rank 1, which is not asked."""

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        return {"step": 0}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["step"] += 1
        return StepResult(metrics={"loss": 100.0 - min(state["step"], 5 if RANK == 0 else 50)})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Stops(Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.should_stop = trainer.global_step >= 7


def last_step(name: str, *callbacks: pl.Callback) -> int:
    store = dist.FileStore(str(FOLDER / f"store {name}"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=DDPStrategy(cluster_environment=Ranks(RANK, WORLD_SIZE), process_group_backend="gloo"),
        max_steps=60,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=FOLDER,
        callbacks=list(callbacks),
    )
    trainer.fit(ContractModule(Improves()), BatchStream(range(60)))
    dist.destroy_process_group()
    return trainer.global_step


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        "six hooks": last_step("six hooks", CallbackList([Stops()], defaults=False)),
        "early stopping": last_step("early stopping", LogMetrics(1), EarlyStopping("loss", 18)),
    }
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
