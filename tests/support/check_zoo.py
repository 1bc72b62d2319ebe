"""Trainer classes with one fault each, for the tests of ``genlight check``; loaded by import path."""

from __future__ import annotations

import copy
import itertools
import time
from types import SimpleNamespace

import torch
from torch import nn

from genlight.adapter.contract.types import StepResult

CALLS = itertools.count()


class Sound:
    """Uses everything that the contract covers: EMA, dropout, a counter, a separate generator."""

    def setup(self, ctx):
        torch.manual_seed(0)

    def configure(self, ctx):
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1)).to(ctx.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return SimpleNamespace(model=model, ema=copy.deepcopy(model), opt=optimizer, count=0)

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw["x"], dtype=torch.float32), torch.tensor(raw["y"], dtype=torch.float32)

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        state.opt.zero_grad()
        loss.backward()
        state.opt.step()
        state.count += 1
        return StepResult({"loss": loss.detach()})

    def loss(self, batch, state):
        return (state.model(batch[0]) - batch[1]).square().mean() * (1 + 0.1 * state.count)

    def state_dict(self, state):
        return {"count": state.count}

    def load_state_dict(self, state, payload, ctx):
        state.count = payload["count"]


class WithoutHooks(torch.optim.Optimizer):
    """A wrapper like those of opacus: without torch's constructor, and therefore without hooks."""

    def __init__(self, optimizer) -> None:
        self.original, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state = optimizer.state

    def step(self, closure=None):
        return self.original.step(closure)

    def zero_grad(self, set_to_none=True):
        self.original.zero_grad(set_to_none)

    def state_dict(self):
        return self.original.state_dict()

    def load_state_dict(self, state_dict):
        self.original.load_state_dict(state_dict)


class WrappedOptimizer(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt = WithoutHooks(state.opt)
        return state


class Accumulates(Sound):
    """Updates every fourth step, with the accumulated gradients."""

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        (loss / 4).backward()
        state.count += 1
        if state.count % 4 == 0:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.opt.step()
            state.opt.zero_grad()
        return StepResult({"loss": loss.detach()})


class ClipsEachCall(Sound):
    """Calls backward twice before an update; `between` changes the gradients after each call."""

    def between(self, state):
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.01)

    def train_step(self, batch, state, ctx):
        for _ in range(2):
            loss = self.loss(batch, state)
            loss.backward()
            self.between(state)
        state.opt.step()
        state.opt.zero_grad()
        state.count += 1
        return StepResult({"loss": loss.detach()})


class ClipsAndSumsUp(ClipsEachCall):
    def between(self, state):
        super().between(state)
        for parameter in state.model.parameters():
            parameter.summed = parameter.grad + getattr(parameter, "summed", 0)
        state.opt.zero_grad()


class WritesBetweenCalls(ClipsEachCall):
    def between(self, state):
        for parameter in state.model.parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)


class ClearsBetweenCalls(ClipsEachCall):
    def between(self, state):
        torch.nn.utils.get_total_norm([parameter.grad for parameter in state.model.parameters()])
        state.opt.zero_grad(set_to_none=state.count % 2 == 0)


class ClipsAndUpdates(ClipsEachCall):
    def between(self, state):
        super().between(state)
        state.opt.step()


class Misspells(Sound):
    def save_checkpoints(self, **_):
        pass


class GroupsOfParameters(Sound):
    """Both groups of the optimizer hold the same pair of betas, and one list stands at two places."""

    def configure(self, ctx):
        state = super().configure(ctx)
        weights, biases = ([p for p in state.model.parameters() if p.dim() == dim] for dim in (2, 1))
        state.opt = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)
        state.losses = [1.0]
        return state

    def state_dict(self, state):
        return {"count": state.count, "opt": state.opt.state_dict(), "losses": [state.losses, state.losses]}

    def load_state_dict(self, state, payload, ctx):
        state.count = payload["count"]
        state.opt.load_state_dict(payload["opt"])
        state.losses = payload["losses"][0]


class SparseGraph(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.visits = torch.zeros(3).to_sparse()
        return state

    def loss(self, batch, state):
        state.visits = state.visits + torch.tensor([1.0, 0.0, 2.0]).to_sparse()
        return super().loss(batch, state)

    def state_dict(self, state):
        return {"count": state.count, "visits": state.visits}

    def load_state_dict(self, state, payload, ctx):
        state.count, state.visits = payload["count"], payload["visits"]


class BiasBeforeBatchNorm(Sound):
    """The gradient of the bias is only rounding error, but Adam turns it into a full step."""

    def configure(self, ctx):
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        return SimpleNamespace(model=model, opt=torch.optim.Adam(model.parameters(), lr=0.01), count=0)


class Attends(Sound):
    """Attention whose key bias has only rounding errors as gradients; Adam turns them into steps."""

    def configure(self, ctx):
        embed, attention = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        model = nn.ModuleDict({"embed": embed, "attention": attention, "head": nn.Linear(8, 1)}).to(ctx.device)
        nn.init.normal_(attention.in_proj_bias, std=0.02)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return SimpleNamespace(model=model, opt=optimizer)

    def train_step(self, batch, state, ctx):
        x, y = batch
        tokens = state.model["embed"](x[..., None])
        attended, _ = state.model["attention"](tokens, tokens, tokens, need_weights=False)
        loss = nn.functional.mse_loss(state.model["head"](attended.mean(1)), y)
        state.opt.zero_grad()
        loss.backward()
        state.opt.step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"model": state.model.state_dict(), "opt": state.opt.state_dict()}

    def load_state_dict(self, state, payload, ctx):
        state.model.load_state_dict(payload["model"])
        state.opt.load_state_dict(payload["opt"])


class SharpnessAware(Sound):
    """Two backward calls for an update (SAM), the first of which moves the weights by gradients; its state is a dict.

    Sharded tensors have their norm summed in another order, and the bias before the batch statistics turns that into
    steps.
    """

    def configure(self, ctx):
        model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
        return {"model": model, "opt": torch.optim.AdamW(model.parameters(), lr=0.01)}

    def train_step(self, batch, state, ctx):
        model, opt = state["model"], state["opt"]
        weights = list(model.parameters())
        opt.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        norm = torch.linalg.vector_norm(torch.stack([weight.grad.norm() for weight in weights]))
        moves = [weight.grad * (0.05 / norm) for weight in weights]
        with torch.no_grad():
            for weight, move in zip(weights, moves, strict=True):
                weight.add_(move)
        opt.zero_grad()
        loss = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight, move in zip(weights, moves, strict=True):
                weight.sub_(move)
        opt.step()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {name: each.state_dict() for name, each in state.items()}

    def load_state_dict(self, state, payload, ctx):
        for name, each in state.items():
            each.load_state_dict(payload[name])


class Lazy(Sound):
    def configure(self, ctx):
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))
        return SimpleNamespace(model=model, opt=torch.optim.SGD(model.parameters(), lr=0.01), count=0)


class OddTypes(Sound):
    """State that torch cannot compare."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.odd = [torch.ones(2, dtype=torch.complex32), torch.tensor([1j]).conj(), torch.empty(0, 2)]
        return state

    def state_dict(self, state):
        return {"count": state.count, "odd": state.odd}

    def load_state_dict(self, state, payload, ctx):
        state.count, state.odd = payload["count"], payload["odd"]


class ForgetsALongHistory(Sound):
    """Longer than what is searched for modules."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.history = list(range(20_000))
        return state

    def train_step(self, batch, state, ctx):
        state.history[-1] += 1
        return super().train_step(batch, state, ctx)

    def state_dict(self, state):
        return {"count": state.count, "history": state.history}


class WithoutDropout(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.model[1] = nn.Identity()
        return state


class SeededByRank(Sound):
    """Dropout that draws other numbers on each rank, as it should."""

    def configure(self, ctx):
        state = super().configure(ctx)
        torch.manual_seed(100 + ctx.rank)
        return state


class LbfgsOptimizer(WithoutDropout):
    """Does something that sharding refuses."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt = torch.optim.LBFGS(state.model.parameters(), lr=0.01, max_iter=2)
        return state

    def train_step(self, batch, state, ctx):
        def closure():
            state.opt.zero_grad()
            loss = self.loss(batch, state)
            loss.backward()
            return loss

        return StepResult({"loss": state.opt.step(closure).detach()})


class ArrowRows(WithoutDropout):
    def prepare_batch(self, raw, state, ctx):
        return super().prepare_batch(raw.to_pydict(), state, ctx)


class ByGradient(WithoutDropout):
    """Scales its gradients by a wrong factor; Adam would hide that."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt = torch.optim.SGD(state.model.parameters(), lr=0.01)
        return state


class SumLoss(ByGradient):
    def loss(self, batch, state):
        return (state.model(batch[0]) - batch[1]).square().sum()


class Forgetful(Sound):
    """Does not save its counter."""

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx):
        pass


class ForgetsAverage(Sound):
    """An average in a dictionary, that no step reads."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.shadow = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        return state

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        for name, p in state.model.named_parameters():
            state.shadow[name].lerp_(p.detach(), 0.1)
        return result


class ForgetsLateCounter(Sound):
    """A counter that decides what the hundredth step does."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.warm = 0
        return state

    def loss(self, batch, state):
        state.warm += 1
        return super().loss(batch, state) * (2 if state.warm > 100 else 1)


class ForgetsBest(Sound):
    """Keeps the lowest loss so far, but the first step after a resume resets it."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.lowest = 1e9
        return state

    def loss(self, batch, state):
        loss = super().loss(batch, state)
        state.count_of_calls = None
        state.lowest = min(state.lowest, 1.0)
        return loss


class NonPersistent(Sound):
    """Statistics in a buffer that no state dict has, used only for sampling."""

    class Net(nn.Sequential):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.register_buffer("seen", torch.zeros(2), persistent=False)

        def forward(self, x):
            self.seen.lerp_(x.detach().mean(0), 0.5)
            return super().forward(x)

    def configure(self, ctx):
        state = super().configure(ctx)
        state.model = self.Net(nn.Linear(2, 1))
        state.opt = torch.optim.Adam(state.model.parameters(), lr=0.01)
        return state


class ReadsAClock(Sound):
    """Keeps a time stamp, a difference that is no fault."""

    def loss(self, batch, state):
        state.began_at = time.monotonic()
        return super().loss(batch, state)


class WrittenNotRead(Sound):
    """Saves its counter and does not take it back."""

    def load_state_dict(self, state, payload, ctx):
        pass


class HiddenState(Sound):
    """Keeps a counter in a place that nobody searches."""

    def configure(self, ctx):
        state = super().configure(ctx)
        hidden = itertools.count(1)
        state.model[0].register_forward_pre_hook(lambda m, x: (x[0] + 0.01 * next(hidden),))
        return state


class Unseeded(Sound):
    def setup(self, ctx):
        torch.manual_seed(next(CALLS))


class Unstorable(Sound):
    def state_dict(self, state):
        return {"items": [1, (i for i in range(3))]}


class HardCoded(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.model.to("cuda:0")
        return state


class Overflowing(Sound):
    """fp32 holds what bf16's eight bits of mantissa lose."""

    def loss(self, batch, state):
        out = state.model(batch[0])
        # 1 if `out` was computed in fp32; division by zero if in bf16
        exact = (out.float() - out.float().bfloat16().float()).abs().max()
        return (out - batch[1]).square().mean() * (exact / exact)


class RankDependent(ByGradient):
    def loss(self, batch, state):
        return super().loss(batch, state) * (1 + self.world_size)

    def configure(self, ctx):
        self.world_size = ctx.world_size
        return super().configure(ctx)


class ReplacedByOwnRows(WithoutDropout):
    """Adds points at the positions of this rank's rows in the second step."""

    def configure(self, ctx):
        points = nn.ParameterDict({"mean": nn.Parameter(torch.linspace(-1, 1, 8).view(4, 2))})
        return SimpleNamespace(points=points, opt=torch.optim.Adam(points.parameters(), lr=0.05), count=0)

    def train_step(self, batch, state, ctx):
        loss = torch.cdist(batch[0], state.points["mean"]).min(1).values.mean()
        state.opt.zero_grad()
        loss.backward()
        state.opt.step()
        state.count += 1
        if state.count == 2:
            old, new = state.points["mean"], torch.cat([state.points["mean"].detach(), batch[0][:1]])
            state.opt.state.pop(old)
            state.opt.param_groups[0]["params"][0] = state.points["mean"] = nn.Parameter(new)
        return StepResult({"loss": loss.detach()})


class Drifting(WithoutDropout):
    def configure(self, ctx):
        self.rank = ctx.rank
        return super().configure(ctx)

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        with torch.no_grad():
            state.model[0].bias.add_(0.01 * self.rank)
        return result


class FailingOnOneRank(WithoutDropout):
    def train_step(self, batch, state, ctx):
        if ctx.rank == 1:
            raise ValueError("no rows on this rank")
        return super().train_step(batch, state, ctx)


class WrongSignature(Sound):
    def load_state_dict(self, state, payload):
        pass


class Raising(Sound):
    def loss(self, batch, state):
        raise ArithmeticError("mine")


class ForgottenHead(WithoutDropout):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt = torch.optim.Adam(state.model[0].parameters())
        return state


class Late(WithoutDropout):
    def train_step(self, batch, state, ctx):
        state.late = nn.Linear(1, 1)
        return super().train_step(batch, state, ctx)


class WithoutTorch:
    def setup(self, ctx):
        pass

    def configure(self, ctx):
        return {"seen": 0}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        state["seen"] += len(batch["x"])
        return StepResult({"seen": state["seen"]})

    def state_dict(self, state):
        return dict(state)

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)


HIDDEN = {}


class Hidden(WithoutDropout):
    """Keeps its model and its optimizer in a module variable that nobody searches."""

    def configure(self, ctx):
        HIDDEN["state"] = super().configure(ctx)
        return {}

    def train_step(self, batch, state, ctx):
        return super().train_step(batch, HIDDEN["state"], ctx)

    def state_dict(self, state):
        return {"model": HIDDEN["state"].model.state_dict()}

    def load_state_dict(self, state, payload, ctx):
        HIDDEN["state"].model.load_state_dict(payload["model"])


class Collects(Sound):
    """Collects two batches a rollout, on an environment with a position and a generator that come back."""

    def setup(self, ctx):
        super().setup(ctx)
        self.draws, self.position = torch.Generator().manual_seed(3), torch.zeros(2)

    def rollout(self, state, ctx):
        batches = []
        for _ in range(2):
            self.position = 0.9 * self.position + torch.randn(2, generator=self.draws)
            batches.append({"x": [self.position.tolist()] * 2, "y": [[1.0], [2.0]]})
        return batches

    def rollout_state(self, state):
        return {"position": self.position, "draws": self.draws.get_state()}

    def load_rollout_state(self, state, payload, ctx):
        self.position = payload["position"]
        self.draws.set_state(payload["draws"])


class ForgetsItsEnvironment(Collects):
    rollout_state = load_rollout_state = None


class NanMetric(Sound):
    """Divides by a count that stays 0."""

    def train_step(self, batch, state, ctx):
        return StepResult({**super().train_step(batch, state, ctx).metrics, "accuracy": float("nan")})


class NoZeroGrad(Sound):
    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        state.opt.step()
        state.count += 1
        return StepResult({"loss": loss.detach()})


class ClearsInPlace(NoZeroGrad):
    """Clears after its update, and keeps the tensors of its gradients."""

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        state.opt.zero_grad(set_to_none=False)
        return result


class HoldsACopy(Sound):
    """Its optimizer has the weights of a copy that nobody uses."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt = torch.optim.Adam(copy.deepcopy(state.model).parameters(), lr=0.01)
        return state


class NeverUpdates(Sound):
    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        loss.backward()
        return StepResult({"loss": loss.detach()})


class Evaluates(Sound):
    def evaluate(self, state, ctx):
        state.model.eval()
        with torch.no_grad():
            score = float(state.model(torch.ones(1, 2)))
        state.model.train()
        return {"score": score}


class ReadsItsLosses(Sound):
    """Its own hook reads the metrics of each step, like a hook of a run."""

    def trainer_hooks(self, state, ctx):
        return [self]

    def on_mb_end(self, trainer_state):
        trainer_state.run_state.extra["seen"] = trainer_state.loss_stats["train/loss"]


class StaysInEvalMode(Sound):
    def evaluate(self, state, ctx):
        state.model.eval()
        return {"score": 1.0}


class EvaluatesAnAverage(Sound):
    """Swaps the averaged weights in, and not out."""

    def evaluate(self, state, ctx):
        with torch.no_grad():
            for own, average in zip(state.model.parameters(), state.ema.parameters(), strict=True):
                own.copy_(average)
        return {"score": 1.0}


class ReadsItsRate(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state.opt.param_groups[0]["lr"] = ctx.job.hyperparams.get("lr", 0.01)
        return state


class ReadsAll(ReadsItsRate):
    def setup(self, ctx):
        super().setup(ctx)
        self.options = {**ctx.job.hyperparams}


class DividesByRanks(WithoutDropout):
    """Averages by hand what genlight averages; Adam hides it from the weights."""

    def configure(self, ctx):
        self.world_size = ctx.world_size
        return super().configure(ctx)

    def loss(self, batch, state):
        return super().loss(batch, state) / self.world_size


class CountsOverRanks(WithoutDropout):
    """Keeps a sum over the rows of all ranks: correct, but doubled if both ranks have the same rows."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.model.register_buffer("seen", torch.zeros(2))
        return state

    def train_step(self, batch, state, ctx):
        seen = batch[0].sum(0)
        if ctx.world_size > 1:
            torch.distributed.all_reduce(seen)
        state.model.seen += seen
        return super().train_step(batch, state, ctx)


class ScalesByItsFirstLoss(WithoutDropout):
    """Like GradNorm: each rank keeps the first loss of its rows."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state.first, state.mean = 0.0, 0.0
        return state

    def loss(self, batch, state):
        loss = super().loss(batch, state)
        state.first = state.first or float(loss)
        state.mean = 0.9 * state.mean + 0.1 * float(loss)
        return loss / state.first


class KeepsAMeanLoss(ScalesByItsFirstLoss):
    """Reports a value that nothing depends on."""

    def loss(self, batch, state):
        return super().loss(batch, state) * state.first


class ReturnsNothing(Sound):
    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)


class NanLoss(Sound):
    """Has a fault that a skipped update hides."""

    def train_step(self, batch, state, ctx):
        super().train_step(batch, state, ctx)
        return StepResult({"train/loss": torch.tensor(float("nan"))})


class RebuildsItsOptimizer(Sound):
    """So that what was restored of it is lost."""

    def load_state_dict(self, state, payload, ctx):
        super().load_state_dict(state, payload, ctx)
        state.opt = torch.optim.Adam(state.model.parameters(), lr=0.01)
