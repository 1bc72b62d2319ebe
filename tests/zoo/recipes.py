"""Complete published recipes: several techniques in one class."""

import copy
import functools
import multiprocessing
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, logsigmoid, mse_loss, normalize
from torch.utils.data import DataLoader, Dataset, default_collate

from genlight.adapter.contract.types import StepResult

from .base import ROWS, STEPS, Base, labelled, mlp, regression, tokens


class AdaptedLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) * 0.3), nn.Parameter(torch.zeros(outputs, 2))
        self.enabled, self.merged = True, False

    def forward(self, x):
        out = self.base(x)
        return out + x @ self.a.T @ self.b.T if self.enabled and not self.merged else out

    @torch.no_grad()
    def merge(self, sign: int) -> None:
        self.base.weight.add_(self.b @ self.a, alpha=sign)
        self.merged = sign > 0


class PreferencesWithDisabledAdapter(Base):
    """DPO; the reference is the policy without its adapters."""

    rows = staticmethod(labelled)

    def model(self):
        torch.manual_seed(1)
        return nn.Sequential(AdaptedLinear(6, 12), nn.Tanh(), AdaptedLinear(12, 3))

    def optimizer(self, parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02)

    def loss(self, batch, state):
        model = state["model"]
        policy = model(batch["x"]).log_softmax(1)
        for m in model:
            m.enabled = False
        with torch.no_grad():
            reference = model(batch["x"]).log_softmax(1)
        for m in model:
            m.enabled = True
        gain = policy - reference
        chosen = gain.gather(1, batch["y"][:, None])
        rejected = gain.gather(1, (batch["y"][:, None] + 1) % 3)
        return -logsigmoid(0.5 * (chosen - rejected)).mean()


class AdapterMergedInBetween(PreferencesWithDisabledAdapter):
    """LoRA, merged for an evaluation within the step, then unmerged."""

    def loss(self, batch, state):
        return cross_entropy(state["model"](batch["x"]), batch["y"])

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        layers = [m for m in state["model"] if isinstance(m, AdaptedLinear)]
        for layer in layers:
            layer.merge(1)
        with torch.no_grad():
            merged = self.loss(batch, state)
        for layer in layers:
            layer.merge(-1)
        return StepResult({**result.metrics, "merged": merged})


class TopTwoOfManyExperts(Base):
    """More experts than the rows use, an auxiliary router loss, and a z-loss."""

    def configure(self, ctx):
        model = nn.Module()
        model.body, model.router = mlp(6, 6), nn.Linear(6, 9)
        model.experts = nn.ModuleList(mlp(6, 1, 4) for _ in range(9))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def loss(self, batch, state):
        model, x = state["model"], state["model"].body(batch["x"])
        logits = model.router(x)
        weights, chosen = logits.softmax(1).topk(2, dim=1)
        out = torch.zeros(len(x), 1, dtype=weights.dtype, device=x.device)
        for index, expert in enumerate(model.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, (weights[row, slot, None] * expert(x[row])).to(out.dtype))
        return mse_loss(out, batch["y"]) + 0.01 * logits.logsumexp(1).square().mean()


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


class CentredWithTheNeighbour(Base):
    """Two ranks exchange the means of their rows, point to point."""

    def loss(self, batch, state):
        mean = batch["x"].mean(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            theirs, peer = torch.empty_like(mean), 1 - dist.get_rank()
            exchange = [dist.P2POp(dist.isend, mean.clone(), peer), dist.P2POp(dist.irecv, theirs, peer)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mean = (mean + theirs) / 2
        return mse_loss(state["model"](batch["x"] - mean), batch["y"])


class TiedByHand(Base):
    """Reads the embedding's weight outside of module calls, as the output layer."""

    rows = staticmethod(tokens)

    def model(self):
        model = nn.Module()
        model.embed, model.body = nn.Embedding(11, 6), mlp(6, 6)
        return model

    def loss(self, batch, state):
        model = state["model"]
        hidden = model.body(model.embed(batch["x"]).mean(1))
        return cross_entropy(linear(hidden, model.embed.weight), batch["x"][:, 0])


class _Recomputed(torch.autograd.Function):
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
        return None, x.grad, *[None for _ in ctx.block.parameters()]


class ReversibleBlocks(Base):
    def model(self):
        return nn.Sequential(*(mlp(6, 6) for _ in range(2)), nn.Linear(6, 1))

    def loss(self, batch, state):
        h = batch["x"].clone().requires_grad_(True)
        for block in list(state["model"])[:-1]:
            h = h + _Recomputed.apply(block, h, *block.parameters())
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
