"""A trainer that fails or waits as its hyperparameters say, at the place they name.

``at`` is a hook, at any step or at one (``train_step:3``). There the trainer writes its process id to the file
``reached-<rank>`` in the working directory and waits ``holds`` seconds, or until the file ``go`` appears, so that a
test can send a signal meanwhile. Then it raises the exception that ``raises`` names, with the message ``text``.
``accumulates`` builds a model that is updated every that many steps; ``cancels`` makes the file ``cancel`` in that
step; ``stack_bytes`` is the stack size of threads that start after that place; ``removes`` is a path that a save
removes, and whether it puts an empty file in its place.
"""

import atexit
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
from gen_worker.trainer import StepResult

from genlight.callbacks import Hook


class OutOfMemoryError(RuntimeError):
    """Has the name of the error that torch raises when a device is out of memory."""


def make_error(plan):
    kinds = {"OutOfMemoryError": OutOfMemoryError, **vars(__import__("builtins"))}
    return kinds[plan["raises"]](plan.get("text", "injected"))


def make_model():
    import torch

    model = torch.nn.Linear(1, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6)}


def accumulate(state, batch, steps):
    import torch

    state["model"](torch.tensor([float(batch)])).sum().backward()
    if state["steps"] % steps == 0:
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def remove(path, replaces):
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    if replaces:
        Path(path).touch()


class Faulty:
    def setup(self, ctx):
        self.plan = dict(ctx.job.hyperparams)
        self.rank = ctx.rank
        self.act("setup")
        atexit.register(self.act, "exit")

    def act(self, place):
        if self.plan.get("at") not in (place, place.partition(":")[0]) or self.plan.get("rank", self.rank) != self.rank:
            return
        if "holds" in self.plan:
            self.hold(self.plan["holds"])
        if self.plan.get("dies"):
            os._exit(9)
        if "stack_bytes" in self.plan:
            threading.stack_size(self.plan["stack_bytes"])
        if "raises" in self.plan:
            raise make_error(self.plan)

    def hold(self, seconds):
        part = Path(f"reached-{self.rank}.part")
        part.write_text(str(os.getpid()))
        part.rename(f"reached-{self.rank}")
        end = time.monotonic() + seconds
        while time.monotonic() < end and not Path("go").exists():
            time.sleep(0.01)

    def configure(self, ctx):
        self.act("configure")
        state = {"steps": 0, "total": 0}
        if self.plan.get("accumulates"):
            state |= make_model()
        if self.plan.get("samples"):
            state["generate_sample"] = self.generate_sample
        return state

    def prepare_batch(self, raw, state, ctx):
        self.act(f"prepare_batch:{state['steps'] + 1}")
        return sum(raw["x"].to_pylist()) if hasattr(raw, "schema") else raw

    def train_step(self, batch, state, ctx):
        self.act(f"train_step:{state['steps'] + 1}")
        if self.plan.get("returns") == "dict":
            return {"loss": 1.0}
        if self.plan.get("returns") == "none":
            return None
        if self.plan.get("returns") == "text":
            return StepResult(metrics={"loss": "low"})
        state["steps"] += 1
        state["total"] += batch
        if state["steps"] == self.plan.get("cancels"):
            Path("cancel").touch()
        if "model" in state:
            accumulate(state, batch, self.plan["accumulates"])
        time.sleep(self.plan.get("step_s", 0))
        return StepResult(metrics={"loss": 1.0 / state["steps"]})

    def state_dict(self, state):
        self.act(f"state_dict:{state['steps']}")
        if "removes" in self.plan:
            remove(*self.plan["removes"])
        saved = {"steps": state["steps"], "total": state["total"]}
        saved |= {"generator": {"cache": [iter(())]}} if self.plan.get("saves") == "generator" else {}
        return saved

    def load_state_dict(self, state, payload, ctx):
        self.act("load_state_dict")
        state.update(payload)

    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        self.act("save_final" if final else f"save_checkpoint:{step}")

    def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx):
        self.act("load_checkpoint")

    def evaluate(self, state, ctx):
        self.act(f"evaluate:{state['steps']}")
        return {"score": 1.0}

    def generate_sample(self, *, step):
        self.act(f"generate_sample:{step}")
        return ["a", "list"] if self.plan.get("samples") == "list" else {"step": step}


class LosesWorkers(Faulty):
    """Its rollouts come from a loader whose workers end on SIGTERM, because they restore the default handler."""

    def rollout(self, state, ctx):
        from torch.utils.data import DataLoader

        return DataLoader(range(100), batch_size=None, num_workers=2, worker_init_fn=self.worker_init_fn)

    def worker_init_fn(self, worker):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class BreaksInConstructor(Faulty):
    def __init__(self):
        raise TypeError("missing 1 required positional argument: 'path'")


class RaisesWhenItEnds(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        raise RuntimeError("could not tidy up")


class LacksEvaluate(Faulty):
    evaluate = None


class Reads(Hook):
    reads = ("nobody_writes",)


class First(Hook):
    reads, writes = ("a",), ("b",)


class Second(Hook):
    reads, writes = ("b",), ("a",)
