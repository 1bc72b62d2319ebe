"""The cost of the witness, as a share of steps of 1 ms.

    python examples/benchmarks/witness.py

An entry holds digests of the batch, of all random states and of the losses. It is written in the first steps after
each checkpoint, and then at the cadence of metrics (every 10 steps by default) or more rarely. The figures are CPU
times of one thread. Every step reads 16 MB, so that an entry finds the processor's caches as a training leaves them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint

STEP_MS = 1.0
CADENCE = 10
BATCHES: dict[str, Callable[[], Any]] = {
    "8 rows of 16 numbers": lambda: torch.randn(8, 16),
    "64 images, 3 x 32 x 32": lambda: {"image": torch.randn(64, 3, 32, 32), "label": torch.arange(64)},
    "64 images, 3 x 224 x 224": lambda: {"image": torch.randn(64, 3, 224, 224), "label": torch.arange(64)},
    "32 texts": lambda: {"text": [f"sentence {row} of a batch" for row in range(32)]},
}


class Nothing:
    """A trainer class whose step reads memory and returns a loss."""

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "read": torch.ones(4 << 20)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        return StepResult(metrics={"loss": state["read"].mean()})

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Timed(pl.Callback):
    """Measures the witness of a checkpoint callback in every step."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.taken_us = checkpoint, list[float]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        witness: Any = self.checkpoint._witness
        observe = witness.observe
        witness._cadence = lambda step: 1

        def timed(*arguments: Any) -> Any:
            began_s = time.process_time()
            proof = observe(*arguments)
            self.taken_us.append((time.process_time() - began_s) * 1e6)
            return proof

        witness.observe = timed


def entry_us(batch: Any, steps: int) -> float:
    """Return the median CPU microseconds of one entry."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder, "c"), save_final=False, every_n_steps=10 * steps)
        timed = Timed(checkpoint)
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            max_steps=steps,
            callbacks=[checkpoint, timed],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        module = ContractModule(Nothing(), TrainingJobSpec("witness", steps))
        trainer.fit(module, DataLoader([batch] * steps, batch_size=None))
    return statistics.median(timed.taken_us[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{'batch':28}{'an entry':>12}{f'of {CADENCE} steps of {STEP_MS:g} ms':>26}")
    for name, make in BATCHES.items():
        took_us = entry_us(make(), steps)
        print(f"{name:28}{took_us:>9.0f} us{took_us / 1000 / (CADENCE * STEP_MS):>26.2%}")


if __name__ == "__main__":
    main()
