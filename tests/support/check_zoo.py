"""Trainer classes with one fault each, for the tests of ``genlight check``; loaded by import path.

They are variations of the base of the zoo.
"""

import copy
import itertools
import time

import torch
from torch import nn
from zoo.base import Trainer
from zoo.optimizers import AdamWithClosure

from genlight.adapter.contract.types import StepResult
from support.trainer_class import Counts

CALLS = itertools.count()


class Sound(Trainer):
    """Uses everything that the contract covers: EMA, dropout, a counter, a separate generator."""

    kept = ("count",)

    def model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "ema": copy.deepcopy(state["model"]), "count": 0}

    def prepare_batch(self, raw, state, ctx):
        return torch.tensor(raw["x"], dtype=torch.float32), torch.tensor(raw["y"], dtype=torch.float32)

    def loss(self, batch, state):
        return (state["model"](batch[0]) - batch[1]).square().mean() * (1 + 0.1 * state["count"])

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        state["count"] += 1
        return result


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
    def optimizer(self, parameters):
        return WithoutHooks(super().optimizer(parameters))


class Accumulates(Sound):
    """Updates every fourth step, with the accumulated gradients."""

    def train_step(self, batch, state, ctx):
        loss = self.loss(batch, state)
        (loss / 4).backward()
        state["count"] += 1
        if state["count"] % 4 == 0:
            torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        return StepResult({"loss": loss.detach()})


class ClipsEachCall(Sound):
    """Calls backward twice before an update; `between` changes the gradients after each call."""

    def between(self, state):
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)

    def train_step(self, batch, state, ctx):
        for _ in range(2):
            loss = self.loss(batch, state)
            loss.backward()
            self.between(state)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["count"] += 1
        return StepResult({"loss": loss.detach()})


class ClipsAndSumsUp(ClipsEachCall):
    def between(self, state):
        super().between(state)
        for parameter in state["model"].parameters():
            parameter.summed = parameter.grad + getattr(parameter, "summed", 0)
        state["optimizer"].zero_grad()


class WritesBetweenCalls(ClipsEachCall):
    def between(self, state):
        for parameter in state["model"].parameters():
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)


class ClearsBetweenCalls(ClipsEachCall):
    def between(self, state):
        torch.nn.utils.get_total_norm([parameter.grad for parameter in state["model"].parameters()])
        state["optimizer"].zero_grad(set_to_none=state["count"] % 2 == 0)


class ClipsAndUpdates(ClipsEachCall):
    def between(self, state):
        super().between(state)
        state["optimizer"].step()


class Misspells(Sound):
    def save_checkpoints(self, **_):
        pass


class GroupsOfParameters(Sound):
    """Both groups of the optimizer hold the same pair of betas, and one list stands at two places."""

    def optimizer(self, parameters):
        parameters = list(parameters)
        weights, biases = ([p for p in parameters if p.dim() == dim] for dim in (2, 1))
        return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)

    def configure(self, ctx):
        return {**super().configure(ctx), "losses": [1.0]}

    def state_dict(self, state):
        optimizer = state["optimizer"].state_dict()
        return {"count": state["count"], "opt": optimizer, "losses": [state["losses"], state["losses"]]}

    def load_state_dict(self, state, payload, ctx):
        state["count"], state["losses"] = payload["count"], payload["losses"][0]
        state["optimizer"].load_state_dict(payload["opt"])


class SparseGraph(Sound):
    kept = ("count", "visits")

    def configure(self, ctx):
        return {**super().configure(ctx), "visits": torch.zeros(3).to_sparse()}

    def loss(self, batch, state):
        state["visits"] = state["visits"] + torch.tensor([1.0, 0.0, 2.0]).to_sparse()
        return super().loss(batch, state)


class BiasBeforeBatchNorm(Sound):
    """The gradient of the bias is only rounding error, but Adam turns it into a full step."""

    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Attends(Sound):
    """Attention whose key bias has only rounding errors as gradients; Adam turns them into steps."""

    def model(self):
        embed, attention = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        model = nn.ModuleDict({"embed": embed, "attention": attention, "head": nn.Linear(8, 1)})
        nn.init.normal_(attention.in_proj_bias, std=0.02)
        return model

    def loss(self, batch, state):
        x, y = batch
        tokens = state["model"]["embed"](x[..., None])
        attended, _ = state["model"]["attention"](tokens, tokens, tokens, need_weights=False)
        return nn.functional.mse_loss(state["model"]["head"](attended.mean(1)), y)


class SharpnessAware(Sound):
    """Two backward calls for an update (SAM), the first of which moves the weights by gradients.

    Sharded tensors have their norm summed in another order, and the bias before the batch statistics turns that into
    steps.
    """

    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def train_step(self, batch, state, ctx):
        model, opt = state["model"], state["optimizer"]
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


class Lazy(Sound):
    def configure(self, ctx):
        return {**Trainer.configure(self, ctx), "count": 0}

    def model(self):
        return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01)


class OddTypes(Sound):
    """State that torch cannot compare."""

    kept = ("count", "odd")

    def configure(self, ctx):
        odd = [torch.ones(2, dtype=torch.complex32), torch.tensor([1j]).conj(), torch.empty(0, 2)]
        return {**super().configure(ctx), "odd": odd}


class ForgetsALongHistory(Sound):
    """Longer than what is searched for modules."""

    kept = ("count", "history")

    def configure(self, ctx):
        return {**super().configure(ctx), "history": list(range(20_000))}

    def after_update(self, batch, state, ctx):
        state["history"][-1] += 1

    def load_state_dict(self, state, payload, ctx):
        state["count"] = payload["count"]


class WithoutDropout(Sound):
    def model(self):
        model = super().model()
        model[1] = nn.Identity()
        return model


class SeededByRank(Sound):
    """Dropout that draws other numbers on each rank, as it should."""

    def configure(self, ctx):
        state = super().configure(ctx)
        torch.manual_seed(100 + ctx.rank)
        return state


class LbfgsOptimizer(WithoutDropout):
    """Does something that sharding refuses."""

    train_step = AdamWithClosure.train_step

    def optimizer(self, parameters):
        return torch.optim.LBFGS(parameters, lr=0.01, max_iter=2)


class ArrowRows(WithoutDropout):
    def prepare_batch(self, raw, state, ctx):
        return super().prepare_batch(raw.to_pydict(), state, ctx)


class ByGradient(WithoutDropout):
    """Scales its gradients by a wrong factor; Adam would hide that."""

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.01)


class SumLoss(ByGradient):
    def loss(self, batch, state):
        return (state["model"](batch[0]) - batch[1]).square().sum()


class Forgetful(Sound):
    """Does not save its counter."""

    kept = ()


class ForgetsAverage(Sound):
    """An average in a dictionary, that no step reads."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "shadow": {name: p.detach().clone() for name, p in state["model"].named_parameters()}}

    def after_update(self, batch, state, ctx):
        for name, p in state["model"].named_parameters():
            state["shadow"][name].lerp_(p.detach(), 0.1)


class ForgetsLateCounter(Sound):
    """A counter that decides what the hundredth step does."""

    def configure(self, ctx):
        return {**super().configure(ctx), "warm": 0}

    def loss(self, batch, state):
        state["warm"] += 1
        return super().loss(batch, state) * (2 if state["warm"] > 100 else 1)


class ForgetsBest(Sound):
    """Keeps the lowest loss so far, but the first step after a resume resets it."""

    def configure(self, ctx):
        return {**super().configure(ctx), "lowest": 1e9}

    def loss(self, batch, state):
        state["count_of_calls"] = None
        state["lowest"] = min(state["lowest"], 1.0)
        return super().loss(batch, state)


class NonPersistent(Sound):
    """Statistics in a buffer that no state dict has, used only for sampling."""

    class Net(nn.Sequential):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.register_buffer("seen", torch.zeros(2), persistent=False)

        def forward(self, x):
            self.seen.lerp_(x.detach().mean(0), 0.5)
            return super().forward(x)

    def model(self):
        return self.Net(nn.Linear(2, 1))


class ReadsAClock(Sound):
    """Keeps a time stamp, a difference that is no fault."""

    def loss(self, batch, state):
        state["began_at"] = time.monotonic()
        return super().loss(batch, state)


class WrittenNotRead(Sound):
    """Saves its counter and does not take it back."""

    def load_state_dict(self, state, payload, ctx):
        pass


class HiddenState(Sound):
    """Keeps a counter in a place that nobody searches."""

    def model(self):
        model, hidden = super().model(), itertools.count(1)
        model[0].register_forward_pre_hook(lambda m, x: (x[0] + 0.01 * next(hidden),))
        return model


class Unseeded(Sound):
    def setup(self, ctx):
        torch.manual_seed(next(CALLS))


class Unstorable(Sound):
    def state_dict(self, state):
        return {"items": [1, (i for i in range(3))]}


class HardCoded(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state["model"].to("cuda:0")
        return state


class Overflowing(Sound):
    """fp32 holds what bf16's eight bits of mantissa lose."""

    def loss(self, batch, state):
        out = state["model"](batch[0])
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
        return {"points": points, "optimizer": torch.optim.Adam(points.parameters(), lr=0.05), "count": 0}

    def loss(self, batch, state):
        return torch.cdist(batch[0], state["points"]["mean"]).min(1).values.mean()

    def after_update(self, batch, state, ctx):
        if state["count"] == 1:
            old, optimizer = state["points"]["mean"], state["optimizer"]
            new = torch.cat([old.detach(), batch[0][:1]])
            optimizer.state.pop(old)
            optimizer.param_groups[0]["params"][0] = state["points"]["mean"] = nn.Parameter(new)


class Drifting(WithoutDropout):
    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        state["model"][0].bias.add_(0.01 * ctx.rank)


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
        state["optimizer"] = torch.optim.Adam(state["model"][0].parameters())
        return state


class Late(WithoutDropout):
    def train_step(self, batch, state, ctx):
        state["late"] = nn.Linear(1, 1)
        return super().train_step(batch, state, ctx)


class WithoutTorch(Counts):
    def train_step(self, batch, state, ctx):
        state["steps"] += len(batch["x"])
        return StepResult({"seen": state["steps"]})


HIDDEN = {}


class Hidden(WithoutDropout):
    """Keeps its model and its optimizer in a module variable that nobody searches."""

    def configure(self, ctx):
        HIDDEN["state"] = super().configure(ctx)
        return {}

    def train_step(self, batch, state, ctx):
        return super().train_step(batch, HIDDEN["state"], ctx)

    def state_dict(self, state):
        return {"model": HIDDEN["state"]["model"].state_dict()}

    def load_state_dict(self, state, payload, ctx):
        HIDDEN["state"]["model"].load_state_dict(payload["model"])


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
        state["optimizer"].step()
        state["count"] += 1
        return StepResult({"loss": loss.detach()})


class ClearsInPlace(NoZeroGrad):
    """Clears after its update, and keeps the tensors of its gradients."""

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        state["optimizer"].zero_grad(set_to_none=False)
        return result


class HoldsACopy(Sound):
    """Its optimizer has the weights of a copy that nobody uses."""

    def configure(self, ctx):
        state = super().configure(ctx)
        state["optimizer"] = torch.optim.Adam(copy.deepcopy(state["model"]).parameters(), lr=0.01)
        return state


class NeverUpdates(Sound):
    def train_step(self, batch, state, ctx):
        self.loss(batch, state).backward()
        return StepResult({})


class Evaluates(Sound):
    def evaluate(self, state, ctx):
        state["model"].eval()
        with torch.no_grad():
            score = float(state["model"](torch.ones(1, 2)))
        state["model"].train()
        return {"score": score}


class ReadsItsLosses(Sound):
    """Its own hook reads the metrics of each step, like a hook of a run."""

    def trainer_hooks(self, state, ctx):
        return [self]

    def on_mb_end(self, trainer_state):
        trainer_state.run_state.extra["seen"] = trainer_state.loss_stats["train/loss"]


class StaysInEvalMode(Sound):
    def evaluate(self, state, ctx):
        state["model"].eval()
        return {"score": 1.0}


class EvaluatesAnAverage(Sound):
    """Swaps the averaged weights in, and not out."""

    def evaluate(self, state, ctx):
        with torch.no_grad():
            for own, average in zip(state["model"].parameters(), state["ema"].parameters(), strict=True):
                own.copy_(average)
        return {"score": 1.0}


class ReadsItsRate(Sound):
    def configure(self, ctx):
        state = super().configure(ctx)
        state["optimizer"].param_groups[0]["lr"] = ctx.job.hyperparams.get("lr", 0.01)
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

    def model(self):
        model = super().model()
        model.register_buffer("seen", torch.zeros(2))
        return model

    def after_update(self, batch, state, ctx):
        seen = batch[0].sum(0)
        if ctx.world_size > 1:
            torch.distributed.all_reduce(seen)
        state["model"].seen += seen


class ScalesByItsFirstLoss(WithoutDropout):
    """Like GradNorm: each rank keeps the first loss of its rows."""

    def configure(self, ctx):
        return {**super().configure(ctx), "first": 0.0, "mean": 0.0}

    def loss(self, batch, state):
        loss = super().loss(batch, state)
        state["first"] = state["first"] or float(loss)
        state["mean"] = 0.9 * state["mean"] + 0.1 * float(loss)
        return loss / state["first"]


class KeepsAMeanLoss(ScalesByItsFirstLoss):
    """Reports a value that nothing depends on."""

    def loss(self, batch, state):
        return super().loss(batch, state) * state["first"]


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
        state["optimizer"] = torch.optim.Adam(state["model"].parameters(), lr=0.01)
