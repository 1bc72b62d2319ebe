"""An existing trainer class of a project: it classifies digits in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from gen_worker.trainer import StepContext, StepResult
from gen_worker.trainer.helpers import build_default_adamw_bundle, seed_everything
from torch import Tensor, nn


class DigitClassifier:
    def setup(self, ctx: StepContext) -> None:
        seed_everything(0)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(ctx.device)
        optimizer, scheduler = build_default_adamw_bundle(model, ctx.job.hyperparams, max_steps=ctx.job.max_steps)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def prepare_batch(
        self, raw_batch: pa.RecordBatch, state: dict[str, Any], ctx: StepContext
    ) -> tuple[Tensor, Tensor]:
        grey = raw_batch.column("image").flatten().to_numpy().astype(np.float32).reshape(-1, 64)
        labels = raw_batch.column("label").to_numpy()
        return torch.from_numpy(grey / 16).to(ctx.device), torch.tensor(labels, device=ctx.device)

    def train_step(self, batch: tuple[Tensor, Tensor], state: dict[str, Any], ctx: StepContext) -> StepResult:
        images, labels = batch
        scores = state["model"](images)
        loss = nn.functional.cross_entropy(scores, labels)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        return StepResult(metrics={"loss": loss.detach(), "train/accuracy": accuracy})

    def state_dict(self, state: dict[str, Any]) -> dict[str, object]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])
