"""Optimizers of torch and of users: wrappers, closures, matrix updates, moments kept by hand."""

from collections import OrderedDict, defaultdict

import torch
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


class Adagrad(Base):
    """Has a state before the first step."""

    def optimizer(self, parameters):
        return torch.optim.Adagrad(parameters, lr=0.05)


class Asgd(Base):
    """Scalar states for each parameter: tensors without dimensions that steps replace."""

    def optimizer(self, parameters):
        return torch.optim.ASGD(parameters, lr=0.05)


class FactoredAdafactor(Base):
    """Moments of rows and columns, with shapes that differ from the parameter."""

    def optimizer(self, parameters):
        return torch.optim.Adafactor(parameters, lr=0.01)


class HessianDiagonal(Base):
    """Like AdaHessian: the update differentiates the gradients again, along random signs."""

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.05})

        @torch.no_grad()
        def step(self):
            held = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            signs = [torch.randint(0, 2, p.shape, dtype=p.dtype, device=p.device) * 2 - 1 for p in held]
            with torch.enable_grad():
                products = torch.autograd.grad([p.grad for p in held], held, signs)
            for p, sign, product in zip(held, signs, products, strict=True):
                diagonal = self.state[p].setdefault("diagonal", torch.ones_like(p))
                diagonal.lerp_((sign * product).abs(), 0.2)
                p.sub_(p.grad / (diagonal + 0.1), alpha=self.param_groups[0]["lr"])

    def optimizer(self, parameters):
        return self.Optimizer(parameters)

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        state["optimizer"].zero_grad()
        loss.backward(create_graph=True)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return StepResult({"loss": loss.detach()})


class ForeachFused(Base):
    """Updates all parameters by one call."""

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


class LbfgsClosure(Base):
    def configure(self, ctx):
        model = mlp().double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        return {"model": model, "optimizer": optimizer}

    def train_step(self, batch, state, ctx):
        def closure():
            state["optimizer"].zero_grad()
            loss = mse_loss(state["model"](batch["x"].double()), batch["y"].double())
            loss.backward()
            return loss

        return StepResult({"loss": state["optimizer"].step(closure).detach()})


class AdamWithClosure(Base):
    def train_step(self, batch, state, ctx):
        def closure():
            state["optimizer"].zero_grad()
            loss = self.loss(batch, state)
            loss.backward()
            return loss

        return StepResult({"loss": state["optimizer"].step(closure).detach()})


class CountingMomentum(Optimizer):
    """Keeps one step count for all parameters, like MADGRAD, and an unnamed tensor for each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        steps = self.state.setdefault("steps", torch.zeros(1, dtype=torch.long))
        steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p] if p in self.state else torch.zeros_like(p)
                    self.state[p] = moment.mul_(0.9).add_(p.grad)
                    p.add_(moment, alpha=-group["lr"] / steps.item() ** 0.5)


class StateWithoutNames(Base):
    def optimizer(self, parameters):
        return CountingMomentum(parameters, 0.05)


class Sam(Optimizer):
    """Sharpness-aware minimization in two steps, as its authors published it."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class SamTwoSteps(Base):
    def optimizer(self, parameters):
        return Sam(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        state["optimizer"].first_step(zero_grad=True)
        self.loss(batch, state).backward()
        state["optimizer"].second_step(zero_grad=True)
        return StepResult({"loss": loss.detach()})


class SamWithClosure(SamTwoSteps):
    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        state["optimizer"].step(lambda: self.loss(batch, state).backward())
        state["optimizer"].zero_grad()
        return StepResult({"loss": loss.detach()})


class LookaheadOptimizer(Optimizer):
    """The widely copied implementation, with slow weights in its own state, keyed by parameter."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group):
        for fast in group["params"]:
            state = self.state[fast]
            if "slow_param" not in state:
                state["slow_param"] = fast.data.clone()
            slow = state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def state_dict(self):
        fast = self.optimizer.state_dict()
        slow = {(id(k) if isinstance(k, torch.Tensor) else k): v for k, v in self.state.items()}
        return {"fast_state": fast["state"], "slow_state": slow, "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict):
        slow = {"state": state_dict["slow_state"], "param_groups": state_dict["param_groups"]}
        fast = {"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]}
        super().load_state_dict(slow)
        self.optimizer.load_state_dict(fast)
        self.fast_state = self.optimizer.state


class LookaheadKeyedByAddress(Base):
    resume_compares = "weights"  # its state dict holds addresses

    def optimizer(self, parameters):
        return LookaheadOptimizer(torch.optim.Adam(parameters, lr=0.01))


class SlowWeightsBeside:
    """A wrapper that is not an optimizer, with slow copies in a list."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.base, self.k, self.alpha, self.calls = optimizer, k, alpha, 0
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.parameters]

    def zero_grad(self):
        self.base.zero_grad()

    def step(self):
        self.base.step()
        self.calls += 1
        if self.calls % self.k == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.parameters, strict=True):
                    slow.add_(p - slow, alpha=self.alpha)
                    p.copy_(slow)


class LookaheadBeside(Base):
    def optimizer(self, parameters):
        return SlowWeightsBeside(torch.optim.Adam(parameters, lr=0.01))

    def state_dict(self, state):
        return {"slow": state["optimizer"].slow, "calls": state["optimizer"].calls}

    def load_state_dict(self, state, payload, ctx):
        for slow, saved in zip(state["optimizer"].slow, payload["slow"], strict=True):
            slow.copy_(saved)
        state["optimizer"].calls = payload["calls"]


class Muon(Optimizer):
    """Orthogonal updates of matrices by the Newton-Schulz iteration."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad)
                p.add_(self.orthogonal(moment), alpha=-group["lr"])

    @staticmethod
    def orthogonal(g):
        x = g / (g.norm() + 1e-7)
        for _ in range(3):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x


class MuonAndAdam(Base):
    def configure(self, ctx):
        model = mlp()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return {"model": model, "opts": [Muon(matrices), torch.optim.Adam(others, lr=0.01)]}

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        for optimizer in state["opts"]:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in state["opts"]:
            optimizer.step()
        return StepResult({"loss": loss.detach()})


class RowwiseAdagrad(Base):
    """One second moment for each row, like DLRM's; for matrices a tuple with a column, and a list under a name."""

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.05})

        @torch.no_grad()
        def step(self):
            matrices = [p for p in self.param_groups[0]["params"] if p.dim() == 2]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["rows"] = torch.zeros_like(p).mean(-1, keepdim=True)
                    state["factors"] = (
                        p.new_zeros(p.shape[-1:]),
                        {"turned": torch.zeros_like(p).mT if p.dim() == 2 else 0},
                    )
                state["rows"].add_(p.grad.square().mean(-1, keepdim=True))
                state["factors"][0].lerp_(p.grad.square().mean(0), 0.1)
                p.add_(p.grad / (state["rows"] + state["factors"][0]).sqrt().add(1e-8), alpha=-0.05)
            if "all rows" not in self.state:
                self.state["all rows"] = [torch.zeros_like(p).sum(-1) for p in matrices]
            for p, rows in zip(matrices, self.state["all rows"], strict=True):
                rows.lerp_(p.grad.square().sum(-1), 0.1)
                self.state[p]["factors"][1]["turned"].lerp_(p.grad.mT, 0.1)
                p.sub_(0.01 * rows.unsqueeze(-1) + 0.01 * self.state[p]["factors"][1]["turned"].mT)

    def optimizer(self, parameters):
        return self.Optimizer(parameters)
