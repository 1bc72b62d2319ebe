"""Averages of weights: modules, lists, dictionaries, swapped in for evaluation."""

import copy

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .base import AveragesItsModel, Base, mlp


class EmaModule(AveragesItsModel, Base):
    pass


class EmaOfStateDict(EmaModule):
    """Averages the tensors of state dicts, including buffers."""

    @torch.no_grad()
    def after_update(self, batch, state, ctx):
        now = state["model"].state_dict()
        for name, average in state["ema"].state_dict().items():
            average.mul_(0.5).add_(now[name], alpha=0.5)


class EmaShadowList(Base):
    """Like diffusers' EMAModel: shadow parameters in a list."""

    class Ema:
        def __init__(self, parameters):
            self.shadow_params = [p.clone().detach() for p in parameters]
            self.optimization_step = 0

        @torch.no_grad()
        def step(self, parameters):
            self.optimization_step += 1
            decay = min(0.9, (1 + self.optimization_step) / (10 + self.optimization_step))
            for s, p in zip(self.shadow_params, parameters, strict=True):
                s.sub_((1 - decay) * (s - p))

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "ema": self.Ema(state["model"].parameters())}

    def after_update(self, batch, state, ctx):
        state["ema"].step(state["model"].parameters())

    def state_dict(self, state):
        return {"shadow": state["ema"].shadow_params, "steps": state["ema"].optimization_step}

    def load_state_dict(self, state, payload, ctx):
        state["ema"].shadow_params = [p.clone() for p in payload["shadow"]]
        state["ema"].optimization_step = payload["steps"]


class TorchAveragedModel(Base):
    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "ema": AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))}

    def after_update(self, batch, state, ctx):
        state["ema"].update_parameters(state["model"])


class SwappedForEvaluation(EmaModule):
    """Swaps the averages in, reads them, and swaps them out again in every step."""

    def after_update(self, batch, state, ctx):
        super().after_update(batch, state, ctx)
        kept = copy.deepcopy(state["model"].state_dict())
        state["model"].load_state_dict(state["ema"].state_dict())
        with torch.no_grad():
            state["model"](batch["x"])
        state["model"].load_state_dict(kept)


class BestWeights(Base):
    """Keeps the weights of the lowest loss so far."""

    kept = ("lowest",)

    differs = "each rank chooses the best step by its own loss"
    per_rank = ("best",)
    rank_local = ("best",)

    def configure(self, ctx):
        return {**super().configure(ctx), "best": mlp().requires_grad_(False), "lowest": float("inf")}

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        loss = float(result.metrics["loss"])
        if loss < state["lowest"]:
            state["lowest"] = loss
            state["best"].load_state_dict(state["model"].state_dict())
        return result


class EmaMadeInTheFirstStep(Base):
    """An average in a list that the first step creates; a resume keeps the loaded tensors."""

    ema = None

    def after_update(self, batch, state, ctx):
        parameters = list(state["model"].parameters())
        with torch.no_grad():
            self.ema = self.ema or [p.detach().clone() for p in parameters]
            for average, p in zip(self.ema, parameters, strict=True):
                average.lerp_(p, 0.1)
                p.lerp_(average, 0.1)

    def state_dict(self, state):
        return {"ema": self.ema}

    def load_state_dict(self, state, payload, ctx):
        self.ema = payload["ema"]


class SwappedByData(Base):
    """Like many EMAs with ``apply_shadow`` and ``restore``: a dict, swapped by ``p.data = other``."""

    def configure(self, ctx):
        state = super().configure(ctx)
        return {**state, "shadow": {name: p.data.clone() for name, p in state["model"].named_parameters()}}

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        parameters, shadow = dict(state["model"].named_parameters()), state["shadow"]
        for name, p in parameters.items():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
        backup = {name: p.data for name, p in parameters.items()}
        for name, p in parameters.items():
            p.data = shadow[name]
        with torch.no_grad():
            goal = state["model"](batch["x"])
        for name, p in parameters.items():
            p.data = backup[name]
        super().train_step({**batch, "y": goal}, state, ctx)
        return result

    def state_dict(self, state):
        return {"shadow": state["shadow"]}

    def load_state_dict(self, state, payload, ctx):
        state["shadow"] = {name: value.to(ctx.device) for name, value in payload["shadow"].items()}
