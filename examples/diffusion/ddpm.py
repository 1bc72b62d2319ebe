"""A small DDPM of handwritten digits, with an exponential average of its weights that draws the pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from genlight.adapter import StepContext, StepResult

SIDE = 8
TIMES = 200
NOISE = torch.linspace(1e-4, 0.05, TIMES)  # added at each time
KEPT = torch.cumprod(1 - NOISE, dim=0)  # share of the picture that is left after it


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Linear(width, width)
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.before, self.after = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.before(x))) + self.time(time)[:, :, None, None]
        return x + self.second(F.silu(self.after(hidden)))


class Denoiser(nn.Module):
    """Predicts the noise in pictures `x` [n, 1, 8, 8] at the times `t` [n]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(TIMES, width), nn.Linear(width, width), nn.SiLU())
        self.inlet, self.outlet = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden, time = self.inlet(x), self.time(t)
        for block in self.blocks:
            hidden = block(hidden, time)
        return self.outlet(hidden)


@dataclass
class State:
    model: Denoiser
    average: AveragedModel
    optimizer: torch.optim.Optimizer

    def generate_sample(self, seed: int | None, output_dir: str) -> dict[str, Any]:
        """Called by genlight every `sample_every` steps. The same noise each time shows how the pictures improve."""
        pictures = draw(self.average, 40, torch.Generator().manual_seed(seed or 0))
        cells = F.pad(pictures.clamp(-1, 1), (1, 1, 1, 1), value=-0.5).unflatten(0, (4, 10))
        grey = ((cells.transpose(1, 2).flatten(0, 1).flatten(1) + 1) * 127.5).to(torch.uint8).numpy()
        Image.fromarray(grey).resize((600, 240), Image.Resampling.NEAREST).save(Path(output_dir, "digits.png"))
        return {"picture": "digits.png"}


@torch.no_grad()
def draw(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """Pictures [count, 8, 8] on the CPU, from noise."""
    device = next(model.parameters()).device
    x = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    for t in reversed(range(TIMES)):
        noise = model(x.to(device), torch.full((count,), t, device=device)).cpu()
        x = (x - NOISE[t] / (1 - KEPT[t]).sqrt() * noise) / (1 - NOISE[t]).sqrt()
        if t:
            x += NOISE[t].sqrt() * torch.randn(x.shape, generator=generator)
    return x[:, 0]


class Trainer:
    def setup(self, ctx: StepContext) -> None:
        torch.manual_seed(ctx.job.hyperparams["seed"])

    def configure(self, ctx: StepContext) -> State:
        hp = ctx.job.hyperparams
        model = Denoiser(hp["width"], hp["depth"]).to(ctx.device)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(hp["ema_decay"]))
        return State(model, average, torch.optim.AdamW(model.parameters(), lr=hp["lr"]))

    def prepare_batch(self, raw_batch: pa.RecordBatch, state: State, ctx: StepContext) -> Tensor:
        grey = raw_batch.column("image").flatten().to_numpy().astype(np.float32)
        return torch.from_numpy(grey).reshape(-1, 1, SIDE, SIDE).to(ctx.device) / 8 - 1

    def train_step(self, batch: Tensor, state: State, ctx: StepContext) -> StepResult:
        t = torch.randint(TIMES, (len(batch),), device=batch.device)
        kept = KEPT.to(batch.device)[t, None, None, None]
        noise = torch.randn_like(batch)
        predicted = state.model(kept.sqrt() * batch + (1 - kept).sqrt() * noise, t)
        loss = F.mse_loss(predicted, noise)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.average.update_parameters(state.model)
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: State) -> dict[str, Any]:
        return {}  # model, average and optimizer are saved anyway

    def load_state_dict(self, state: State, payload: dict[str, Any], ctx: StepContext) -> None:
        pass
