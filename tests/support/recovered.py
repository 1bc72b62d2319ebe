"""A training with planted faults that several tests recover: its trainer class, its batches and its fit."""

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Recover
from genlight.callbacks.checkpoint import newest_valid
from support.trainer_class import Counts
from support.trainers import quiet_trainer

BATCHES = 80


class Batches:
    """A loader with a position; its `faults` are factors for the values of batches."""

    def __init__(self, faults: Mapping[int, float] | Collection[int] = (), *, start: int = 0, seed: int = 0) -> None:
        self.faults = faults if isinstance(faults, Mapping) else dict.fromkeys(faults, float("nan"))
        self.next, self.seed = start, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < BATCHES:
            number, self.next = self.next, self.next + 1
            generator = torch.Generator().manual_seed(1000 * self.seed + number)
            yield torch.randn(6, 3, generator=generator) * self.faults.get(number, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Fragile(Counts):
    """Has of everything that a roll-back must put back: statistics, momenta, a schedule, random numbers, an average."""

    def __init__(self, before_step: Callable[[int], None] = lambda calls: None, *, window: int = 1) -> None:
        self.before_step, self.window = before_step, window
        self.calls = 0
        self.rates: list[float] = []

    def configure(self, ctx: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(lambda opt, *_: self.rates.append(opt.param_groups[0]["lr"]))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "average": 0.0, "steps": 0}

    def train_step(self, batch: torch.Tensor, state: dict[str, Any], ctx: Any) -> StepResult:
        self.calls += 1
        self.before_step(self.calls)
        loss = (state["model"](batch * random.uniform(0.9, 1.1)) - 1).square().mean()
        loss = loss * batch.abs().max().clamp(min=10) / 10  # a larger factor only for a broken batch
        (loss / self.window).backward()
        state["steps"] += 1
        if state["steps"] % self.window == 0:
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["schedule"].step()
        state["average"] = 0.9 * state["average"] + 0.1 * state["steps"]
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, object]:
        return {"average": state["average"], "steps": state["steps"]}


class NoteRungs(pl.Callback):
    """Writes down what `Recover` reports: step, and the rung or what has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_figures(self, trainer: pl.Trainer, pl_module: pl.LightningModule, figures: Mapping[str, float]) -> None:
        names = [name.removeprefix("recover/") for name in figures if name.startswith("recover/")]
        ended = {"attempt": "recovered", "lr_factor": "rate_restored"}
        what = ended[names[0]] if len(names) == 1 else names[1] if names else None
        if what is not None and trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps([trainer.global_step, what]) + "\n")


def rungs_in(folder: Path) -> list[tuple[int, str]]:
    """Steps and rungs that `NoteRungs` has written down below `folder`."""
    paths = sorted(folder.rglob("rungs.jsonl"))
    return [(step, what) for path in paths for step, what in map(json.loads, path.read_text().splitlines())]


def fit_fragile(
    folder: Path,
    recover: Recover | None,
    batches: Batches,
    *,
    trainer: Any = None,
    steps: int = 30,
    every: int = 5,
    callbacks: Sequence[pl.Callback] = (),
    resumes: bool = False,
    **arguments: Any,
) -> ContractModule:
    """Train with checkpoints in ``folder/checkpoints``, if any; continue from the newest if it `resumes`."""
    saver = Checkpoint(folder / "checkpoints", every_n_steps=every, keep_last=None, save_final=False)
    module = ContractModule(trainer or Fragile(), TrainingJobSpec(run_id="r", max_steps=steps, metric_every=1))
    newest, _ = newest_valid(folder / "checkpoints") if resumes else (None, [])
    folder.mkdir(parents=True, exist_ok=True)
    hooks = [
        *([] if recover is None else [recover]),
        NoteRungs(folder / "rungs.jsonl"),
        *callbacks,
        *([saver] if every else []),
    ]
    settings = {"max_steps": steps, "default_root_dir": folder, "use_distributed_sampler": False, **arguments}
    quiet_trainer(*hooks, **settings).fit(module, batches, ckpt_path=None if newest is None else newest.path)
    return module


def digest_of(module: ContractModule) -> str:
    """Digest of all results of training."""
    state = module.contract_state
    optimizer = state["optimizer"].state_dict()
    tensors = [*state["model"].state_dict().values()]
    tensors += [value for kept in optimizer["state"].values() for value in kept.values()]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors))
    digest.update(repr((optimizer["param_groups"], state["schedule"].state_dict(), state["average"])).encode())
    digest.update(repr((state["steps"], random.getstate(), torch.get_rng_state().tolist())).encode())
    return digest.hexdigest()
