"""Teachers and students, pruning, quantization, precision by hand."""

import torch
from torch import nn
from torch.nn.functional import kl_div, mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, labelled, mlp


class Distilled(Base):
    rows = staticmethod(labelled)

    def configure(self, ctx):
        student, teacher = mlp(6, 3), mlp(6, 3, hidden=24).requires_grad_(False).eval()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        return {"student": student, "teacher": teacher, "optimizer": optimizer}

    def loss(self, batch, state):
        with torch.no_grad():
            goal = state["teacher"](batch["x"]).softmax(1)
        return kl_div(state["student"](batch["x"]).log_softmax(1), goal, reduction="batchmean")


class FeatureDistilled(Distilled):
    """A hook of the teacher captures inner activations."""

    def configure(self, ctx):
        state = super().configure(ctx)
        self.caught = {}
        state["teacher"][0].register_forward_hook(lambda _, entering, out: self.caught.update(features=out))
        state["bridge"] = nn.Linear(3, 24)
        state["optimizer"].add_param_group({"params": state["bridge"].parameters()})
        return state

    def loss(self, batch, state):
        base = super().loss(batch, state)
        return base + mse_loss(state["bridge"](state["student"](batch["x"])), self.caught.pop("features"))


class MagnitudePruning(Base):
    """Applies masks to the weights after each update."""

    def configure(self, ctx):
        state = super().configure(ctx)
        masks = [(p.detach().abs() > p.detach().abs().median()).float() for p in state["model"].parameters()]
        return {**state, "masks": masks}

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        for p, mask in zip(state["model"].parameters(), state["masks"], strict=True):
            p.mul_(mask)


class QuantizationAware(Base):
    """Rounds weights in the forward pass, with straight-through gradients."""

    class Rounded(nn.Linear):
        def forward(self, x):
            scale = self.weight.detach().abs().max() / 7
            rounded = (self.weight / scale).round() * scale
            return nn.functional.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)

    def model(self):
        return nn.Sequential(self.Rounded(6, 12), nn.Tanh(), self.Rounded(12, 1))


class FloatMasters(Base):
    """A model in bf16, fp32 master copies in the optimizer, gradients copied over by hand."""

    tolerance = 0.02

    def configure(self, ctx):
        model = mlp().bfloat16()
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        return {"model": model, "masters": masters, "optimizer": torch.optim.SGD(masters, lr=0.05)}

    def train_step(self, batch, state, ctx):
        loss = mse_loss(state["model"](batch["x"].bfloat16()).float(), batch["y"])
        state["model"].zero_grad()
        loss.backward()
        for master, p in zip(state["masters"], state["model"].parameters(), strict=True):
            master.grad = p.grad.float()
        state["optimizer"].step()
        with torch.no_grad():
            for master, p in zip(state["masters"], state["model"].parameters(), strict=True):
                p.copy_(master)
        return StepResult({"loss": loss.detach()})


class OwnAutocast(Base):
    tolerance = 0.02

    def loss(self, batch, state):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = state["model"](batch["x"])
        return mse_loss(out.float(), batch["y"])


class OwnScaler(Base):
    """Mixed precision as in the torch documentation."""

    tolerance = 1e-2

    def configure(self, ctx):
        return {**super().configure(ctx), "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)}

    def train_step(self, batch, state, ctx):
        scaler = state["scaler"]
        with torch.autocast("cpu", dtype=torch.float16):
            out = state["model"](batch["x"])
        state["optimizer"].zero_grad()
        scaler.scale(mse_loss(out.float(), batch["y"])).backward()
        scaler.unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        scaler.step(state["optimizer"])
        scaler.update()
        return StepResult({"scale": scaler.get_scale()})


class OverflowsOnce(Base):
    """The loss of the second step overflows fp16; its update must be skipped and counted."""

    kept = ("steps",)

    def configure(self, ctx):
        return {**super().configure(ctx), "steps": 0}

    def train_step(self, batch, state, ctx):
        state["steps"] += 1
        out = state["model"](batch["x"])
        loss = mse_loss(out.float(), batch["y"])
        if ctx.dtype == "fp16" and state["steps"] == 2:
            loss = loss * torch.inf
        state["optimizer"].zero_grad()
        loss.backward()
        if ctx.run_state is not None or state["steps"] != 2 or ctx.dtype != "fp16":
            state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class OverflowsBesideUpdatesByHand(Base):
    """The same with a head that the trainer updates itself; no scaler skips that update."""

    kept = ("steps",)

    def configure(self, ctx):
        body, head = mlp(6, 4), torch.nn.Linear(4, 1)
        return {"body": body, "head": head, "optimizer": torch.optim.Adam(body.parameters(), lr=0.01), "steps": 0}

    def train_step(self, batch, state, ctx):
        state["steps"] += 1
        overflows = ctx.dtype == "fp16" and state["steps"] == 2
        loss = mse_loss(state["head"](state["body"](batch["x"])).float(), batch["y"])
        state["optimizer"].zero_grad()
        state["head"].zero_grad()
        (loss * torch.inf if overflows else loss).backward()
        if ctx.run_state is None and overflows:
            return StepResult({"loss": loss.detach()})
        state["optimizer"].step()
        with torch.no_grad():
            for p in state["head"].parameters():
                p.sub_(0.1 * p.grad)
        return StepResult({"loss": loss.detach()})


class DoublePrecision(Base):
    def model(self):
        return mlp().double()

    def loss(self, batch, state):
        return mse_loss(state["model"](batch["x"].double()), batch["y"].double())


class ComplexWeights(Base):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.head = nn.Linear(6, 1)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = torch.fft.irfft(torch.fft.rfft(x.float(), dim=1) * self.spectrum, n=6, dim=1)
            return self.head(x)

    def model(self):
        return self.Net()


class NonPersistentStatistics(Base):
    """Running statistics in a buffer outside of state dicts; the trainer saves them itself."""

    differs = "statistics come from each rank's own rows until the end of a step"

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.register_buffer("seen", torch.zeros(6), persistent=False)

        def forward(self, x):
            self.seen.lerp_(x.detach().mean(0), 0.5)
            return self.body(x - self.seen)

    def model(self):
        return self.Net()

    def state_dict(self, state):
        return {"seen": state["model"].seen}

    def load_state_dict(self, state, payload, ctx):
        state["model"].seen.copy_(payload["seen"])
