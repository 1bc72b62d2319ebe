"""The cost of `Diagnosis` at its default interval, as a share of steps of 5 ms.

    python examples/benchmarks/diagnosis.py

The figure is the CPU time of the training thread within its methods and hooks, over steps of several intervals. It does
not include the one reduction over ranks of each check. The step itself is small, and its cost does not count.
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from genlight.adapter import ContractModule, StepResult
from genlight.callbacks.health import readings
from genlight.callbacks.health.diagnosis import Diagnosis

STEP_MS = 5.0
MODELS = {
    "1 M parameters in 20 tensors": (10, 316),
    "1 M parameters in 200 tensors": (100, 99),
    "10 M parameters in 200 tensors": (100, 316),
}
TIMED = (
    (Diagnosis, "on_train_batch_end"),
    (readings.Probe, "_before_update"),
    (readings.Probe, "_after_update"),
    (readings.Probe, "_note_last_gradient"),
    (readings.Probe, "_note_output"),
    (readings.Probe, "_note_magnitude"),
)


class Trainer:
    """Layers of one width on batches of two rows."""

    def __init__(self, layers: int, width: int) -> None:
        self.layers, self.width = layers, width

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return torch.ones(2, self.width)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        state["optimizer"].zero_grad()
        loss = state["model"](batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Steps:
    """A source of one batch for each step."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def cost_us(layers: int, width: int, checks: int, interval: int) -> float:
    """Return the CPU microseconds of `Diagnosis` for each step; the first check loads code and does not count."""
    spent = [0.0]
    at_first_check = [0.0]
    is_inside = [False]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_inside[0]:  # the time of the method that calls this one counts it
                return method(*args, **kwargs)
            is_inside[0], began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - began
                is_inside[0] = False

        return call

    class AfterFirstCheck(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == interval:
                at_first_check[0] = spent[0]

    before = [(owner, name, getattr(owner, name)) for owner, name in TIMED]
    for owner, name, method in before:
        setattr(owner, name, timed(method))
    steps = interval * (checks + 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="cpu",
                max_steps=steps,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[Diagnosis(interval, path=Path(folder) / "metrics.jsonl"), AfterFirstCheck()],
            )
            trainer.fit(ContractModule(Trainer(layers, width), None), Steps(steps))
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)
    return (spent[0] - at_first_check[0]) / (steps - interval) * 1e6


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=3, help="how many checks are measured")
    parser.add_argument("--interval", type=int, default=100, help="steps from one check to the next")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "genlight"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"{'':34}{'a step':>12}{f'of {STEP_MS:.0f} ms':>10}")
    found = {}
    for name, (layers, width) in MODELS.items():
        found[name] = cost_us(layers, width, options.checks, options.interval)
        print(f"{name:34}{found[name]:>9.1f} µs{found[name] / STEP_MS / 1000:>10.2%}")
    return found


if __name__ == "__main__":
    main()
