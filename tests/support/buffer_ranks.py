"""One rank whose batch norms see different rows than the other's; started twice by ``test_buffer_sync.py``.

Arguments: rank, world size, folder. Trains once for each place where buffers can be read, and writes the values that
it read there to ``rank<rank>.pt``. In its last training rank 0 is lost between its update and the end of the step.
"""

import os
import time

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch import nn

from genlight.adapter import ContractModule, MockDataModule, StepResult, TrainingJobSpec
from genlight.adapter.contract.exceptions import RankFailedError, TrainingCanceled
from genlight.callbacks import Checkpoint, DurableCheckpointIO, Evaluate
from support.rank import Rank
from support.stopping import StopsAt
from support.trainer_class import Trains

ME = Rank.of_command_line()
RANK, FOLDER = ME.number, ME.folder
STEPS = 6


class Lost(Exception):
    """The exception of a loader."""


def leave_after_update():
    """Kill rank 0 once rank 1 has its gradients."""
    updated = FOLDER / "rank 1 has made its update"
    if RANK == 1:
        updated.touch()
    else:
        while not updated.exists():
            time.sleep(0.01)
        os._exit(0)


class Centered(nn.Module):
    """Nothing in it is trained, as in the loss of DINO."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("first", None)
        self.register_buffer("own_rows", torch.zeros(1))

    def forward(self, rows):
        self.center = 0.9 * self.center + 0.1 * rows.mean()
        self.first = rows.mean() if self.first is None else self.first
        self.own_rows += rows.sum()


class Normed(Trains):
    """BatchNorm, and a copy of the network that follows it; rank 1 makes one more forward in every other step."""

    rank_local = ("centered.own_rows",)

    def __init__(self, look=None):
        self.look = look
        self.seen = []

    def see(self, where, tensor=None):
        if where == self.look:
            tensor = self.model[1].running_mean if tensor is None else tensor
            self.seen.append(tensor.clone())

    def configure(self, ctx):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.model.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.centered = Centered()
        self.copy = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).requires_grad_(False)
        self.copy.register_buffer("seen", torch.zeros(1))
        self.kept = self.model.state_dict()["1.running_mean"]  # shares its memory, and no module knows it
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return {"model": self.model, "copy": self.copy, "optimizer": optimizer, "step": 0}

    def prepare_batch(self, raw, state, ctx):
        self.see("prepare_batch")
        return raw

    def train_step(self, batch, state, ctx):
        self.see("train_step", self.kept)
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * batch + RANK))
        state["optimizer"].zero_grad()
        self.model(rows).square().mean().backward()
        state["optimizer"].step()
        if RANK == 1 and batch % 2:
            self.model(rows)
        self.copy(rows)
        self.copy.seen += rows.sum()
        self.centered(rows)
        self.model.flags[batch % 3] = RANK == 0
        self.model.phase.add_(1j * (RANK + 1))
        if self.look == "lost" and state["step"] == 1:
            leave_after_update()
        state["step"] += 1
        return StepResult(metrics={"loss": 1.0})

    def evaluate(self, state, ctx):
        self.see("evaluate", self.copy[1].running_var)
        return {"score": 0.0}

    def state_dict(self, state):
        self.see("state_dict", self.model.flags)
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Watching(pl.Callback):
    """A callback that somebody else wrote."""

    def __init__(self, plugin, name):
        setattr(self, name, lambda *_: plugin.see(plugin.look, plugin.model.phase))


class Logs(pl.Callback):
    """Logs before the batch is trained, so that only loggers are called at the end of the step."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        pl_module.log("x", 1.0)


class Looking(Logger):
    """A logger of the user, on each rank."""

    name = version = "looking"

    def __init__(self, plugin):
        super().__init__()
        self.plugin = plugin

    def log_hyperparams(self, *_, **__): ...

    def log_metrics(self, metrics, step=None):
        self.plugin.see("logger")


class Stream:
    """Batches of a loader that looks at buffers, and may end with an error."""

    def __init__(self, plugin, *, fails=False):
        self.plugin, self.fails = plugin, fails
        self.feed = MockDataModule(range(STEPS * ME.world_size)).feed
        self.state_dict, self.load_state_dict = self.feed.state_dict, self.feed.load_state_dict

    def __len__(self):
        return len(self.feed)

    def __iter__(self):
        for step, batch in enumerate(self.feed):
            if self.fails and step == 3:
                raise Lost
            self.plugin.see("loader")
            yield batch


def fit(plugin, *callbacks, stream=None, ckpt_path=None, **settings):
    trainer = ME.trainer(*callbacks, max_steps=STEPS, log_every_n_steps=1, **settings)
    module = ContractModule(plugin, TrainingJobSpec("buffers", STEPS))
    trainer.fit(module, stream or Stream(plugin), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in module.state_dict().items() if "weight" not in name}


def seen_from(look):
    """Return the values read at one place, and the final buffers."""
    plugin = Normed(look)
    callbacks, stream, settings = [], None, {}
    if look.startswith("on_"):
        callbacks = [Watching(plugin, look)]
    if look == "evaluate":
        callbacks = [Evaluate(1)]
    if look == "state_dict":
        callbacks = [Checkpoint(FOLDER / "seen", every_n_steps=1, save_final=False)]
    if look == "on_exception":
        stream = Stream(plugin, fails=True)
    if look == "logger":
        callbacks, settings = [Logs()], {"logger": Looking(plugin)}
    if look == "profiled":
        callbacks, settings = [Watching(plugin, "on_train_batch_end")], {"profiler": "simple"}
    if look == "stopped":
        callbacks = [StopsAt(3), Watching(plugin, "on_exception")]
    if look == "16-mixed":
        settings = {"plugins": [pl.plugins.MixedPrecision("16-mixed", "cpu")]}
    end = None
    try:
        end = fit(plugin, *callbacks, stream=stream, **settings)
    except (Lost, TrainingCanceled):
        end = {}
    return {"seen": plugin.seen, "end": end}


PLACES = (
    *("prepare_batch", "train_step", "evaluate", "state_dict", "loader", "16-mixed", "logger", "profiled", "stopped"),
    *("on_train_batch_start", "on_train_batch_end", "on_mb_end"),
    *("on_train_epoch_end", "on_train_end", "on_exception"),
)


def resumed():
    """Return the final buffers of a run, and of one that was resumed after its third step."""
    folder = FOLDER / "resumed"
    plain = fit(Normed(), Checkpoint(folder, every_n_steps=3, save_final=False))
    return {
        "plain": plain,
        "resumed": fit(Normed(), ckpt_path=folder / "step-00000003.json", plugins=[DurableCheckpointIO()]),
    }


def lost():
    """The error of a rank that waits for the buffers of one that has ended."""
    try:
        fit(Normed("lost"))
    except RankFailedError as error:
        return str(error)
    return None


def main():
    found = {look: seen_from(look) for look in PLACES}
    found["resumed"] = resumed()
    torch.save(found, FOLDER / f"rank{RANK}.pt")
    dist.barrier()
    error = lost()
    (FOLDER / "lost").write_text(str(error))
    os._exit(0)


if __name__ == "__main__":
    with ME.group():
        main()
