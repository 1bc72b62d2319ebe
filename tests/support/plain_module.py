"""LightningModules: one that saves its hyperparameters itself, among them secrets, and a small one that trains."""

from typing import Any

import torch
from lightning.pytorch import LightningModule


class Plain(LightningModule):
    def __init__(self, api_key: str, data: str, login: dict[str, Any], lr: float, remark: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(2, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Fits(LightningModule):
    """Trains `body` on batches of rows and logs the loss; a test overrides only what it is about."""

    def __init__(self, body: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 1) if body is None else body

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.body(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)
