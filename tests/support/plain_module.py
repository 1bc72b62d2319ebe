"""A LightningModule that saves its hyperparameters itself, among them secrets."""

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
