"""Classes that compute with weights outside of modules: loss terms, adjoints, averages in lists; sharded."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from genlight.adapter.contract.types import StepResult

from .base import trainers
from .small import Base
from .updates import AdjointFunction


class Weights(Base):
    """A network with a layer of five rows and one of a single row; two ranks hold unequal parts of them."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


def by_weights(term):
    """A loss that adds a term of the weights to the mean over the rows."""
    return lambda self, batch, state: mse_loss(state["model"](batch["x"]), batch["y"]) + 0.1 * term(state["model"])


def in_each_row(self, batch, state):
    model = state["model"]
    penalty = sum(p.square().sum() for p in model.parameters())
    return ((model(batch["x"]) - batch["y"]).square()[:, 0] + 0.1 * penalty).mean()


def divided_by_a_norm(self, batch, state):
    model = state["model"]
    return (model(batch["x"]) / model[2].weight.norm() - batch["y"]).square().mean()


def times_a_mean(self, batch, state):
    model = state["model"]
    return ((model(batch["x"]) - batch["y"]).square() * (1 + model[0].weight.square().mean())).mean()


def scaled_by_the_loss(self, batch, state):
    model = state["model"]
    loss = mse_loss(model(batch["x"]), batch["y"])
    return loss + loss.detach() * model[0].weight.square().sum()


def stacked_with_the_loss(self, batch, state):
    model = state["model"]
    return torch.stack([mse_loss(model(batch["x"]), batch["y"]), 0.1 * model[0].weight.norm()]).sum()


def tied_output(self, batch, state):
    model = state["model"]
    return (model[0](batch["x"]).tanh() @ model[0].weight).square().mean()


def only_weights(self, batch, state):
    return 0.1 * sum(p.pow(2).sum() for p in state["model"].parameters())


LOSSES = {
    **{
        loss.__name__: loss
        for loss in (
            *(in_each_row, divided_by_a_norm, times_a_mean, scaled_by_the_loss),
            *(stacked_with_the_loss, tied_output, only_weights),
        )
    },
    "sum_of_squares": by_weights(lambda m: sum(p.pow(2).sum() for p in m.parameters())),
    "norms": by_weights(lambda m: sum(p.norm() for p in m.parameters())),
    "largest": by_weights(lambda m: sum(p.abs().max() + p.norm(float("inf")) for p in m.parameters())),
    "smallest": by_weights(lambda m: sum(p.amin() + p.median() for p in m.parameters())),
    "deviation": by_weights(lambda m: m[0].weight.std() + m[0].bias.var()),
    "rows_and_columns": by_weights(lambda m: m[0].weight.norm(dim=1).sum() + m[0].weight.norm(dim=0).sum()),
    "orthogonal": by_weights(lambda m: (m[0].weight @ m[0].weight.T - torch.eye(5)).square().sum()),
    "one_vector": by_weights(lambda m: nn.utils.parameters_to_vector(m.parameters()).norm()),
    "mean_of_squares": by_weights(lambda m: F.mse_loss(m[0].weight, torch.zeros_like(m[0].weight))),
    "one_row": by_weights(lambda m: m[0].weight[3].square().sum()),
    "logarithm": by_weights(lambda m: sum(p.flatten().logsumexp(0) for p in m.parameters())),
    "spectral": by_weights(lambda m: torch.linalg.matrix_norm(m[0].weight, 2)),
}
TERMS = {name: type(name, (Weights,), {"loss": loss}) for name, loss in LOSSES.items()}


class PenaltyByItself(Weights):
    """A term of weights has its own backward calls, before and after the call for the rows."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        only_weights(self, batch, state).backward()
        self.loss(batch, state).backward()
        only_weights(self, batch, state).backward()
        state["optimizer"].step()
        return StepResult({})


class ElasticWeights(Weights):
    """Elastic weight consolidation: earlier weights and their importance are tensors made in ``configure``."""

    def configure(self, ctx):
        state = super().configure(ctx)
        torch.manual_seed(1)
        parameters = list(state["model"].named_parameters())
        state["old"] = {name: torch.randn(p.shape) for name, p in parameters}
        state["importance"] = {name: torch.rand(p.shape) for name, p in parameters}
        return state

    def loss(self, batch, state):
        importance, parameters = state["importance"], state["model"].named_parameters()
        return super().loss(batch, state) + sum(
            (importance[n] * (p - state["old"][n]).pow(2)).sum() for n, p in parameters
        )

    def after_update(self, batch, state, ctx):
        for name, p in state["model"].named_parameters():
            state["importance"][name] += p.grad.data.clone().pow(2) / 8


class Proximal(Weights):
    """FedProx: the distance from the weights of the first step, as shards."""

    start = None

    def loss(self, batch, state):
        parameters = list(state["model"].parameters())
        self.start = self.start or [p.detach().clone() for p in parameters]
        distance = sum((p - q).norm() ** 2 for p, q in zip(parameters, self.start, strict=True))
        return super().loss(batch, state) + 0.05 * distance + 0.1 * (parameters[0] - self.start[0] + 1).norm()


class PenaltyOnOneRank(Weights):
    """All ranks compute a term, but only one adds it to its loss."""

    def train_step(self, batch, state, ctx):
        loss, norm = self.loss(batch, state), state["model"][0].weight.norm() + 0 * batch["x"].mean()
        state["optimizer"].zero_grad()
        (loss + norm if ctx.rank == 0 else loss).backward()
        state["optimizer"].step()
        return StepResult({})


class Shadow(Weights):
    """An average in a list made in ``configure``, updated in one of several ways."""

    def configure(self, ctx):
        state = super().configure(ctx)
        torch.manual_seed(2)
        return {**state, "shadow": [torch.randn(p.shape) for p in state["model"].parameters()]}

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        self.average(state, list(state["model"].parameters()))


def lerp(state, parameters):
    for average, p in zip(state["shadow"], parameters, strict=True):
        average.lerp_(p, 0.1)


def multiply_and_add(state, parameters):
    for average, p in zip(state["shadow"], parameters, strict=True):
        average.mul_(0.9).add_(p.data, alpha=0.1)


def replace(state, parameters):
    state["shadow"] = [0.9 * a + 0.1 * p.detach() for a, p in zip(state["shadow"], parameters, strict=True)]


def lists_of_tensors(state, parameters):
    torch._foreach_mul_(state["shadow"], 0.9)
    torch._foreach_add_(state["shadow"], parameters, alpha=0.1)
    torch._foreach_lerp_(parameters, state["shadow"], 0.1)


SHADOWS = {
    f"Shadow_{average.__name__}": type("Shadow", (Shadow,), {"average": staticmethod(average)})
    for average in (lerp, multiply_and_add, replace, lists_of_tensors)
}


class SwapsData(Shadow):
    """Swaps the average in by ``.data``, reads it, and swaps it out again."""

    average = staticmethod(lerp)

    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)
        parameters = list(state["model"].parameters())
        kept = [p.data for p in parameters]
        for p, average in zip(parameters, state["shadow"], strict=True):
            p.data = average
        with torch.no_grad():
            seen = state["model"](torch.ones(2, 6)).mean()
        for p, own in zip(parameters, kept, strict=True):
            p.data = own
        return super().train_step({**batch, "y": batch["y"] * seen}, state, ctx)


class SwapsDataOfShards(SwapsData):
    """Creates the average in the first step, from shards."""

    def configure(self, ctx):
        return {**super().configure(ctx), "shadow": None}

    def train_step(self, batch, state, ctx):
        state["shadow"] = state["shadow"] or [p.detach().clone() for p in state["model"].parameters()]
        return super().train_step(batch, state, ctx)


class SwapsBetweenSteps(Shadow):
    """Swaps the average in while it prepares a batch, outside of the step."""

    average = staticmethod(lerp)
    copies = False

    def prepare_batch(self, raw, state, ctx):
        batch, parameters = super().prepare_batch(raw, state, ctx), list(state["model"].parameters())
        kept = [p.data.clone() for p in parameters]
        self.put(parameters, state["shadow"])
        with torch.no_grad():
            batch["y"] = batch["y"] * state["model"](torch.ones(2, 6)).mean()
        self.put(parameters, kept)
        return batch

    def put(self, parameters, values):
        for p, value in zip(parameters, values, strict=True):
            if self.copies:
                p.data.copy_(value)
            else:
                p.data = value


class CopiesBetweenSteps(SwapsBetweenSteps):
    copies = True


class TargetThroughData(Weights):
    """A target network that follows by ``.data``, and is once exchanged with the network."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "target": copy.deepcopy(state["model"]), "calls": 0}

    def after_update(self, batch, state, ctx):
        state["calls"] += 1
        for t, p in zip(state["target"].parameters(), state["model"].parameters(), strict=True):
            t.data = 0.1 * p.data + 0.9 * t.data
            if state["calls"] == 2:
                t.data, p.data = p.data, t.data


class WritesWholeGradients(Shadow):
    """Replaces gradients by unsharded tensors that differ between ranks."""

    def average(self, state, parameters):
        for average, p in zip(state["shadow"], parameters, strict=True):
            p.grad = average * (1 + self.sign)
        state["optimizer"].step()

    def train_step(self, batch, state, ctx):
        self.sign = (0.5 - ctx.rank) if ctx.world_size > 1 else 0
        return super().train_step(batch, state, ctx)


class TrainsAnAlias(Shadow):
    """A list holds the weights, so that in plain torch an update changes both."""

    def average(self, state, parameters):
        for average, p in zip(state["shadow"], parameters, strict=True):
            average.add_(p.data - average, alpha=0.5)
            p.data = average


class WritesItsRank(Weights):
    """Each rank adds a different unsharded tensor to a weight."""

    def train_step(self, batch, state, ctx):
        with torch.no_grad():
            state["model"][0].weight.add_(torch.full((5, 6), float(ctx.rank)))
        return super().train_step(batch, state, ctx)


class OdeAdjoint(torch.autograd.Function):
    """Like torchdiffeq's: keeps parameters on the context, sums several calls, and turns None into zeros."""

    @staticmethod
    def forward(ctx, module, parameters, x, *_):
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x) + module(x * 0.5)

    @staticmethod
    def backward(ctx, gradient):
        total = [torch.zeros_like(each) for each in (*ctx.saved_tensors, *ctx.parameters)]
        for factor in (1.0, 0.5):
            with torch.enable_grad():
                x = (ctx.saved_tensors[0].detach() * factor).requires_grad_()
                found = torch.autograd.grad(ctx.module(x), (x, *ctx.parameters), gradient, allow_unused=True)
            found = [t if g is None else g for t, g in zip(total, found, strict=True)]
            total = [total[0] + factor * found[0], *(t + g for t, g in zip(total[1:], found[1:], strict=True))]
        return (None, None, *total)


class Reversible(torch.autograd.Function):
    """Like a reversible layer: backward calls backward."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def adjoint(module, x):
    return AdjointFunction.apply(module, x, *module.parameters())


def adjoint_and_call(module, x):
    return module(adjoint(module, x)) + module(x)


def adjoint_in_a_checkpoint(module, x):
    return checkpoint(adjoint, module, x.clone().requires_grad_(), use_reentrant=False)


def adjoint_in_a_reentrant_checkpoint(module, x):
    return checkpoint(adjoint, module, x.clone().requires_grad_(), use_reentrant=True)


def ode_adjoint(module, x):
    return OdeAdjoint.apply(module, tuple(module.parameters()), x, *module.parameters())


def reversible(module, x):
    return module(Reversible.apply(module, Reversible.apply(module, x.clone().requires_grad_())))


def checkpoint_in_a_checkpoint(module, x):
    def inner(y):
        return checkpoint(module, module(y), use_reentrant=False)

    return checkpoint(inner, x.clone().requires_grad_(), use_reentrant=True)


def implicit(module, x):
    """Like a deep equilibrium model: a hook solves for the gradient by ``torch.autograd.grad``."""
    z = 0.1 * module(x)
    last = z.clone().detach().requires_grad_()
    again = 0.1 * module(last + x)

    def solve(gradient):
        found = gradient
        for _ in range(3):
            found = torch.autograd.grad(again, last, found, retain_graph=True)[0] + gradient
        return found

    if z.requires_grad:
        z.register_hook(solve)
    return z


class Nested(Weights):
    """A part of the network computes its gradients by calls within backward; it, or its parts, are units."""

    inside = False

    class Model(nn.Module):
        def __init__(self, call) -> None:
            super().__init__()
            self.call = call
            self.first, self.part = nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
            self.last = nn.Linear(5, 1)

        def forward(self, x):
            return self.last(self.call(self.part, self.first(x)))

    def model(self):
        model = self.Model(self.call)
        return model if self.inside else nn.ModuleDict(dict(model.named_children()))

    def loss(self, batch, state):
        if self.inside:
            return super().loss(batch, state)
        model = state["model"]
        out = model["last"](self.call(model["part"], model["first"](batch["x"])))
        return mse_loss(out, batch["y"])


CALLS = (
    adjoint,
    adjoint_and_call,
    adjoint_in_a_checkpoint,
    adjoint_in_a_reentrant_checkpoint,
    ode_adjoint,
    reversible,
    checkpoint_in_a_checkpoint,
    implicit,
)
NESTED = {
    f"{call.__name__}{'_inside' if inside else ''}": type(
        "Nested", (Nested,), {"call": staticmethod(call), "inside": inside}
    )
    for call in CALLS
    for inside in (False, True)
}
ZOO = {**TERMS, **SHADOWS, **NESTED, **trainers(globals(), without=(Weights, Shadow, Nested))}
REFUSED = {
    "PenaltyOnOneRank": r"rank 0 is about to call backward with gradients for norm of weights, rank 1 to call backward",
    "TrainsAnAlias": r"`\.data` of a sharded parameter was set to a full tensor, and later only one of the two",
    "WritesItsRank": r"rank 0 is about to write a full tensor to a sharded one of shape \(5, 6\)",
}
