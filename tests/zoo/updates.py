"""Weights and gradients changed by hand, with or without an optimizer; schedules, groups, hooks."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


class OwnMomentumList(Base):
    """No optimizer: moments in a list, weights changed by hand."""

    kept = ("moments",)

    def configure(self, ctx):
        model = mlp().to(ctx.device)
        return {"model": model, "moments": [torch.zeros_like(p) for p in model.parameters()]}

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        state["model"].zero_grad()
        loss.backward()
        with torch.no_grad():
            for moment, p in zip(state["moments"], state["model"].parameters(), strict=True):
                moment.mul_(0.9).add_(p.grad)
                p -= 0.05 * moment
        return StepResult({"loss": loss.detach()})


class LeavesReplaced(Base):
    """Each update creates new tensors in a new dict, and so does loading."""

    def configure(self, ctx):
        weight = (torch.randn(6, 1) * 0.1).to(ctx.device)
        bias = torch.zeros(1, device=ctx.device)
        return {"params": {"weight": weight.requires_grad_(), "bias": bias.requires_grad_()}}

    def train_step(self, batch, state, ctx):
        params = state["params"]
        loss = mse_loss(batch["x"] @ params["weight"] + params["bias"], batch["y"])
        loss.backward()
        state["params"] = {k: (p - 0.1 * p.grad).detach().requires_grad_() for k, p in params.items()}
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"params": state["params"]}

    def load_state_dict(self, state, payload, ctx):
        state["params"] = {k: p.detach().requires_grad_() for k, p in payload["params"].items()}


class OneBufferOfGradients(Base):
    """The model's weights are views of one tensor, and its gradients of another; the optimizer has these tensors."""

    def configure(self, ctx):
        model = mlp()
        weights = list(model.parameters())
        flat = torch.cat([p.detach().flatten() for p in weights]).requires_grad_()
        flat.grad = torch.zeros_like(flat)
        sizes = [p.numel() for p in weights]
        for p, part, grad in zip(weights, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
            p.data, p.grad = part.view_as(p), grad.view_as(p)
        return {"model": model, "flat": flat, "optimizer": torch.optim.SGD([flat], 0.05, momentum=0.9)}

    def train_step(self, batch, state, ctx):
        state["flat"].grad.zero_()
        loss = self.loss(batch, state)
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class OptimizerAndByHand(Base):
    """An optimizer for the body; the trainer updates the head by hand."""

    def configure(self, ctx):
        body, head = mlp(6, 4), nn.Linear(4, 1)
        return {"body": body, "head": head, "optimizer": torch.optim.Adam(body.parameters(), lr=0.01)}

    def loss(self, batch, state):
        return mse_loss(state["head"](state["body"](batch["x"])), batch["y"])

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for p in state["head"].parameters():
            p.sub_(0.1 * p.grad)
        state["head"].zero_grad()


class HeadOnlyClippedByAll(Base):
    """Only the head is in the optimizer; the norm covers the complete model."""

    def configure(self, ctx):
        model = mlp()
        return {"model": model, "optimizer": torch.optim.SGD(model[2].parameters(), lr=0.1)}

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        state["model"].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class ClippedByHand(Base):
    """A norm summed by hand, parameter by parameter."""

    def change_gradients(self, state, ctx):
        norm = sum(float(p.grad.square().sum()) for p in state["model"].parameters()) ** 0.5
        for p in state["model"].parameters():
            p.grad.mul_(min(1.0, 0.05 / (norm + 1e-6)))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


class GradientNoise(Base):
    """Adds noise to the averaged gradients, from a generator with the same seed on all ranks."""

    def setup(self, ctx):
        super().setup(ctx)
        self.noise = torch.Generator().manual_seed(5)

    def change_gradients(self, state, ctx):
        for p in state["model"].parameters():
            p.grad.add_(0.01 * torch.randn(p.shape, generator=self.noise).to(p.device))

    def state_dict(self, state):
        return {"noise": self.noise.get_state()}

    def load_state_dict(self, state, payload, ctx):
        self.noise.set_state(payload["noise"])


class ReduceOnPlateau(Base):
    def configure(self, ctx):
        state = super().configure(ctx)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer"], patience=0, threshold=10.0)
        return {**state, "scheduler": scheduler}

    def after_update(self, batch, state, ctx):
        state["scheduler"].step(1.0)


class OptimizerPerParameter(Base):
    """A separate optimizer updates each parameter within backward."""

    def configure(self, ctx):
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def update(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        return {"model": model, "optimizers": list(optimizers.values())}

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        return StepResult({"loss": loss.detach()})


class WeightsThroughStateDict(Base):
    """Moves half-way back to the first weights, through a state dict."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "first": {k: v.clone() for k, v in state["model"].state_dict().items()}}

    def after_update(self, batch, state, ctx):
        now = state["model"].state_dict()
        state["model"].load_state_dict({k: 0.9 * v + 0.1 * state["first"][k] for k, v in now.items()})


class FlattenedByHand(Base):
    """Flattens gradients into one vector, clips it, and writes it back."""

    def change_gradients(self, state, ctx):
        parameters = list(state["model"].parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters]).clamp(-0.01, 0.01)
        for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(g.view_as(p))


class CompiledStep(Base):
    """Forward, backward and clearing in one compiled function."""

    def configure(self, ctx):
        state = super().configure(ctx)

        def forward_and_backward(batch):
            loss = self.loss(batch, state)
            loss.backward()
            return loss.detach()

        self.compiled = torch.compile(forward_and_backward, backend="aot_eager")
        return state

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        loss = self.compiled(batch)
        state["optimizer"].step()
        return StepResult({"loss": loss})


class PenaltyInEachRow(Base):
    """Adds a term of the weights to the loss of each row, divided by the norm of a layer."""

    def loss(self, batch, state):
        model = state["model"]
        rows = (model(batch["x"]) / (1 + model[2].weight.norm()) - batch["y"]).square()
        return (rows + 0.01 * sum(p.square().sum() for p in model.parameters())).mean()


class AdjointFunction(torch.autograd.Function):
    """Calls a module without a graph, and computes gradients of its parameters in backward."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            found = torch.autograd.grad(y, [x, *parameters], gradient.to(y.dtype), allow_unused=True)
        return (None, *found)


class Adjoint(Base):
    """Like torchdiffeq's adjoint: backward calls the module again and computes gradients of its parameters."""

    def model(self):
        return nn.ModuleDict({"flow": mlp(6, 6), "head": nn.Linear(6, 1)})

    def loss(self, batch, state):
        flow, head = state["model"]["flow"], state["model"]["head"]
        return mse_loss(head(AdjointFunction.apply(flow, batch["x"], *flow.parameters())), batch["y"])
