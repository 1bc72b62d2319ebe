"""Small classes for the tests of strategies, precisions and GPUs; they are not in the table.

Their ranks begin with different weights. `zoo.runs` runs them.
"""

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from genlight.adapter.contract.types import StepContext, StepResult

from .accumulation import MicroBatches
from .base import AveragesItsModel, LowRank, Trainer, mlp, trainers
from .optimizers import AdamWithClosure
from .runs import STEPS, rows


class Base(Trainer):
    def setup(self, ctx: StepContext) -> None:
        torch.manual_seed(ctx.rank)  # ranks begin with different weights, as in a careless class


class Accumulating(Base):
    """Several backward calls, one update, clipped."""

    train_step = MicroBatches.train_step


class CompiledAccumulating(Accumulating):
    def model(self):
        return torch.compile(super().model(), backend="eager")


class AdamClosure(Base):
    train_step = AdamWithClosure.train_step


class Gan(Base):
    """Alternates two optimizers; the generator's step leaves gradients in the discriminator."""

    def configure(self, ctx):
        g, d = mlp(6, 6), mlp(6, 1)
        return {
            "nets": {"generator": g, "discriminator": d},
            "opts": [torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)],
        }

    def train_step(self, batch, state, ctx):
        g, d = state["nets"].values()
        opt_g, opt_d = state["opts"]
        fake = g(batch["x"])
        opt_d.zero_grad()
        (d(fake.detach()).square().mean() + (d(batch["x"]) - 1).square().mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        loss = (d(fake) - 1).square().mean()
        loss.backward()
        opt_g.step()
        return StepResult({"loss": loss.detach()})


class Penalty(Base):
    """A gradient penalty by torch.autograd.grad."""

    def loss(self, batch, state):
        x = batch["x"].clone().requires_grad_()
        out = state["model"](x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, batch["y"]) + (grad.norm(dim=1) - 1).square().mean()


class GradientsOfBothKinds(Base):
    """A backward call; the trainer adds to its gradients."""

    def train_step(self, batch, state, ctx):
        model = state["model"]
        state["optimizer"].zero_grad()
        mse_loss(model(batch["x"]), batch["y"]).backward()
        extra = torch.autograd.grad(0.1 * model(batch["x"]).abs().mean(), model[2].weight)[0]
        model[2].weight.grad = model[2].weight.grad + extra
        state["optimizer"].step()
        return StepResult({})


class ClippedByNorm(Base):
    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.05)


class ClippedByValue(Base):
    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_value_(state["model"].parameters(), 0.01)


class ClampedInside(Base):
    """Hooks of an activation and of a module change gradients in the graph, row by row."""

    def configure(self, ctx):
        state = super().configure(ctx)
        first, act, _ = state["model"]
        first.register_forward_hook(lambda _, entering, out: self.hook(out))
        act.register_full_backward_hook(lambda _, entering, leaving: (self.clamped(entering[0], 0.2),))
        return state

    def hook(self, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: self.clamped(gradient, 0.1))

    def clamped(self, gradient: torch.Tensor, limit: float) -> torch.Tensor:
        return gradient.clamp(-limit / len(gradient), limit / len(gradient))


class Scheduled(Base):
    """A learning rate that changes with every step, and weight decay."""

    def configure(self, ctx):
        state = super().configure(ctx)
        schedule = torch.optim.lr_scheduler.OneCycleLR(state["optimizer"], 0.05, total_steps=STEPS + 1)
        return {**state, "scheduler": schedule}

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)

    def after_update(self, batch, state, ctx):
        state["scheduler"].step()


class Adapted(Base):
    """A frozen base with low-rank adapters; the trainer keeps the trained parameters in a list."""

    def configure(self, ctx):
        model = mlp()
        model[0], model[2] = LowRank(model[0]), LowRank(model[2])
        self.trained = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(self.trained, lr=0.01)}

    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_norm_(self.trained, 0.1)


class WithEma(AveragesItsModel, Base):
    pass


class Tied(Base):
    """One matrix is the first layer and, transposed, the last."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(6, 12, bias=False)
            self.decode = nn.Linear(12, 6, bias=False)
            self.again = nn.Linear(6, 12, bias=False)
            self.again.weight = self.encode.weight

        def forward(self, x):
            return self.again(self.decode(self.encode(x).tanh())).sum(1, keepdim=True)

    def model(self):
        return self.Net()


class Checkpointed(Base):
    """Activation checkpointing, of both kinds; the reentrant kind calls backward inside of backward."""

    def loss(self, batch, state):
        first, act, last = state["model"]
        x = batch["x"].clone().requires_grad_()
        hidden = checkpoint(lambda x: act(first(x)), x, use_reentrant=True)
        return mse_loss(checkpoint(last, hidden, use_reentrant=False), batch["y"])


class OnTrainer(Base):
    """Everything on the trainer, no state."""

    def configure(self, ctx):
        self.net = mlp()
        self.heads = [nn.Linear(1, 1), nn.Linear(1, 1)]
        parameters = [p for m in (self.net, *self.heads) for p in m.parameters()]
        self.opt = torch.optim.Adam(parameters, lr=0.01)

    def train_step(self, batch, state, ctx):
        out = sum(head(self.net(batch["x"])) for head in self.heads)
        loss = mse_loss(out, batch["y"])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return StepResult({})


@dataclass
class SacState:
    actor: nn.Module
    log_alpha: torch.Tensor
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)


class LooseTensor(Base):
    """A dataclass state with a trained tensor outside of modules."""

    def configure(self, ctx):
        actor, log_alpha = mlp(), torch.zeros(1, requires_grad=True)
        optimizers = {"actor": torch.optim.Adam(actor.parameters(), 0.01), "alpha": torch.optim.Adam([log_alpha], 0.1)}
        return SacState(actor, log_alpha, optimizers)

    def train_step(self, batch, state, ctx):
        out = state.actor(batch["x"])
        loss = mse_loss(out, batch["y"]) * state.log_alpha.exp() - 0.1 * state.log_alpha
        for optimizer in state.optimizers.values():
            optimizer.zero_grad()
        loss.sum().backward()
        for optimizer in state.optimizers.values():
            optimizer.step()
        return StepResult({})


class UpdatesByHand(Base):
    """No optimizer: changes weights and a loose tensor by their gradients."""

    def configure(self, ctx):
        return {"model": mlp(), "scale": torch.full((1,), 1.0 + ctx.rank, device=ctx.device, requires_grad=True)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"]) * state["scale"], batch["y"])
        state["model"].zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in (*state["model"].parameters(), state["scale"]):
                p -= 0.1 * p.grad
            state["scale"].grad = None
        return StepResult({"loss": loss.detach()})


class UpdatesByHandFromAutograd(Base):
    """No optimizer, and no gradient in ``.grad``."""

    def configure(self, ctx):
        return {"model": mlp()}

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        loss = mse_loss(state["model"](batch["x"]), batch["y"])
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.data.sub_(grad, alpha=0.1)
        return StepResult({"loss": loss.detach()})


class InClosures(Base):
    """Only functions in the state."""

    def configure(self, ctx):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(batch):
            loss = mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return {"step": step, "weights": lambda: {"model": model}}

    def train_step(self, batch, state, ctx):
        return StepResult({"loss": state["step"](batch)})


class UnusedOnOneRank(Base):
    """Each kind of row has its own head; a rank has only one kind, and a third head is never used."""

    def model(self):
        return nn.ModuleDict({"trunk": mlp(6, 4), "a": nn.Linear(4, 1), "b": nn.Linear(4, 1), "c": nn.Linear(4, 1)})

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5)

    def loss(self, batch, state):
        features = state["model"]["trunk"](batch["x"])
        loss = 0.0
        for kind, head in enumerate("ab"):
            mine = batch["kind"] == kind
            if mine.any():
                error = state["model"][head](features[mine]) - batch["y"][mine]
                loss = loss + error.square().sum() / len(batch["x"])
        return loss


class OwnScaler(Base):
    """Implements mixed precision itself, as in the torch documentation."""

    def configure(self, ctx):
        device = torch.device(ctx.device).type
        return {**super().configure(ctx), "scaler": torch.amp.GradScaler(device, init_scale=1024.0)}

    def train_step(self, batch, state, ctx):
        scaler = state["scaler"]
        with torch.autocast(torch.device(ctx.device).type, dtype=torch.float16):
            out = state["model"](batch["x"])
        loss = mse_loss(out.float(), batch["y"])
        state["optimizer"].zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        scaler.step(state["optimizer"])
        scaler.update()
        return StepResult({})


class Untrainable(Base):
    """An untrained module, and no optimizer."""

    def configure(self, ctx):
        return {"model": mlp().requires_grad_(False), "seen": 0}

    def train_step(self, batch, state, ctx):
        state["seen"] += len(batch["x"])
        return StepResult({"seen": state["seen"]})


class WithoutTorch(Base):
    def configure(self, ctx):
        return {"weights": [0.0]}

    def train_step(self, batch, state, ctx):
        state["weights"][0] += 1.0
        return StepResult({"weight": state["weights"][0]})


class Normalized(Base):
    """BatchNorm: each rank's statistics are its own until the end of the step."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)


class OwnDdp(Base):
    """Wraps its module itself if there are several ranks."""

    def configure(self, ctx):
        import torch.distributed as dist

        state = super().configure(ctx)
        self.call = state["model"].__call__
        if ctx.world_size > 1 and dist.is_initialized():
            self.call = nn.parallel.DistributedDataParallel(state["model"]).__call__
        return state

    def loss(self, batch, state):
        return mse_loss(self.call(batch["x"]), batch["y"])


class WarmOptimizer(Base):
    """The optimizer takes a step before training begins."""

    def configure(self, ctx):
        state = super().configure(ctx)
        torch.manual_seed(7)
        state["model"].load_state_dict(mlp().state_dict())
        self.train_step(self.prepare_batch(rows(99), state, ctx), state, ctx)
        return state


class SavingAndLoading(Base):
    """Stores its state during training, loses it, and restores it."""

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0}

    def after_update(self, batch, state, ctx):
        state["calls"] += 1
        if state["calls"] == 2:
            saved = {k: copy.deepcopy(state[k].state_dict()) for k in ("model", "optimizer")}
            assert [tuple(t.shape) for t in saved["model"].values()] == [(12, 6), (12,), (1, 12), (1,)]
            with torch.no_grad():
                for p in state["model"].parameters():
                    p.zero_()
            for entry in state["optimizer"].state.values():
                entry["exp_avg"].zero_()
            state["model"].load_state_dict(saved["model"])
            state["optimizer"].load_state_dict(saved["optimizer"])


class OverflowOnOneRank(Base):
    """The second half of the rows overflows in the second step."""

    def configure(self, ctx):
        return {**super().configure(ctx), "calls": 0}

    def loss(self, batch, state):
        state["calls"] += 1
        error = (state["model"](batch["x"]).float() - batch["y"]).square().squeeze(1)
        if state["calls"] == 2:
            error = error * torch.where(batch["kind"] == 1, torch.inf, 1.0)
        return error.mean()


class OverflowThatClippingHides(OverflowOnOneRank):
    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_value_(state["model"].parameters(), 0.01)


HIDDEN: dict[str, Any] = {}


class Hidden(Base):
    """Module and optimizer are neither on the trainer nor in its state."""

    def configure(self, ctx):
        HIDDEN.update(super().configure(ctx))

    def train_step(self, batch, state, ctx):
        return super().train_step(batch, HIDDEN, ctx)


class InThread(Base):
    def train_step(self, batch, state, ctx):
        results = []
        worker = threading.Thread(target=lambda: results.append(Base.train_step(self, batch, state, ctx)))
        worker.start()
        worker.join()
        return results[0]


class InPrepareBatch(Base):
    def prepare_batch(self, raw, state, ctx):
        return super().train_step(super().prepare_batch(raw, state, ctx), state, ctx)

    def train_step(self, batch, state, ctx):
        return batch


FAULTS = (OverflowOnOneRank, OverflowThatClippingHides, Hidden, InThread, InPrepareBatch)
ZOO_OF_FAULTS = {cls.__name__: cls for cls in FAULTS}
ZOO = trainers(globals(), without=FAULTS)
