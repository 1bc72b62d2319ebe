"""One rank of a run whose ranks have different state; started once per rank by ``test_rank_state.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, ``train``, ``interrupt`` or ``resume``,
``ddp`` or ``fsdp``.
"""

import json
import logging
import random
import sys
from collections import deque

import torch
from torch import nn

from genlight.adapter.contract.types import StepResult, TrainingJobSpec
from genlight.adapter.module.module import ContractModule
from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from support.rank import Rank

STEPS, INTERRUPTED_AT = 7, 3


class RunningMoments(nn.Module):
    """Statistics of this rank's observations, in a module that is not trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def update(self, rows):
        self.mean.lerp_(rows.mean(0), 0.5)


class OfItsOwn:
    """Generators seeded by rank, of which it saves one, a replay buffer of any length, hidden states, moments."""

    rank_local = ("moments",)

    def setup(self, ctx):
        torch.manual_seed(0)
        self.noise = torch.Generator().manual_seed(100 + ctx.rank)
        self.pick = random.Random(ctx.rank)

    def configure(self, ctx):
        cell, head = nn.GRUCell(4, 6), nn.Linear(6, 1)
        optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)
        hidden, replay = torch.zeros(2, 6), deque(maxlen=50)
        return {
            "cell": cell,
            "head": head,
            "moments": RunningMoments(),
            "optimizer": optimizer,
            "hidden": hidden,
            "replay": replay,
            "seen": 0,
        }

    def prepare_batch(self, raw, state, ctx):
        return torch.randn(2, 4, generator=self.noise)

    def train_step(self, batch, state, ctx):
        state["moments"].update(batch)
        state["replay"].extend(batch[: self.pick.randint(1, 2)])
        state["seen"] += len(batch)
        rows = torch.stack(self.pick.choices(state["replay"], k=2)) - state["moments"].mean
        hidden = state["cell"](rows, state["hidden"])
        loss = state["head"](hidden).square().mean() + 0.01 * state["seen"] * hidden.mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["hidden"] = hidden.detach()
        return StepResult({"loss": loss.detach()})

    def state_dict(self, state):
        return {
            "noise": self.noise.get_state(),
            "replay": list(state["replay"]),
            "nested": {"hidden": state["hidden"], "seen": state["seen"]},
        }

    def load_state_dict(self, state, payload, ctx):
        self.noise.set_state(payload["noise"])
        state["replay"].extend(payload["replay"])
        state["hidden"], state["seen"] = payload["nested"]["hidden"], payload["nested"]["seen"]


class Steps:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main(rank, directory, what, kind):
    steps = INTERRUPTED_AT if what == "interrupt" else STEPS
    saver = Checkpoint(directory, every_n_steps=INTERRUPTED_AT, save_final=False)
    module = ContractModule(OfItsOwn(), TrainingJobSpec(run_id="own", max_steps=steps, metric_every=0))
    resume_from = newest_valid(directory)[0].path if what == "resume" else None
    rank.trainer(saver, strategy=kind, max_steps=steps).fit(module, Steps(STEPS), ckpt_path=resume_from)
    state, plugin = module.contract_state, module.plugin
    end = {
        "weights": {name: whole(p.detach()) for m in ("cell", "head") for name, p in state[m].named_parameters(m)},
        "mean": state["moments"].mean,
        "hidden": state["hidden"],
        "replay": list(state["replay"]),
        "noise": plugin.noise.get_state(),
    }
    torch.save(end, rank.folder / f"rank{rank.number}.pt")
    (rank.folder / f"pick{rank.number}.json").write_text(json.dumps(plugin.pick.getstate()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    me = Rank.of_command_line()
    with me.group():
        main(me, *sys.argv[4:7])
