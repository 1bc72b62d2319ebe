"""Language models: tied embeddings, recurrence with carried states, adapters, preference losses, packed rows."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from genlight.adapter.contract.types import StepResult

from .base import Base, LowRank, tokens


class Language(Base, abstract=True):
    """SGD, because the gradient of an attention's key bias is only rounding, and Adam would make steps of it."""

    rows = staticmethod(tokens)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class TinyLm(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.body = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.body(self.embed(x), src_mask=mask, is_causal=True))


def next_token_loss(out, x):
    return cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class CausalLm(Language):
    def model(self):
        return TinyLm()

    def loss(self, batch, state):
        return next_token_loss(state["model"](batch["x"]), batch["x"])


class TiedLm(CausalLm):
    def model(self):
        model = TinyLm()
        model.head.weight = model.embed.weight
        return model


class LmWithDropout(CausalLm):
    differs = "each rank draws dropout for its own rows"

    def model(self):
        return nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.2), nn.Linear(8, 11))


class TruncatedBackprop(Language):
    """Carries a detached recurrent state over steps; each rank has the state of its own rows."""

    kept = ("hidden",)

    per_rank = ("hidden",)

    def configure(self, ctx):
        rnn, embed, head = nn.GRU(8, 8, batch_first=True), nn.Embedding(11, 8), nn.Linear(8, 11)
        optimizer = torch.optim.Adam([*rnn.parameters(), *embed.parameters(), *head.parameters()], lr=0.01)
        return {"rnn": rnn, "embed": embed, "head": head, "optimizer": optimizer, "hidden": None}

    def loss(self, batch, state):
        out, hidden = state["rnn"](state["embed"](batch["x"]), state["hidden"])
        state["hidden"] = hidden.detach()
        return next_token_loss(state["head"](out), batch["x"])


class LowRankAdapter(Language):
    def configure(self, ctx):
        model = TinyLm()
        model.requires_grad_(False)
        model.head = LowRank(model.head)
        trained = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "trained": trained, "optimizer": torch.optim.AdamW(trained, lr=0.01)}

    def loss(self, batch, state):
        return next_token_loss(state["model"](batch["x"]), batch["x"])

    def change_gradients(self, state, ctx):
        nn.utils.clip_grad_norm_(state["trained"], 0.1)


class PromptTuning(Language):
    """Soft prompts outside of modules, in front of a frozen model."""

    def configure(self, ctx):
        model = TinyLm().requires_grad_(False)
        prompt = torch.randn(1, 2, 8).requires_grad_()
        return {"model": model, "prompt": prompt, "optimizer": torch.optim.Adam([prompt], lr=0.05)}

    def loss(self, batch, state):
        model = state["model"]
        rows = torch.cat([state["prompt"].expand(len(batch["x"]), -1, -1), model.embed(batch["x"])], 1)
        return next_token_loss(model.head(model.body(rows))[:, 2:], batch["x"])


class SparseEmbeddings(Language):
    def configure(self, ctx):
        embed, head = nn.Embedding(11, 4, sparse=True), nn.Linear(24, 3)
        optimizers = [torch.optim.SparseAdam(embed.parameters(), 0.01), torch.optim.Adam(head.parameters(), 0.01)]
        return {"embed": embed, "head": head, "optimizers": optimizers}

    def train_step(self, batch, state, ctx):
        loss = cross_entropy(state["head"](state["embed"](batch["x"]).flatten(1)), batch["y"])
        for optimizer in state["optimizers"]:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in state["optimizers"]:
            optimizer.step()
        return StepResult({"loss": loss.detach()})
