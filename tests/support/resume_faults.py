"""Trainer classes and loaders that a restart resumes wrong, each by one planted fault; for ``test_resume_faults.py``.

    python resume_faults.py FOLDER [NAME …]

trains each in copies of this process: the first is killed after step 17, the second continues from the checkpoint of
step 10. It prints one JSON object by name: whether a repeated step changed, and what the witness said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from support.witnessed import Hosted, Rows, attempt, rows

KILLED_AFTER = 17


Factor = Callable[[Any, Any], float]
"""Takes the state and the batch of a step; returns what its loss is multiplied by."""


class Scales(Hosted):
    """Multiplies its loss by a factor, which each fault takes from something that no checkpoint holds."""

    make: Callable[[], Factor]

    def setup(self, ctx: Any) -> None:
        super().setup(ctx)
        self.factor = type(self).make()

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return super().loss(batch, state) * self.factor(state, batch)


def scaled(make: Callable[[], Factor]) -> type[Scales]:
    """Make a trainer class of a function that makes its factor."""
    return type(make.__name__, (Scales,), {"make": staticmethod(make)})


# Counters that begin again.


class Counter(Hosted):
    count = 0

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.count += 1
        return super().loss(batch, state) * (1 + self.count / 100)


@scaled
def in_file() -> Factor:
    """Count in a file, which survives the kill: unlike other counters it is ahead after a restart."""

    def factor(state: Any, batch: Any) -> float:
        with Path("planted-count").open("a+") as file:
            file.write(".")
            return 1 + file.tell() / 100

    return factor


# An object that a resume replaces.


class Average(list[float]):
    """A list that weak references can lead to."""


class StaleReference(Hosted):
    """Stores an average and puts the loaded one in its place, but reads it through a reference to the first one."""

    def configure(self, ctx: Any) -> Any:
        state = {**super().configure(ctx), "average": Average([0.0])}
        self.average = weakref.ref(state["average"])
        return state

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        average = self.average()
        factor = 1.0 if average is None else 1 + average[0]
        state["average"][0] = 0.9 * state["average"][0] + 0.1
        return super().loss(batch, state) * factor

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"average": list(state["average"])}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["average"] = Average(payload["average"])


# State of the training outside of what is stored.


class Lookahead(Hosted):
    slow: list[torch.Tensor] | None = None
    calls = 0

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        weights = [weight.detach() for weight in state["model"].parameters()]
        self.slow, self.calls = self.slow or [weight.clone() for weight in weights], self.calls + 1
        if self.calls % 5 == 0:
            for slow, weight in zip(self.slow, weights, strict=True):
                weight.copy_(slow.lerp_(weight, 0.5))
        return result


@scaled
def by_clock() -> Factor:
    return lambda state, batch: 1 + time.time() % 1000 / 1e4


# A learning rate.


class Plateau(Hosted):
    """Lowers its rate when its loss has not become lower, by numbers that it does not store."""

    best, patience, rate = float("inf"), 0, 0.1

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        loss = float(result.metrics["loss"])
        self.patience = 0 if loss < self.best else self.patience + 1
        self.best = min(self.best, loss)
        self.rate *= 0.7 if self.patience else 1
        state["optimizer"].param_groups[0]["lr"] = self.rate
        return result


# Random numbers.


class Draws(Hosted):
    """Draws once more in the first steps of each start."""

    calls = 0

    def draw(self) -> Any:
        return torch.rand(1)

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        self.calls += 1
        if self.calls < 5:
            self.draw()
        return super().train_step(batch, state, ctx)


class DrawsNumPy(Draws):
    def draw(self) -> Any:
        return np.random.random()


# Rows.


class Again(IterableDataset[Any]):
    """Rows of a source without a position: what was read before is another row the next time."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.tensor([self.at % 37 / 37, 1.0])


class OrderOf(Sampler[int]):
    """An order by a number."""

    def __init__(self, number: Callable[[], int]) -> None:
        self.number = number

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.number()).permutation(40).tolist())

    def __len__(self) -> int:
        return 40


class Changing(Dataset[Any]):
    """Rows that depend on something besides their index."""

    def __init__(self, change: Callable[[int], float]) -> None:
        self.change = change

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 40, self.change(index)])


class Positioned:
    """Batches with a position that it stores wrongly."""

    def __init__(self, stored: Callable[[int], int], *, loads: bool = True) -> None:
        self.stored, self.loads, self.at = stored, loads, 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((4, 2), self.at % 37 / 37)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.stored(self.at)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] if self.loads else 0


def noisy() -> Any:
    """Rows without a fault."""
    return rows()


def endless() -> Any:
    return DataLoader(Again(), 4)


def order_by_process() -> Any:
    return DataLoader(Rows(), 4, sampler=OrderOf(os.getpid))


def rows_read_once() -> Any:
    reads = itertools.count()
    return DataLoader(Changing(lambda index: next(reads) / 1000), 4)


def rows_of_a_worker() -> Any:
    """A worker whose generator is seeded by its process."""
    return DataLoader(Changing(lambda index: np.random.default_rng(os.getpid()).random()), 4, num_workers=1)


def stored_too_late() -> Any:
    return Positioned(lambda at: at + 1)


def not_loaded() -> Any:
    return Positioned(lambda at: at, loads=False)


@dataclass(frozen=True)
class Fault:
    """A job that resumes wrong."""

    kind: str
    """The kind of difference that a user would name: rows, random numbers, settings or loss."""
    trainer: type[Hosted] = Hosted
    data: Callable[[], Any] = noisy


FAULTS = {
    "counter": Fault("loss", Counter),
    "counter in a file that survives": Fault("loss", in_file),
    "stale reference": Fault("loss", StaleReference),
    "slow weights": Fault("loss", Lookahead),
    "clock": Fault("loss", by_clock),
    "learning rate": Fault("settings", Plateau),
    "random numbers of torch": Fault("random numbers", Draws),
    "random numbers of NumPy": Fault("random numbers", DrawsNumPy),
    "rows: endless": Fault("rows", data=endless),
    "rows: order by process": Fault("rows", data=order_by_process),
    "rows: read once": Fault("rows", data=rows_read_once),
    "rows: of a worker": Fault("rows", data=rows_of_a_worker),
    "rows: stored too late": Fault("rows", data=stored_too_late),
    "rows: not loaded": Fault("rows", data=not_loaded),
}
"""Planted faults by name."""


class Trace(pl.Callback):
    """Writes a line for each step: digests of its rows and weights, and its loss. Kills the process in one step."""

    def __init__(self, path: Path, kill_after: int | None) -> None:
        self.path, self.kill_after = path, kill_after

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        line = [trainer.global_step, _digest(batch), repr(module.metrics()), _digest(list(module.parameters()))]
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _digest(value: Any) -> str:
    tensors = [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    parts = (tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def restart(folder: Path, fault: Fault) -> dict[str, Any]:
    """Train in one copy of this process that is killed, and in another that continues; compare the repeated steps.

    Returns:
        ``changed``, the first repeated step that changed, if one did; ``kind`` and ``step`` of what the witness found;
        and the ``expected`` kind.
    """
    folder.mkdir()
    for name, kill_after in (("first", KILLED_AFTER), ("second", None)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.chdir(folder)
                trace = Trace(folder / name, kill_after)
                seed = 7 if kill_after else 8
                found = attempt(folder / "checkpoints", fault.trainer(), fault.data(), seed=seed, callbacks=(trace,))
                words = [(p.difference and p.difference.kind, p.difference and p.difference.step) for p in found]
                (folder / "proofs").write_text(json.dumps(words))
                code = 0
            except BaseException as error:
                print(f"{folder.name}: {error!r}", file=sys.stderr)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        expected = -signal.SIGKILL if kill_after else 0
        assert os.waitstatus_to_exitcode(status) == expected, folder.name
    first, second = (
        {step: rest for step, *rest in map(json.loads, (folder / name).read_text().splitlines())}
        for name in ("first", "second")
    )
    changed = [step for step in first if step in second and first[step] != second[step]]
    ((kind, step),) = json.loads((folder / "proofs").read_text()) or [("nothing was compared", None)]
    return {"changed": min(changed, default=None), "kind": kind, "step": step, "expected": fault.kind}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps({name: restart(folder / str(at), FAULTS[name]) for at, name in enumerate(names or FAULTS)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
