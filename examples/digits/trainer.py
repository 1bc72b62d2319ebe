"""A class-conditional flow-matching model of 8x8 handwritten digits, as a trainer class.

Plain PyTorch: the class builds its model, optimizer and schedule, and its ``train_step`` runs backward and update.
It has no code for the program that runs it.

The model learns a velocity field. Between noise x0 and a digit x1 lies the straight line x_t = (1-t) x0 + t x1, whose
velocity is x1 - x0; the network predicts it from x_t, t and the class. A sample follows the predicted velocity from
noise at t=0 to a digit at t=1.
"""

from __future__ import annotations

import copy
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from gen_worker.trainer import StepContext, StepResult
from gen_worker.trainer.helpers import seed_everything
from safetensors.torch import save_file
from torch import Tensor, nn

SIDE = 8
PIXELS = SIDE * SIDE
CLASSES = 10
NO_CLASS = CLASSES  # the label of "any digit"; guidance steers away from it
MAX_GREY = 16
PICTURE_SCALE = 6  # picture points along each side of a model pixel


class Block(nn.Module):
    """A residual MLP block whose scale, shift and gate come from time and class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        # A block that begins as the identity lets a deep stack learn from the first step.
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(condition).chunk(3, dim=-1)
        hidden = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(nn.functional.silu(self.up(hidden)))


class VelocityModel(nn.Module):
    """Predicts the velocity of `x` [batch, 64] at time `t` [batch] for `label` [batch]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 ** torch.linspace(0, 6, width // 2) * math.pi / 2)
        self.time = nn.Linear(width, width)
        self.label = nn.Embedding(CLASSES + 1, width)
        self.inlet = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.outlet = nn.Linear(width, PIXELS)
        nn.init.zeros_(self.outlet.weight)
        nn.init.zeros_(self.outlet.bias)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        condition = nn.functional.silu(time + self.label(label))
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden, condition)
        return self.outlet(hidden)


@dataclass
class DigitsState:
    """Everything that training changes, and a method to draw pictures."""

    model: VelocityModel
    ema: VelocityModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    guidance: float
    sampling_steps: int

    def generate_sample(
        self, *, prompt: str | None, seed: int | None, step: int, output_dir: str | Path
    ) -> dict[str, Any]:
        """Draw digits into a picture: a grid of one digit for "0" to "9", a row of each for "all" or no prompt.

        The noise depends only on `seed`, so that pictures of different steps show the same digits improve.
        """
        wanted = "all" if prompt in (None, "") else str(prompt).strip()  # a YAML file may say 3 without quotes
        labels = labels_of_prompt(wanted)
        digits = sample_digits(self.ema, labels, seed=seed or 0, steps=self.sampling_steps, guidance=self.guidance)
        name = f"digits-{wanted}.png"
        write_png(Path(output_dir) / name, picture_grid(digits, columns=CLASSES))
        return {"picture": name, "count": len(labels), "guidance": self.guidance, "trained_steps": step}


class DigitsTrainer:
    """Trains `VelocityModel` on batches with the columns `image` and `label`.

    Hyperparameters: width, depth, learning_rate, weight_decay, warmup_steps, clip_norm, ema_decay, label_dropout,
    guidance, sampling_steps, seed, threads (0 leaves torch's own number).
    """

    def setup(self, ctx: StepContext) -> None:
        seed_everything(int(ctx.job.hyperparams.get("seed", 0)))
        threads = int(ctx.job.hyperparams.get("threads", 0))
        if threads:  # a second core costs more than it saves for work of this size
            torch.set_num_threads(threads)

    def configure(self, ctx: StepContext) -> DigitsState:
        hp = ctx.job.hyperparams
        self.clip_norm = float(hp.get("clip_norm", 1.0))
        self.ema_decay = float(hp.get("ema_decay", 0.998))
        self.label_dropout = float(hp.get("label_dropout", 0.1))
        model = VelocityModel(int(hp.get("width", 128)), int(hp.get("depth", 4))).to(ctx.device)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=float(hp.get("learning_rate", 2e-3)),
            weight_decay=float(hp.get("weight_decay", 0.01)),
        )
        warmup, total = int(hp.get("warmup_steps", 100)), ctx.job.max_steps
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, total))
        return DigitsState(
            model=model,
            ema=copy.deepcopy(model).requires_grad_(False),
            optimizer=optimizer,
            scheduler=scheduler,
            guidance=float(hp.get("guidance", 1.5)),
            sampling_steps=int(hp.get("sampling_steps", 20)),
        )

    def prepare_batch(self, raw_batch: pa.RecordBatch, state: DigitsState, ctx: StepContext) -> tuple[Tensor, Tensor]:
        grey = raw_batch.column("image").flatten().to_numpy(zero_copy_only=False)
        images = torch.from_numpy(grey.astype(np.float32).reshape(-1, PIXELS)) * (2 / MAX_GREY) - 1
        labels = torch.from_numpy(raw_batch.column("label").to_numpy(zero_copy_only=False).astype(np.int64))
        return images.to(ctx.device), labels.to(ctx.device)

    def train_step(self, batch: tuple[Tensor, Tensor], state: DigitsState, ctx: StepContext) -> StepResult:
        images, labels = batch
        noise = torch.randn_like(images)
        t = torch.rand(len(images), device=images.device)
        dropped = torch.rand(len(images), device=images.device) < self.label_dropout
        x = torch.lerp(noise, images, t[:, None])
        predicted = state.model(x, t, labels.masked_fill(dropped, NO_CLASS))
        loss = nn.functional.mse_loss(predicted, images - noise)

        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.clip_norm)
        state.optimizer.step()
        learning_rate = state.scheduler.get_last_lr()[0]
        state.scheduler.step()
        # Early weights soon mean nothing: the average spans a share of the run at first, and 1/(1-decay) steps later.
        age = state.scheduler.last_epoch
        update_ema(state.ema, state.model, min(self.ema_decay, age / (age + 10)))
        return StepResult(metrics={"loss": loss.detach(), "lr": learning_rate, "train/grad_norm": grad_norm})

    def state_dict(self, state: DigitsState) -> dict[str, object]:
        return {
            "model": state.model.state_dict(),
            "ema": state.ema.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict(),
        }

    def load_state_dict(self, state: DigitsState, payload: dict[str, Any], ctx: StepContext) -> None:
        state.model.load_state_dict(payload["model"])
        state.ema.load_state_dict(payload["ema"])
        state.optimizer.load_state_dict(payload["optimizer"])
        state.scheduler.load_state_dict(payload["scheduler"])

    def save_checkpoint(
        self, *, state: DigitsState, step: int, output_dir: str | Path, final: bool, ctx: StepContext
    ) -> dict[str, str]:
        """Save the averaged weights for sampling in a separate file."""
        save_file(state.ema.state_dict(), Path(output_dir) / "digits.safetensors", {"step": str(step)})
        return {"primary_path": "digits.safetensors"}


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Return the share of the learning rate: rises over `warmup` steps, then falls along a cosine to 0 at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float) -> None:
    """Move each averaged weight by (1 - decay) of its distance to the trained one."""
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)


def labels_of_prompt(prompt: str) -> list[int]:
    """Return the digits of a prompt.

    Raises:
        ValueError: The prompt is neither a digit nor "all".
    """
    if prompt == "all":
        return [label for label in range(CLASSES) for _ in range(CLASSES)]
    if prompt.isdecimal() and int(prompt) < CLASSES:
        return [int(prompt)] * (4 * CLASSES)
    raise ValueError(f'Invalid `prompt`. Expected a digit from "0" to "9" or "all", but received {prompt!r}.')


@torch.no_grad()
def sample_digits(model: VelocityModel, labels: list[int], *, seed: int, steps: int, guidance: float) -> np.ndarray:
    """Digits [len(labels), 8, 8] as grey values from 0 to 255, by Heun's method with classifier-free guidance."""
    device = next(model.parameters()).device
    # A separate generator: pictures must not change the random numbers of training.
    noise = torch.randn(len(labels), PIXELS, generator=torch.Generator().manual_seed(seed))
    x = noise.to(device)
    wanted = torch.tensor(labels, device=device)
    both = torch.cat([wanted, torch.full_like(wanted, NO_CLASS)])

    def velocity(x: Tensor, t: float) -> Tensor:
        times = torch.full((2 * len(labels),), t, device=device)
        conditional, free = model(torch.cat([x, x]), times, both).chunk(2)
        return free + guidance * (conditional - free)

    dt = 1 / steps
    for index in range(steps):
        first = velocity(x, index * dt)
        second = velocity(x + dt * first, (index + 1) * dt)
        x = x + dt / 2 * (first + second)
    grey = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return grey.reshape(-1, SIDE, SIDE).cpu().numpy()


def picture_grid(digits: np.ndarray, *, columns: int) -> np.ndarray:
    """A picture of the digits in rows of `columns`, enlarged, with a line between neighbours."""
    cell = SIDE + 1
    rows = math.ceil(len(digits) / columns)
    grid = np.full((rows * cell + 1, columns * cell + 1), 64, dtype=np.uint8)
    for index, digit in enumerate(digits):
        top, left = (place * cell + 1 for place in divmod(index, columns))
        grid[top : top + SIDE, left : left + SIDE] = digit
    return grid.repeat(PICTURE_SCALE, axis=0).repeat(PICTURE_SCALE, axis=1)


def write_png(path: Path, grey: np.ndarray) -> None:
    """Write an 8-bit grey picture [height, width]."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = grey.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)  # each line begins with its filter type, 0 for none
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
