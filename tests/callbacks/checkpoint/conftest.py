"""A small LightningModule, a data loader that resumes within an epoch, and training that saves every second step."""

import random

import numpy as np
import pytest
import torch

from genlight.callbacks import Checkpoint
from support.plain_module import Fits
from support.trainers import quiet_trainer


class Net(Fits):
    def __init__(self):
        layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)]
        super().__init__(torch.nn.Sequential(*layers))

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
def mesh():
    """A mesh of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    torch.distributed.destroy_process_group()


@pytest.fixture
def make_trainer(tmp_path):
    def make(*callbacks, **options):
        return quiet_trainer(*callbacks, **{"default_root_dir": str(tmp_path), **options})

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
def train_net(make_trainer, make_net, make_loader):
    """Train a network with some callbacks, for one epoch unless `max_steps` is given; returns the trainer."""

    def run(*callbacks, net=None, loader=10, ckpt_path=None, **options):
        trainer = make_trainer(*callbacks, **({} if "max_steps" in options else {"max_epochs": 1}) | options)
        batches = make_loader(loader) if isinstance(loader, int) else loader
        trainer.fit(make_net() if net is None else net, batches, ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def train(make_trainer, tmp_path):
    def run(module, steps, *, resume=None, **options):
        options = {"every_n_steps": 2, "keep_last": None} | options
        trainer = make_trainer(Checkpoint(tmp_path / "c", **options), max_steps=steps)
        loader = torch.utils.data.DataLoader(torch.ones(20, 64), batch_size=4)
        trainer.fit(module, loader, ckpt_path=resume)
        return module

    return run
