"""Complete published recipes: several techniques in one class."""

import copy
import functools
import multiprocessing
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, Dataset, default_collate

from .base import ROWS, STEPS, Base, mlp, regression


class ContrastOverAllRanks(Base):
    """Gathers features of all ranks by hand; the gradient flows through this rank's features."""

    def model(self):
        return mlp(6, 4)

    def loss(self, batch, state):
        one, other = (normalize(state["model"](x), dim=1) for x in (batch["x"], batch["x"].flip(1)))
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size > 1:
            one, other = (self.gathered(features, size) for features in (one, other))
        logits = one.float() @ other.float().T / 0.1
        # Each rank has the gradient through its own rows; the mean over ranks follows.
        return size * cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    @staticmethod
    def gathered(features: torch.Tensor, size: int) -> torch.Tensor:
        everyone = [torch.zeros_like(features) for _ in range(size)]
        dist.all_gather(everyone, features.detach().contiguous())
        everyone[dist.get_rank()] = features
        return torch.cat(everyone)


class Recomputed(torch.autograd.Function):
    """A block whose backward recomputes it and calls backward itself, like reversible layers."""

    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, gradient)
        return None, x.grad, *[None for _ in ctx.needs_input_grad[2:]]


class ReversibleBlocks(Base):
    def model(self):
        return nn.Sequential(*(mlp(6, 6) for _ in range(2)), nn.Linear(6, 1))

    def loss(self, batch, state):
        h = batch["x"].clone().requires_grad_(True)
        for block in list(state["model"])[:-1]:
            h = h + Recomputed.apply(block, h, *block.parameters())
        return mse_loss(state["model"][-1](h), batch["y"])


class EnsembleOnASkeleton(Base):
    """Stacked weights of several networks, with vmap over a module on the meta device."""

    def configure(self, ctx):
        networks = [mlp() for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(networks)
        weights = {name: nn.Parameter(tensor.detach()) for name, tensor in stacked.items()}
        scale = nn.Linear(1, 1)
        self.skeleton = copy.deepcopy(networks[0]).to("meta")
        optimizer = torch.optim.Adam([*weights.values(), *scale.parameters()], lr=0.01)
        return {"weights": weights, "scale": scale, "optimizer": optimizer}

    def loss(self, batch, state):
        def output(weights, x):
            return torch.func.functional_call(self.skeleton, weights, (x,))

        out = torch.vmap(output, in_dims=(0, None))(state["weights"], batch["x"])
        return (state["scale"](out) - batch["y"]).square().mean()


class RestartsItsSchedule(Base):
    """Warm restarts: a step creates a new schedule with a different length."""

    kept = ("steps",)

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "schedule": self.schedule(state["optimizer"], 2), "steps": 0}

    def schedule(self, optimizer, length):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 0.01 * length
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)

    def after_update(self, batch, state, ctx):
        state["schedule"].step()
        state["steps"] += 1
        if state["steps"] == 2:
            state["schedule"] = self.schedule(state["optimizer"], 5)


class Noisy(Dataset):
    """All rows of a run; the worker that produces a row adds noise from every generator."""

    def __len__(self):
        return STEPS * ROWS

    def __getitem__(self, index):
        row = {name: column[index % ROWS] for name, column in regression(index // ROWS).items()}
        noise = random.random() + torch.rand(6) + torch.from_numpy(np.random.rand(6)).float()
        return {**row, "x": row["x"] + 0.1 * noise}


def part_of(rank, world_size, rows):
    count = len(rows) // world_size
    return default_collate(rows[rank * count : (rank + 1) * count])


class DrawsInWorkers(Base):
    """Two worker processes augment rows by random numbers; each rank takes its part of the batch."""

    @staticmethod
    def loader(rank, world_size):
        # Use a fork server: a fork of this process would inherit the process groups of earlier jobs.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__])
        settings = {"generator": torch.Generator().manual_seed(5), "multiprocessing_context": server}
        collate = functools.partial(part_of, rank, world_size)
        return DataLoader(Noisy(), batch_size=ROWS, num_workers=2, collate_fn=collate, **settings)
