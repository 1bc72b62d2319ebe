"""A model of which a small part is trained, as of LoRA."""

import copy

import lightning.pytorch as pl
import torch

FROZEN_BYTES = 4 * 64 * 64 * 4 + 4 * 64 * 4 + 40_000


class Adapted(pl.LightningModule):
    """A frozen base with a small part that is trained; keeps its weights after each step in `seen`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 64, bias=False)
        self.register_buffer("table", torch.randn(100, 100))
        self.seen = {}

    def training_step(self, batch, batch_idx):
        return (self.base(batch) + self.up(self.down(batch))).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen[self.trainer.global_step] = copy.deepcopy(self.state_dict())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def assert_equal(found, expected):
    """Check that two dictionaries have the same tensors."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
