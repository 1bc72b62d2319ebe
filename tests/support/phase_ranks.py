"""One rank of a run whose ranks collect separate rollouts; started once per rank by ``test_phases.py``.

Arguments: rank, world size, folder of the store, directory of checkpoints, ``train``, ``interrupt`` or ``resume``.
"""

import json
import logging
import sys

import torch

from genlight.adapter import Minibatches
from genlight.adapter.contract.types import StepResult, TrainingJobSpec
from genlight.adapter.module.module import ContractModule
from genlight.callbacks.checkpoint import Checkpoint, newest_valid
from genlight.callbacks.hook.events import run_state_of
from support.rank import Rank
from support.trainer_class import Stateless

STEPS, INTERRUPTED_AT = 11, 5


class Collector(Stateless):
    """Ranks collect 6 and 8 rows: three minibatches on rank zero and four on rank one, twice.

    Only rank one ends the update of the second rollout, after its first minibatch.
    """

    update_epochs = 2

    def setup(self, ctx):
        torch.manual_seed(7 + ctx.rank)
        self.position, self.rollouts, self.minibatches = float(ctx.rank), 0, 0

    def trainer_hooks(self, state, ctx):
        return [self]

    def on_mb_end(self, trainer_state):
        self.minibatches += 1

    def configure(self, ctx):
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05), "seen": []}

    def rollout(self, state, ctx):
        self.rollouts += 1
        rows = 6 + 2 * ctx.rank
        self.position += 1
        data = torch.randn(rows, 2) + self.position
        return Minibatches({"x": data}, 2), {"agent_steps": rows}

    def prepare_batch(self, raw, state, ctx):
        return raw["x"]

    def train_step(self, batch, state, ctx):
        loss = (state["model"](batch) - 1).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        run = ctx.run_state
        state["seen"].append([run.agent_step, run.update_epoch, run.minibatch_index])
        if ctx.rank == 1 and self.rollouts == 2 and run.minibatch_index == 0:
            run.stop_update_epoch = True
        return StepResult({"loss": loss.detach()})

    def rollout_state(self, state):
        return {"position": self.position, "rollouts": self.rollouts, "minibatches": self.minibatches}

    def load_rollout_state(self, state, payload, ctx):
        self.position, self.rollouts, self.minibatches = (payload[n] for n in ("position", "rollouts", "minibatches"))


class Stream(Collector):
    """Batches come from a generator, between steps; only rank one has enough after its second."""

    update_epochs = 2
    rollout_state = None

    def rollout(self, state, ctx):
        for index in range(5):
            if ctx.rank == 1 and index == 1:
                ctx.run_state.stop_rollout = True
            ctx.run_state.agent_step += 2
            yield {"x": torch.randn(2, 2)}

    def train_step(self, batch, state, ctx):
        state["seen"].append([ctx.run_state.update_epoch, ctx.run_state.minibatch_index])
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult({"loss": loss.detach()})


def train_stream(rank):
    """Return the batches that a rank trained from a generator that one rank ends."""
    module = ContractModule(Stream(), TrainingJobSpec(run_id="stream", max_steps=8, metric_every=0))
    rank.trainer(max_steps=8).fit(module)
    return module.contract_state["seen"]


def main(rank, directory, what):
    steps = INTERRUPTED_AT if what == "interrupt" else STEPS
    saver = Checkpoint(directory, every_n_steps=INTERRUPTED_AT, save_final=False)
    trainer = rank.trainer(saver, max_steps=steps)
    module = ContractModule(Collector(), TrainingJobSpec(run_id="phases", max_steps=steps, metric_every=0))
    trainer.fit(module, ckpt_path=newest_valid(directory)[0].path if what == "resume" else None)
    state = module.contract_state
    torch.save(dict(state["model"].state_dict()), rank.folder / f"rank{rank.number}.pt")
    plugin = module.plugin
    end = {"position": plugin.position, "minibatches": plugin.minibatches, "seen": state["seen"]}
    end["agent_step"] = run_state_of(trainer).agent_step
    end["metrics"] = sorted(module.metrics())
    if what == "train":
        end["stream"] = train_stream(rank)
    (rank.folder / f"end{rank.number}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    me = Rank.of_command_line()
    with me.group():
        main(me, *sys.argv[4:6])
