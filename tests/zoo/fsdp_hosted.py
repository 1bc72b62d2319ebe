"""Classes whose modules, copies, hooks and optimizers are difficult to shard."""

import copy
import math

import torch
from torch import distributed as dist, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, normalize

from genlight.adapter.contract.types import StepResult

from .base import mlp, trainers
from .small import Base


class Clip(Base):
    """Two towers and a trained temperature; each row has a separate loss, so that ranks can share the rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(6, 4), mlp(6, 4)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def encode_image(self, x):
            return normalize(self.image(x), dim=-1)

        def encode_text(self, x):
            return normalize(self.text(x), dim=-1)

    def model(self):
        return self.Model()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, 0.01)

    def loss(self, batch, state):
        model, x = state["model"], batch["x"]
        similarity = (model.encode_image(x) * model.encode_text(x.flip(1))).sum(1)
        return (model.logit_scale.exp() * similarity - batch["y"].squeeze(1)).square().mean()

    def change_gradients(self, state, ctx):
        self.norm = float(nn.utils.clip_grad_norm_(state["model"].parameters(), 0.5))

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        state["model"].logit_scale.clamp_(0, math.log(100))


class FormattedNorms(Base):
    """Logs norms and extremes, as strings and numbers, of gradients and weights that a rank has no part of."""

    def change_gradients(self, state, ctx):
        parameters = list(state["model"].parameters())
        largest = max(p.grad.abs().max() for p in parameters)
        flat = max(p.grad.norm(float("inf")) for p in parameters)
        texts = [f"{p.grad.norm():.4f} {p.max().item():.3f} {p.grad.abs().max():.2e}" for p in parameters]
        assert float(largest) == float(flat), "the same largest entry"
        self.seen = torch.tensor([float(text.split()[0]) for text in texts])
        for p in parameters:
            p.grad.div_(largest)


class ModuleListOfBlocks(Base):
    """Blocks in a list that the trainer calls one after the other."""

    def model(self):
        return nn.ModuleList([mlp(6, 6), mlp(6, 6), mlp(6, 1)])

    def loss(self, batch, state):
        x = batch["x"]
        for block in state["model"]:
            x = block(x)
        return mse_loss(x, batch["y"])


class Codebook(Base):
    """A layer that writes to its own weight in its forward pass, like a codebook's moving average."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(4, 6), requires_grad=False)
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            if self.training:
                self.codes.data.mul_(0.9).add_(0.1)
            return self.out(x + self.codes.mean(0))

    def model(self):
        return self.Layer()

    def optimizer(self, parameters):
        return torch.optim.Adam([p for p in parameters if p.requires_grad], 0.01)


class AveragesInWholeModules(Base):
    """Averages of a part of a network and of all of it, in modules whose names do not match a trained module.

    They are not sharded, and in-place operations on their tensors take the sharded weights.
    """

    def configure(self, ctx):
        parts = nn.ModuleDict({"encoder": mlp(6, 5), "head": nn.Linear(5, 1)})
        averages = nn.ModuleList([copy.deepcopy(parts), copy.deepcopy(parts["encoder"])]).requires_grad_(False)
        return {"parts": parts, "averages": averages, "optimizer": self.optimizer(parts.parameters())}

    def loss(self, batch, state):
        return mse_loss(state["parts"]["head"](state["parts"]["encoder"](batch["x"])), batch["y"])

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        parts, (all_of_it, encoder) = state["parts"], state["averages"]
        for a, p in zip(all_of_it.parameters(), parts.parameters(), strict=True):
            a.lerp_(p, 0.1)
        for a, p in zip(encoder.parameters(), parts["encoder"].parameters(), strict=True):
            a *= 0.9
            a += 0.1 * p


class Answer:
    """An object that torch does not traverse."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsObject(Base):
    """An inner module that returns its outputs in a custom object."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 4)

        def forward(self, x):
            return Answer(self.net(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = ReturnsObject.Inner(), nn.Linear(4, 1)

        def forward(self, x):
            return Answer(self.last(self.inner(x).value))

    def model(self):
        return self.Model()

    def loss(self, batch, state):
        return mse_loss(state["model"](batch["x"]).value, batch["y"])


class ReturnsView(Base):
    """A view that the trainer changes in place; this removes torch's hook from it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x).view(-1)

    def model(self):
        return self.Model()

    def loss(self, batch, state):
        out = state["model"](batch["x"])
        out += 0.1
        return mse_loss(out, batch["y"].view(-1))


class FeaturesOfAHook(Base):
    """A loss of activations that a forward hook has captured; one of two calls also uses the output."""

    def model(self):
        model = mlp()
        self.kept: list[torch.Tensor] = []
        model[1].register_forward_hook(lambda module, args, out: self.kept.append(out))
        return model

    def loss(self, batch, state):
        state["model"](batch["x"].flip(1))
        hidden = self.kept.pop()
        out = state["model"](batch["x"])
        self.kept.clear()
        return mse_loss(out, batch["y"]) + hidden.square().mean()


class FeaturesOfAHookAlone(FeaturesOfAHook):
    """The same without any output."""

    def loss(self, batch, state):
        state["model"](batch["x"])
        return (self.kept.pop().mean(1, keepdim=True) - batch["y"]).square().mean()


class NamesInputsOfBackward(Base):
    """Two losses, each differentiated only with respect to one module's parameters."""

    def configure(self, ctx):
        body, head = mlp(6, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (body, head)]
        return {"body": body, "head": head, "optimizers": optimizers}

    def train_step(self, batch, state, ctx):
        out = state["head"](state["body"](batch["x"]))
        loss = mse_loss(out, batch["y"])
        for optimizer in state["optimizers"]:
            optimizer.zero_grad()
        loss.backward(inputs=list(state["head"].parameters()), retain_graph=True)
        out.abs().mean().backward(inputs=list(state["body"].parameters()))
        for optimizer in state["optimizers"]:
            optimizer.step()
        return StepResult({"loss": loss.detach()})


class AddsALayer(Base):
    """Progressive growing: adds a layer and its group before the second step."""

    def configure(self, ctx):
        state = super().configure(ctx)
        parts = [part for part in state["model"] if isinstance(part, nn.Linear)]
        state["optimizer"] = torch.optim.Adam([{"params": list(part.parameters())} for part in parts], lr=0.01)
        self.steps = 0
        return state

    def change(self, state):
        layer = nn.Linear(1, 1)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        state["model"].append(layer)
        state["optimizer"].add_param_group({"params": list(layer.parameters())})

    def loss(self, batch, state):
        self.steps += 1
        if self.steps == 2:
            self.change(state)
        return super().loss(batch, state)


class DropsAGroup(AddsALayer):
    """FreezeOut: stops training the first layer and removes its group from the optimizer."""

    def change(self, state):
        for parameter in state["optimizer"].param_groups.pop(0)["params"]:
            parameter.requires_grad_(False)
            del state["optimizer"].state[parameter]


class CompiledSgd(torch.optim.SGD):
    """Compiles its update of a single number. One of two ranks has no part of it and compiles first."""

    steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                compiles = p.numel() == 1 and isinstance(p, DTensor) and self.steps > 1 - dist.get_rank()
                update = torch.compile(self._update, fullgraph=True, dynamic=False) if compiles else self._update
                update(p.detach(), p.grad, group["lr"])

    @staticmethod
    def _update(p, grad, lr):
        p.copy_(p - lr * grad)


class UpdatesByCompiledCode(Base):
    def optimizer(self, parameters):
        return CompiledSgd(parameters, lr=0.05)


ZOO = trainers(globals())
OUTPUTS = r"torch has no such operation on sharded parameters.*or use `strategy: ddp`"
REFUSED = {
    "Codebook": r'state\["model"\], its codes: a module writes to its own parameters in its forward.*`strategy: ddp`',
    "NamesInputsOfBackward": r"gradients of parameters are requested.*or use `strategy: ddp`",
}
