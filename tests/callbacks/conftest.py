"""A plain LightningModule, to show that a callback works without genlight's loop."""

from __future__ import annotations

import pytest


@pytest.fixture
def fit_plain(quiet):
    """Train a plain LightningModule for some steps with some callbacks; return the trainer."""

    def run(callbacks=(), *, steps=4, **arguments):
        import lightning.pytorch as pl
        import torch
        from lightning.pytorch.demos.boring_classes import RandomDataset

        class Plain(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch, batch_idx):
                return self.layer(batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        options = {**quiet, "max_steps": steps, "callbacks": list(callbacks), **arguments}
        trainer = pl.Trainer(**options)
        trainer.fit(Plain(), torch.utils.data.DataLoader(RandomDataset(4, 64), batch_size=4))
        return trainer

    return run
