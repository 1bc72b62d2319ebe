"""Other hosts: Fabric, and others that take part if they are installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from .alternating import Alternation
from .workload import ROWS, Linear

Run = Callable[[Alternation, Path], None]


def others() -> dict[str, Run]:
    """Return the hosts by name; print those that cannot take part to standard error."""
    found: dict[str, Run] = {"Fabric": fabric}
    optional = {
        "TorchTNT": ("torchtnt.framework.train", torchtnt),
        "accelerate": ("accelerate", accelerate),
        "Hugging Face Trainer": ("transformers.trainer", hugging_face),
    }
    for name, (module, run) in optional.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            sys.stderr.write(f"{name} does not take part: {error}\n")
        else:
            found[name] = run
    return found


def _loop(model: Any, optimizer: Any, backward: Callable[[Any], None], batches: Alternation) -> None:
    for _, (x, y) in zip(range(batches.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        backward(loss)
        optimizer.step()


def fabric(batches: Alternation, _: Path) -> None:
    """The same step with Fabric."""
    host = Fabric(accelerator="cpu", devices=1)
    layer = torch.nn.Linear(16, 1)
    model, optimizer = host.setup(layer, torch.optim.SGD(layer.parameters(), lr=1e-4))
    _loop(model, optimizer, host.backward, batches)


def accelerate(batches: Alternation, _: Path) -> None:
    """The same step with accelerate."""
    from accelerate import Accelerator

    host = Accelerator(cpu=True)
    layer = torch.nn.Linear(16, 1)
    model, optimizer = host.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1e-4))
    _loop(model, optimizer, host.backward, batches)


def torchtnt(batches: Alternation, _: Path) -> None:
    """The same step in a TorchTNT unit."""
    from torchtnt.framework.train import train
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Linear()
            self.state = self.inner.configure(None)

        def train_step(self, state: Any, data: Any) -> None:
            self.inner.train_step(data, self.state, None)

    train(Unit(), batches, max_steps=batches.steps)


def hugging_face(batches: Alternation, folder: Path) -> None:
    """The same step in the Hugging Face trainer, its reports switched off."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=batches.steps, per_device_train_batch_size=ROWS, report_to=[], use_cpu=True,
        logging_strategy="no", save_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its own figures
        Trainer(model=Model(), args=arguments, train_dataset=_Rows(batches)).train()


class _Rows(torch.utils.data.IterableDataset[Any]):
    """Single rows, because the Hugging Face trainer makes its own batches."""

    def __init__(self, batches: Alternation) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._batches:
            for row in range(ROWS):
                yield {"x": x[row], "y": y[row]}
