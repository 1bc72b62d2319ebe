"""A training on two ranks with planted faults, and a table of reports and reactions: ``python faults.py [FOLDER]``."""

import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Diagnosis, Hook, Recover
from genlight.reporters.telemetry import read_events

SLEEPS = range(61, 90)
"""Steps in which rank 1 is slow."""
NAN = (137, 251, 252, 253)
"""Batches for which the second layer returns nan."""
SPIKE = 185
"""The batch with a value that is far too large."""
NO_RATE = range(205, 225)
"""Steps with a learning rate of 0."""
STEPS = 300


class Breaks(nn.Linear):
    """A layer that fails for some inputs."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        return output * float("nan") if self.fails else output


class Planted:
    """A trainer class without any code for its observers."""

    def setup(self, ctx):
        self.is_slow = ctx.rank == 1

    def configure(self, ctx):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), Breaks(16, 16), nn.Tanh(), nn.Linear(16, 1))
        model = nn.ModuleDict({"body": body, "never_used": nn.Linear(4, 4)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.0 if done + 1 in NO_RATE else 1.0)
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        number, x = batch
        state["step"] += 1
        if self.is_slow and state["step"] in SLEEPS:
            time.sleep(0.05)
        body = state["model"]["body"]
        body[2].fails = self.is_slow and number in NAN  # only on rank 1
        loss = (body(x) - x.sum(1, keepdim=True)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Batches:
    """Numbered batches, different on each rank; its state is its position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0

    def __iter__(self):
        while True:
            self.number += 1
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2 * self.number + self.rank))
            yield self.number, x * 100 if self.number == SPIKE else x

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class NoteRungs(Hook):
    """Keeps the reports of `Recover`."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def on_figures(self, trainer, pl_module, figures):
        said = [f"{name.removeprefix('recover/')} {figures[name]:g}" for name in figures if name.startswith("recover/")]
        if said:
            self.lines.append((trainer.global_step, f"recovery    {'  '.join(said)}"))


def tell(path: Path, rungs: NoteRungs) -> None:
    """Print the reports and reactions with their steps."""
    lines = list(rungs.lines)
    for event in read_events(path):
        facts = event["artifacts"]
        text = f"diagnostic  {facts['fault']} {facts['state']}"
        lines.append((event["step"], f"{text}: {event['error']}" if event["error"] else text))
    for step, line in sorted(lines, key=lambda line: line[0]):
        print(f"{step:4}  {line}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    telemetry, rungs = folder / "telemetry.jsonl", NoteRungs()
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            Diagnosis(check_interval=10, trace_modules=True, path=telemetry),
            Recover(faults=["nonfinite", "loss_spike"], lower_lr_steps=10, good_steps=20),
            rungs,
            Checkpoint(folder / "checkpoints", every_n_steps=50),
        ],
    )
    module = ContractModule(Planted(), TrainingJobSpec(run_id="faults", max_steps=STEPS))
    trainer.fit(module, Batches(trainer.global_rank))
    if trainer.is_global_zero:
        tell(telemetry, rungs)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/faults").absolute())
