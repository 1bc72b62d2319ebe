"""Teachers and students, precision by hand."""

import torch
from torch import nn
from torch.nn.functional import kl_div, mse_loss

from genlight.adapter.contract.types import StepResult

from .base import Base, labelled, mlp


class FeatureDistilled(Base):
    """A frozen teacher; a hook of it captures inner activations."""

    rows = staticmethod(labelled)

    def configure(self, ctx):
        student, teacher = mlp(6, 3), mlp(6, 3, hidden=24).requires_grad_(False).eval()
        bridge, self.caught = nn.Linear(3, 24), {}
        teacher[0].register_forward_hook(lambda _, entering, out: self.caught.update(features=out))
        optimizer = torch.optim.SGD([*student.parameters(), *bridge.parameters()], lr=0.1)
        return {"student": student, "teacher": teacher, "bridge": bridge, "optimizer": optimizer}

    def loss(self, batch, state):
        with torch.no_grad():
            goal = state["teacher"](batch["x"]).softmax(1)
        out = state["student"](batch["x"])
        close = kl_div(out.log_softmax(1), goal, reduction="batchmean")
        return close + mse_loss(state["bridge"](out), self.caught.pop("features"))


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


class OwnScaler(Base):
    """Mixed precision as in the torch documentation."""

    tolerance = 1e-2

    def configure(self, ctx):
        return {
            **super().configure(ctx),
            "scaler": torch.amp.GradScaler(torch.device(ctx.device).type, init_scale=1024.0, growth_interval=2),
        }

    def train_step(self, batch, state, ctx):
        scaler = state["scaler"]
        with torch.autocast(torch.device(ctx.device).type, dtype=torch.float16):
            out = state["model"](batch["x"])
        state["optimizer"].zero_grad()
        scaler.scale(mse_loss(out.float(), batch["y"])).backward()
        scaler.unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        scaler.step(state["optimizer"])
        scaler.update()
        return StepResult({"scale": scaler.get_scale()})


class OverflowsBesideUpdatesByHand(Base):
    """The loss of the second step overflows fp16; no scaler skips the update that the trainer makes itself."""

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
