"""A small LightningModule, a data loader that resumes within an epoch, and training that saves every second step."""

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from genlight.callbacks import Checkpoint


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        loss = self.body(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


class ResumableLoader:
    """Batches in an order that depends on the epoch; its state is its position."""

    def __init__(self, batches: int = 10):
        self.batches, self.epoch, self.position = batches, 0, 0
        self.sampler = self  # Lightning calls `set_epoch` of the sampler.

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.batches

    def __iter__(self):
        if self.position == self.batches:
            self.position = 0
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.batches, generator=generator).tolist()
        while self.position < self.batches:
            index = order[self.position]
            self.position += 1
            yield torch.randn(6, 4, generator=torch.Generator().manual_seed(index))

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


@pytest.fixture
def make_trainer(tmp_path):
    def make(*callbacks, **options):
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": list(callbacks),
        }
        return pl.Trainer(**(defaults | options))

    return make


@pytest.fixture
def make_net():
    def make(seed: int = 0):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return Net()

    return make


@pytest.fixture
def make_loader():
    return ResumableLoader


@pytest.fixture
def train(make_trainer, tmp_path):
    def run(module, steps, *, resume=None, **options):
        options = {"every_n_steps": 2, "keep_last": None} | options
        trainer = make_trainer(Checkpoint(tmp_path / "c", **options), max_steps=steps)
        loader = torch.utils.data.DataLoader(torch.ones(20, 64), batch_size=4)
        trainer.fit(module, loader, ckpt_path=resume)
        return module

    return run
