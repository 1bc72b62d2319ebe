"""A small GPT in the manner of nanoGPT: tokens in a memory map, a cosine schedule, accumulation, samples of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genlight.adapter import StepContext, StepResult

FOLDER = Path(__file__).parent
TOKENS = 256


def get_batch(split: str, size: int, block: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Tokens [size, block] at random places of a file, and the tokens that follow each of them."""
    data = np.memmap(FOLDER / f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block, (size,), generator=generator)
    rows = torch.stack([torch.from_numpy(data[i : i + block + 1].astype(np.int64)) for i in starts])
    return rows[:, :-1], rows[:, 1:]


def batches(ctx: StepContext) -> Callable[[], tuple[Tensor, Tensor]]:
    """The data of the job: each call is a batch. The random numbers that it draws are part of each checkpoint."""
    hp = ctx.job.hyperparams
    return lambda: get_batch("train", hp["batch_size"], hp["block_size"])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, block: int) -> None:
        super().__init__()
        self.block = block
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))

    @torch.no_grad()
    def write(self, start: str, length: int) -> str:
        """Continue a text by `length` tokens."""
        tokens = torch.tensor([list(start.encode())], device=self.token.weight.device)
        for _ in range(length):
            probable = self(tokens[:, -self.block :])[:, -1].div(0.8).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probable, 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


@dataclass
class State:
    model: GPT
    optimizer: torch.optim.Optimizer

    def generate_sample(self, prompt: str, seed: int | None, output_dir: str) -> dict[str, Any]:
        """Called by genlight every `sample_every` steps, for each of the job's `sample_prompts`."""
        torch.manual_seed(seed or 0)
        Path(output_dir, "text.txt").write_text(self.model.write(prompt or "\n", length=200))
        return {"text": "text.txt"}


class Trainer:
    def setup(self, ctx: StepContext) -> None:
        torch.manual_seed(ctx.job.hyperparams["seed"])

    def configure(self, ctx: StepContext) -> State:
        hp = ctx.job.hyperparams
        model = GPT(hp["width"], hp["depth"], hp["heads"], hp["block_size"]).to(ctx.device)
        return State(model, torch.optim.AdamW(model.parameters(), lr=hp["lr"], betas=(0.9, 0.95), weight_decay=0.1))

    def prepare_batch(self, raw_batch: tuple[Tensor, Tensor], state: State, ctx: StepContext) -> tuple[Tensor, Tensor]:
        tokens, following = raw_batch
        return tokens.to(ctx.device), following.to(ctx.device)

    def train_step(self, batch: tuple[Tensor, Tensor], state: State, ctx: StepContext) -> StepResult:
        hp = ctx.job.hyperparams
        lr = hp["lr"] * cosine(ctx.step, hp["warmup_steps"], ctx.job.max_steps)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=ctx.device)
        state.optimizer.zero_grad()
        parts = list(zip(*(each.chunk(hp["accumulate"]) for each in batch), strict=True))
        for tokens, following in parts:
            loss = F.cross_entropy(state.model(tokens).flatten(0, 1), following.flatten()) / len(parts)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), hp["clip_norm"])
        state.optimizer.step()
        return StepResult(metrics={"loss": total, "lr": lr, "grad_norm": norm})

    @torch.no_grad()
    def evaluate(self, state: State, ctx: StepContext) -> dict[str, float]:
        """The loss on the same batches of `val.bin` each time."""
        hp, generator = ctx.job.hyperparams, torch.Generator().manual_seed(0)
        losses = []
        for _ in range(8):
            tokens, following = get_batch("val", 32, hp["block_size"], generator)
            logits = state.model(tokens.to(ctx.device)).flatten(0, 1)
            losses.append(F.cross_entropy(logits, following.to(ctx.device).flatten()))
        return {"eval/loss": torch.stack(losses).mean().item()}

    def state_dict(self, state: State) -> dict[str, Any]:
        return {}  # model and optimizer are saved anyway

    def load_state_dict(self, state: State, payload: dict[str, Any], ctx: StepContext) -> None:
        pass


def cosine(step: int, warmup: int, total: int) -> float:
    """Return the share of the learning rate in the step after `step` completed ones."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
