"""Whole recipes as they are published: several techniques in one class."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, logsigmoid, mse_loss, normalize
from torch.utils.checkpoint import checkpoint

from genlight.adapter.contract.types import StepResult

from .base import Base, generator, images, labelled, mlp, tokens


def _update(state: Any, loss: torch.Tensor) -> StepResult:
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return StepResult({"loss": loss.detach()})


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(4, 4)
        self.time = nn.Linear(1, 4)
        self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x, t, y):
        h = self.down(x) + (self.time(t[:, None]) + self.classes(y))[:, :, None, None]
        return self.up(torch.cat([h, torch.tanh(self.middle(torch.relu(h)))], 1))


class GuidedDiffusionWithEma(Base):
    """Classifier-free dropout and noise that come with the rows, and an EMA of parameters and buffers."""

    @staticmethod
    def rows(step):
        g = generator(step)
        batch = images(step)
        noise = torch.randn(batch["x"].shape, generator=g)
        return {**batch, "noise": noise, "t": torch.rand(8, generator=g), "drop": torch.rand(8, generator=g)}

    def configure(self, ctx):
        model = SmallUNet()
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        return {"model": model, "ema": ema, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def train_step(self, batch, state, ctx):
        y = torch.where(batch["drop"] < 0.2, 3, batch["y"])
        t = batch["t"][:, None, None, None]
        noisy = (1 - t) * batch["x"] + t * batch["noise"]
        result = _update(state, mse_loss(state["model"](noisy, batch["t"], y), batch["noise"]))
        with torch.no_grad():
            for average, p in zip(state["ema"].parameters(), state["model"].parameters(), strict=True):
                average.lerp_(p, 0.1)
        return result


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
    """DPO whose reference is the policy with its adapters switched off."""

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
    """LoRA that is merged for an evaluation within the step, and unmerged again."""

    tolerance_alone = 0.0

    def loss(self, batch, state):
        return cross_entropy(state["model"](batch["x"]), batch["y"])

    def train_step(self, batch, state, ctx):
        result = _update(state, self.loss(batch, state))
        layers = [m for m in state["model"] if isinstance(m, AdaptedLinear)]
        for layer in layers:
            layer.merge(1)
        with torch.no_grad():
            merged = self.loss(batch, state)
        for layer in layers:
            layer.merge(-1)
        return StepResult({**result.metrics, "merged": merged})


class LazyPenaltyGan(Base):
    """Two optimizers, weight norm, and a gradient penalty through create_graph each second step."""

    def configure(self, ctx):
        norm = nn.utils.parametrizations.weight_norm
        critic = nn.Sequential(norm(nn.Linear(6, 12)), nn.Softplus(), norm(nn.Linear(12, 1)))
        made = mlp(6, 6)
        return {
            "critic": critic,
            "maker": made,
            "c": torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9)),
            "m": torch.optim.Adam(made.parameters(), lr=0.01, betas=(0.0, 0.9)),
            "calls": 0,
        }

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        real = batch["x"].clone().requires_grad_(True)
        fake = state["maker"](batch["x"].flip(1)).detach()
        scores = state["critic"](real)
        loss = nn.functional.softplus(-scores).mean() + nn.functional.softplus(state["critic"](fake)).mean()
        if state["calls"] % 2:
            (gradient,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
            loss = loss + 0.5 * gradient.square().sum(1).mean()
        state["c"].zero_grad()
        loss.backward()
        state["c"].step()
        made = nn.functional.softplus(-state["critic"](state["maker"](batch["x"].flip(1)))).mean()
        state["m"].zero_grad()
        made.backward()
        state["m"].step()
        return StepResult({"critic": loss.detach(), "maker": made.detach()})

    def state_dict(self, state):
        return {"calls": state["calls"]}

    def load_state_dict(self, state, payload, ctx):
        state["calls"] = payload["calls"]


class TopTwoOfManyExperts(Base):
    """More experts than rows can use, an auxiliary loss on the router, and a z-loss."""

    def configure(self, ctx):
        model = nn.Module()
        model.router = nn.Linear(6, 9)
        model.experts = nn.ModuleList(mlp(6, 1, 4) for _ in range(9))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def loss(self, batch, state):
        model, x = state["model"], batch["x"]
        logits = model.router(x)
        weights, chosen = logits.softmax(1).topk(2, dim=1)
        out = torch.zeros(len(x), 1, dtype=weights.dtype)
        for index, expert in enumerate(model.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, (weights[row, slot, None] * expert(x[row])).to(out.dtype))
        return mse_loss(out, batch["y"]) + 0.01 * logits.logsumexp(1).square().mean()


class TeacherSeenByHooks(Base):
    """Features of a teacher in eval mode, with BatchNorm, taken by forward hooks."""

    rows = staticmethod(images)

    def configure(self, ctx):
        def network(norm):
            return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

        teacher = network(nn.BatchNorm2d(4)).eval().requires_grad_(False)
        model = network(nn.GroupNorm(2, 4))
        self.features = {}
        teacher[2].register_forward_hook(lambda m, args, out: self.features.__setitem__("teacher", out))
        model[2].register_forward_hook(lambda m, args, out: self.features.__setitem__("student", out))
        return {"model": model, "teacher": teacher, "optimizer": torch.optim.SGD(model.parameters(), 0.05, 0.9)}

    def loss(self, batch, state):
        with torch.no_grad():
            wanted = state["teacher"](batch["x"])
        out = state["model"](batch["x"])
        hint = mse_loss(self.features["student"], self.features["teacher"])
        self.features.clear()
        return cross_entropy(out, batch["y"]) + mse_loss(out, wanted) + hint


class ReentrantCheckpointing(Base):
    """Blocks that are computed again in backward, the old way."""

    def model(self):
        return nn.Sequential(*(mlp(6, 6) for _ in range(3)), nn.Linear(6, 1))

    def loss(self, batch, state):
        h = batch["x"].requires_grad_(True)
        for block in list(state["model"])[:-1]:
            h = h + checkpoint(block, h, use_reentrant=True)
        return mse_loss(state["model"][-1](h), batch["y"])


class MuonWithAdamInside(torch.optim.Optimizer):
    """Matrices by orthogonal updates in bf16, the rest as AdamW does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"], state["t"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["t"] += 1
                if p.dim() == 2:
                    state["m"].lerp_(p.grad, 0.1)
                    p.add_(self.orthogonal(p.grad.lerp(state["m"], 0.9)), alpha=-group["lr"])
                else:
                    state["m"].lerp_(p.grad, 0.1)
                    state["v"].lerp_(p.grad.square(), 0.05)
                    m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.95 ** state["t"])
                    p.mul_(1 - 0.01 * group["lr"]).addcdiv_(m, v.sqrt().add_(1e-8), value=-group["lr"])

    @staticmethod
    def orthogonal(g: torch.Tensor) -> torch.Tensor:
        x = g.T if g.size(0) > g.size(1) else g
        x = x / (x.norm() + 1e-7)
        for _ in range(2):
            a = x @ x.T
            x = 1.5 * x - 0.5 * a @ x
        return (x.T if g.size(0) > g.size(1) else x) * max(1, g.size(0) / g.size(1)) ** 0.5


class OneOptimizerOfTwoKinds(Base):
    def model(self):
        return mlp(6, 4, 12)

    def optimizer(self, parameters):
        return MuonWithAdamInside(parameters)

    def loss(self, batch, state):
        return mse_loss(state["model"](batch["x"]), batch["y"].expand(-1, 4))


class SwaByHand(Base):
    """A running mean of weights in a dict, and an evaluation with it in their place."""

    def configure(self, ctx):
        return {**super().configure(ctx), "mean": {}, "seen": 0}

    @torch.no_grad()
    def train_step(self, batch, state, ctx):
        with torch.enable_grad():
            result = super().train_step(batch, state, ctx)
        state["seen"] += 1
        for name, p in state["model"].named_parameters():
            if name not in state["mean"]:
                state["mean"][name] = p.detach().clone()
            else:
                state["mean"][name] += (p - state["mean"][name]) / state["seen"]
        kept = {name: p.detach().clone() for name, p in state["model"].named_parameters()}
        for name, p in state["model"].named_parameters():
            p.copy_(state["mean"][name])
        score = self.loss(batch, state)
        for name, p in state["model"].named_parameters():
            p.copy_(kept[name])
        return StepResult({**result.metrics, "score": score})

    def state_dict(self, state):
        return {"mean": state["mean"], "seen": state["seen"]}

    def load_state_dict(self, state, payload, ctx):
        state["mean"], state["seen"] = dict(payload["mean"]), payload["seen"]


class ContrastOverAllRanks(Base):
    """Features of all ranks, gathered by hand, with a gradient through this rank's own."""

    def model(self):
        return mlp(6, 4)

    def loss(self, batch, state):
        one, other = (normalize(state["model"](x), dim=1) for x in (batch["x"], batch["x"].flip(1)))
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size > 1:
            one, other = (self.gathered(features, size) for features in (one, other))
        logits = one.float() @ other.float().T / 0.1
        # Each rank has the gradient through its own rows alone, of which the mean over ranks is taken.
        return size * cross_entropy(logits, torch.arange(len(logits)))

    @staticmethod
    def gathered(features: torch.Tensor, size: int) -> torch.Tensor:
        everyone = [torch.zeros_like(features) for _ in range(size)]
        dist.all_gather(everyone, features.detach().contiguous())
        everyone[dist.get_rank()] = features
        return torch.cat(everyone)


class ChunksOfASequence(Base):
    """Two chunks of a sequence in a step, each with its own backward, and a hidden state that is carried on."""

    rows = staticmethod(tokens)
    per_rank = ("hidden",)

    def configure(self, ctx):
        model = nn.Module()
        model.embed, model.cell, model.head = nn.Embedding(11, 6), nn.GRUCell(6, 6), nn.Linear(6, 11)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01), "hidden": None}

    def train_step(self, batch, state, ctx):
        model, x = state["model"], batch["x"]
        hidden = torch.zeros(len(x), 6) if state["hidden"] is None else state["hidden"]
        state["optimizer"].zero_grad()
        for chunk in x.split(3, dim=1):
            loss, hidden = torch.zeros(()), hidden.detach()
            for now, following in zip(chunk.T[:-1], chunk.T[1:], strict=True):
                hidden = model.cell(model.embed(now), hidden)
                loss = loss + cross_entropy(model.head(hidden), following)
            loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        state["optimizer"].step()
        state["hidden"] = hidden.detach()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"hidden": state["hidden"]}

    def load_state_dict(self, state, payload, ctx):
        state["hidden"] = payload["hidden"]


class CompiledLoss(Base):
    """A compiled function of the loss, which closes over the module."""

    tolerance_alone = 1e-6

    def configure(self, ctx):
        state = super().configure(ctx)
        model = state["model"]

        def loss(x, y):
            return mse_loss(model(x), y)

        self.compiled = torch.compile(loss, backend="aot_eager")
        return state

    def loss(self, batch, state):
        return self.compiled(batch["x"], batch["y"])


class SharpnessByHand(Base):
    """The weights moved up and back by the trainer itself, between two backward calls."""

    def train_step(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        state["optimizer"].zero_grad()
        loss = self.loss(batch, state)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            moves = [0.05 * p.grad / (norm + 1e-6) for p in parameters]
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        state["optimizer"].zero_grad()
        self.loss(batch, state).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class TiedByHand(Base):
    """The embedding's weight read outside of any module's call, as the output layer."""

    rows = staticmethod(tokens)

    def model(self):
        model = nn.Module()
        model.embed, model.body = nn.Embedding(11, 6), mlp(6, 6)
        return model

    def loss(self, batch, state):
        model = state["model"]
        hidden = model.body(model.embed(batch["x"]).mean(1))
        return cross_entropy(linear(hidden, model.embed.weight), batch["x"][:, 0])


class ElasticWeights(Base):
    """A penalty on leaving the weights of step 2, by the squared gradients of then."""

    def configure(self, ctx):
        return {**super().configure(ctx), "anchor": {}, "fisher": {}, "calls": 0}

    def train_step(self, batch, state, ctx):
        state["calls"] += 1
        model = state["model"]
        loss = self.loss(batch, state)
        for name, p in model.named_parameters():
            if name in state["anchor"]:
                loss = loss + 10 * (state["fisher"][name] * (p - state["anchor"][name]).square()).sum()
        state["optimizer"].zero_grad()
        loss.backward()
        if state["calls"] == 2:
            state["anchor"] = {name: p.detach().clone() for name, p in model.named_parameters()}
            state["fisher"] = {name: p.grad.detach() ** 2 for name, p in model.named_parameters()}
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {key: state[key] for key in ("anchor", "fisher", "calls")}

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)


class _Recomputed(torch.autograd.Function):
    """A block whose backward computes it again and calls backward itself, as reversible layers do."""

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


class ScaledByHand(Base):
    """A loss scale of the trainer's own, taken out of the gradients again."""

    def train_step(self, batch, state, ctx):
        state["optimizer"].zero_grad()
        loss = self.loss(batch, state)
        (loss * 128).backward()
        grads = [p.grad for p in state["model"].parameters()]
        torch._foreach_mul_(grads, 1 / 128)
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


class GradientsInBuffersOfItsOwn(Base):
    """Gradients summed in fp32 buffers over two steps, and written back for the update."""

    def configure(self, ctx):
        state = super().configure(ctx)
        self.sums = [torch.zeros_like(p) for p in state["model"].parameters()]
        self.calls = 0
        return state

    def train_step(self, batch, state, ctx):
        self.calls += 1
        parameters = list(state["model"].parameters())
        loss = self.loss(batch, state)
        loss.backward()
        for total, p in zip(self.sums, parameters, strict=True):
            total += p.grad
            p.grad = None
        if self.calls % 2 == 0:
            for total, p in zip(self.sums, parameters, strict=True):
                p.grad = total / 2
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            for total in self.sums:
                total.zero_()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {"sums": self.sums, "calls": self.calls}

    def load_state_dict(self, state, payload, ctx):
        self.calls = payload["calls"]
        for total, saved in zip(self.sums, payload["sums"], strict=True):
            total.copy_(saved)
