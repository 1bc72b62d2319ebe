"""Trainer classes and loaders that a restart resumes wrong, each by one planted fault; for ``test_resume_faults.py``.

    python resume_faults.py FOLDER [NAME …]

trains each in copies of this process: the first is killed after step 17, the second continues from the checkpoint of
step 10. It prints one JSON object by name: whether a repeated step changed, and what the witness said.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
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
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from genlight.adapter import StepResult
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


def counted(count: Callable[[], int]) -> type[Scales]:
    """Make a trainer class whose factor grows with a number: how often a function was called."""
    return type(count.__name__, (Scales,), {"make": staticmethod(lambda: lambda state, batch: 1 + count() / 100)})


# Counters that begin again.


class OnInstance(Hosted):
    count = 0

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.count += 1
        return super().loss(batch, state) * (1 + self.count / 100)


class OnClass(OnInstance):
    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        OnClass.count += 1
        return super().loss(batch, state)


_count, _numbers, _local = 0, itertools.count(1), threading.local()


@counted
def in_module() -> int:
    global _count
    _count += 1
    return _count


@counted
def in_itertools() -> int:
    return next(_numbers)


@counted
def in_thread_local() -> int:
    _local.count = getattr(_local, "count", 0) + 1
    return int(_local.count)


@counted
def in_environment() -> int:
    os.environ["PLANTED"] = str(int(os.environ.get("PLANTED", "0")) + 1)
    return int(os.environ["PLANTED"])


@counted
def in_file() -> int:
    """Unlike the others it is ahead after a restart: the file survives the kill."""
    with Path("planted-count").open("a+") as file:
        file.write(".")
        return file.tell()


@scaled
def in_closure() -> Factor:
    count = 0

    def factor(state: Any, batch: Any) -> float:
        nonlocal count
        count += 1
        return 1 + count / 100

    return factor


@scaled
def first_steps() -> Factor:
    """Warm up in the first steps after each start."""
    calls = itertools.count(1)
    return lambda state, batch: min(1.0, next(calls) / 5)


# Iterators and caches.


@scaled
def over_cycle() -> Factor:
    factors = itertools.cycle([1.0, 1.1, 1.2])
    return lambda state, batch: next(factors)


@scaled
def over_list() -> Factor:
    factors = iter([1 + number / 100 for number in range(1000)])
    return lambda state, batch: next(factors)


@scaled
def over_generator() -> Factor:
    def decaying() -> Any:
        value = 2.0
        while True:
            value *= 0.99
            yield value

    factors = decaying()
    return lambda state, batch: next(factors)


_seen: list[float] = []


@functools.lru_cache(maxsize=1)
def _first(name: str) -> float:
    return _seen[-1]


@scaled
def cached_by_function() -> Factor:
    def factor(state: Any, batch: Any) -> float:
        _seen.append(float(batch.mean()))
        return 1 + abs(_first("mean"))

    return factor


@scaled
def memoized() -> Factor:
    """Keep the result of the step in which a key came first."""
    cache: dict[int, float] = {}
    return lambda state, batch: cache.setdefault(0, 1 + state["model"][0].weight.abs().mean().item())


class FirstLoss(Hosted):
    """Divides by its first loss."""

    first: float | None = None

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        loss = super().loss(batch, state)
        self.first = self.first or loss.item()
        return 0.02 * loss / self.first


# Objects that a resume replaces.


class Average(list[float]):
    def scale(self) -> float:
        return 1 + self[0]


class Averages(Hosted):
    """Stores an average, and puts the loaded one in its place."""

    def configure(self, ctx: Any) -> Any:
        state = super().configure(ctx)
        state["average"] = Average([0.0])
        self.bind(state["average"])
        return state

    def bind(self, average: Average) -> None:
        self.scale: Callable[[], float] = lambda: 1 + average[0]

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        factor = self.scale()
        state["average"][0] = 0.9 * state["average"][0] + 0.1
        return super().loss(batch, state) * factor

    def state_dict(self, state: Any) -> dict[str, Any]:
        return {"average": list(state["average"])}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None:
        state["average"] = Average(payload["average"])


class StalePartial(Averages):
    def bind(self, average: Average) -> None:
        self.scale = functools.partial(Average.scale, average)


class StaleReference(Averages):
    def bind(self, average: Average) -> None:
        reference = weakref.ref(average)
        self.scale = lambda: 1.0 if (found := reference()) is None else found.scale()


# State of the training outside of what is stored.


class Momentum(Hosted):
    def setup(self, ctx: Any) -> None:
        super().setup(ctx)
        self.buffers: dict[int, torch.Tensor] = {}

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        with torch.no_grad():
            for at, weight in enumerate(state["model"].parameters()):
                self.buffers[at] = 0.9 * self.buffers.get(at, torch.zeros_like(weight)) + weight.grad
                weight -= 0.01 * self.buffers[at]
        return result


class Ema(Hosted):
    """Pulls its weights to an average of them that nothing stores."""

    average: list[torch.Tensor] | None = None

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        weights = [weight.detach() for weight in state["model"].parameters()]
        self.average = self.average or [weight.clone() for weight in weights]
        for mean, weight in zip(self.average, weights, strict=True):
            mean.lerp_(weight, 0.1)
            weight.lerp_(mean, 0.1)
        return result


class Baseline(Hosted):
    """Subtracts a running mean of its losses, as policy gradients do."""

    mean = 0.0

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        loss = super().loss(batch, state)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return (loss - self.mean).square()


class Target(Hosted):
    """Trains against a copy of itself that it makes again every fourth step."""

    calls = 0

    def setup(self, ctx: Any) -> None:
        super().setup(ctx)
        self.target: dict[str, torch.Tensor] = {}

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        model = state["model"]
        if self.calls % 4 == 0:
            self.target = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.calls += 1
        return super().loss(batch, state) + (model(batch) - functional_call(model, self.target, batch)).square().mean()


class Replay(Hosted):
    """Trains on earlier batches as well."""

    def setup(self, ctx: Any) -> None:
        super().setup(ctx)
        self.buffer = collections.deque[torch.Tensor](maxlen=3)

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.buffer.append(batch)
        batches = [*self.buffer, *[batch] * (3 - len(self.buffer))]
        return sum(super(Replay, self).loss(each, state) for each in batches) / 3


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


class OwnScaler(Hosted):
    """Scales its loss by a growing number; what it divides by later rounds differently."""

    scale = 3.0

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        self.scale *= 1.1
        return super().train_step(batch, state, ctx)

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        return super().loss(batch, state) * self.scale / self.scale


@scaled
def clipped_by_history() -> Factor:
    """Clip by the median of the norms that it has seen."""
    history: list[float] = []

    def factor(state: Any, batch: Any) -> float:
        history.append(float(batch.norm()))
        return float(np.median(history))

    return factor


class Curriculum(Hosted):
    """Trains on a growing part of its batch."""

    part = 1

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        self.part += 1
        return super().prepare_batch(raw, state, ctx)[: 1 + self.part // 6]


class Accumulates(Hosted):
    """Adds the gradients of the step before to its own."""

    before: list[torch.Tensor] | None = None

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        state["optimizer"].zero_grad()
        loss = self.loss(batch, state)
        loss.backward()
        own = [weight.grad.clone() for weight in state["model"].parameters()]
        for weight, gradient in zip(state["model"].parameters(), self.before or own, strict=True):
            weight.grad += gradient
        self.before = own
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})


class ForwardHook(Hosted):
    def model(self) -> torch.nn.Module:
        model, calls = super().model(), itertools.count(1)
        model.register_forward_hook(lambda module, given, output: output * (1 + next(calls) / 100))
        return model


class OptimizerHook(Hosted):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer, calls = super().optimizer(parameters), itertools.count(1)

        def decay(*_: Any) -> None:
            for weight in optimizer.param_groups[0]["params"]:
                weight.grad *= 0.99 ** next(calls)

        optimizer.register_step_pre_hook(decay)
        return optimizer


class DropoutOff(Hosted):
    """Switches its dropout off after some steps of each start."""

    calls = 0

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.calls += 1
        state["model"][1].train(self.calls < 8)
        return super().loss(batch, state)


class Freezes(Hosted):
    """Freezes a layer by a counter."""

    calls = 0

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        self.calls += 1
        state["model"][0].requires_grad_(self.calls < 8)
        if self.calls >= 8:
            state["model"][0].zero_grad()
        return super().train_step(batch, state, ctx)


@scaled
def by_process() -> Factor:
    return lambda state, batch: 1 + os.getpid() / 1e7


@scaled
def by_clock() -> Factor:
    return lambda state, batch: 1 + time.time() % 1000 / 1e4


# Learning rates.


class Schedules(Hosted):
    """Sets its rate by a counter that it does not store."""

    count = 0

    def rate(self, loss: float) -> float:
        self.count += 1
        return 0.1 * 0.9**self.count

    def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
        result = super().train_step(batch, state, ctx)
        state["optimizer"].param_groups[0]["lr"] = self.rate(float(result.metrics["loss"]))
        return result


class CyclicRate(Schedules):
    def __init__(self) -> None:
        self.rates = itertools.cycle([0.1, 0.05, 0.02])

    def rate(self, loss: float) -> float:
        return next(self.rates)


class Plateau(Schedules):
    best, patience, now = float("inf"), 0, 0.1

    def rate(self, loss: float) -> float:
        self.patience = 0 if loss < self.best else self.patience + 1
        self.best = min(self.best, loss)
        self.now *= 0.7 if self.patience else 1
        return self.now


class WarmsUp(Schedules):
    def rate(self, loss: float) -> float:
        self.count += 1
        return 0.1 * min(1, self.count / 15)


class RateByClock(Schedules):
    began_s: float | None = None

    def rate(self, loss: float) -> float:
        self.began_s = self.began_s or time.monotonic()
        return 0.1 / (1 + time.monotonic() - self.began_s)


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


class DrawsPython(Draws):
    def draw(self) -> Any:
        return random.random()


class SeedsTorch(Draws):
    def draw(self) -> Any:
        torch.manual_seed(self.calls)


class SeedsByProcess(Draws):
    def draw(self) -> Any:
        torch.manual_seed(os.getpid())


class NewGenerator(Hosted):
    """Makes a generator when it is first needed, with a fixed seed."""

    noise: Any = None

    def loss(self, batch: Any, state: Any) -> torch.Tensor:
        self.noise = self.noise or np.random.default_rng(1)
        return super().loss(batch, state) * float(1 + self.noise.random())


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


def order_by_clock() -> Any:
    return DataLoader(Rows(), 4, sampler=OrderOf(lambda: time.time_ns() % 2**32))


def order_by_process() -> Any:
    return DataLoader(Rows(), 4, sampler=OrderOf(os.getpid))


def order_by_pass() -> Any:
    """A sampler without ``set_epoch``, which counts its passes itself."""
    return DataLoader(Rows(), 4, sampler=OrderOf(functools.partial(next, itertools.count())))


def rows_read_once() -> Any:
    reads = itertools.count()
    return DataLoader(Changing(lambda index: next(reads) / 1000), 4)


def rows_cached() -> Any:
    """Augments each row once, and keeps it."""
    augment = functools.lru_cache(maxsize=None)(lambda index: random.random())
    return DataLoader(Changing(augment), 4)


def rows_of_process() -> Any:
    return DataLoader(Changing(lambda index: os.getpid() / 1e6), 4)


def rows_of_a_worker() -> Any:
    """A worker whose generator is seeded by its process."""
    return DataLoader(Changing(lambda index: np.random.default_rng(os.getpid()).random()), 4, num_workers=1)


def rows_of_a_file() -> Any:
    Path("planted-rows").write_text("\n".join(str(number / 1000) for number in range(4000)))
    file = Path("planted-rows").open()  # noqa: SIM115
    return DataLoader(Changing(lambda index: float(file.readline())), 4)


def collated_by_count() -> Any:
    count = itertools.count()
    return DataLoader(Changing(float), 4, collate_fn=lambda picked: torch.stack(picked) + next(count) / 100)


def stored_too_late() -> Any:
    return Positioned(lambda at: at + 1)


def stored_too_early() -> Any:
    return Positioned(lambda at: at - 1)


def stored_as_zero() -> Any:
    return Positioned(lambda at: 0)


def not_loaded() -> Any:
    return Positioned(lambda at: at, loads=False)


@dataclass(frozen=True)
class Fault:
    """A job that resumes wrong."""

    kind: str
    """The kind of difference that a user would name: rows, random numbers, settings or loss."""
    trainer: type[Hosted] = Hosted
    data: Callable[[], Any] = noisy


def _group(about: str, kind: str, trainers: dict[str, type[Hosted]]) -> dict[str, Fault]:
    """Name the faults of a group, which show in the same way."""
    return {f"{about}: {name}": Fault(kind, trainer) for name, trainer in trainers.items()}


FAULTS = {
    **_group(
        "counter",
        "loss",
        {
            "attribute": OnInstance,
            "class attribute": OnClass,
            "module global": in_module,
            "itertools.count": in_itertools,
            "closure": in_closure,
            "threading.local": in_thread_local,
            "environment variable": in_environment,
            "file that survives": in_file,
            "forward hook": ForwardHook,
            "optimizer hook": OptimizerHook,
            "steps since the start": first_steps,
        },
    ),
    **_group(
        "iterator",
        "loss",
        {
            "itertools.cycle": over_cycle,
            "list": over_list,
            "generator function": over_generator,
        },
    ),
    **_group(
        "cache",
        "loss",
        {
            "functools.lru_cache": cached_by_function,
            "first loss": FirstLoss,
            "dictionary": memoized,
        },
    ),
    **_group("stale", "loss", {"closure": Averages, "partial": StalePartial, "weakref": StaleReference}),
    **_group(
        "state",
        "loss",
        {
            "momentum outside of the optimizer": Momentum,
            "moving average of the weights": Ema,
            "running mean of the loss": Baseline,
            "target network": Target,
            "replay buffer": Replay,
            "slow weights": Lookahead,
            "own loss scale": OwnScaler,
            "history of norms": clipped_by_history,
            "curriculum": Curriculum,
            "gradients of the last step": Accumulates,
            "dropout switched off": DropoutOff,
            "frozen layer": Freezes,
            "process id": by_process,
            "clock": by_clock,
        },
    ),
    **_group(
        "rate",
        "settings",
        {
            "counter": Schedules,
            "itertools.cycle": CyclicRate,
            "plateau": Plateau,
            "warm-up": WarmsUp,
            "clock": RateByClock,
        },
    ),
    **_group(
        "random",
        "random numbers",
        {
            "torch": Draws,
            "NumPy": DrawsNumPy,
            "Python": DrawsPython,
            "seed of torch": SeedsTorch,
            "seed by process": SeedsByProcess,
            "generator made late": NewGenerator,
        },
    ),
    **{
        f"rows: {data.__name__.replace('_', ' ')}": Fault("rows", data=data)
        for data in (
            endless,
            order_by_clock,
            order_by_process,
            order_by_pass,
            rows_read_once,
            rows_cached,
            rows_of_process,
            rows_of_a_worker,
            rows_of_a_file,
            collated_by_count,
            stored_too_late,
            stored_too_early,
            stored_as_zero,
            not_loaded,
        )
    },
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


def restart(
    folder: Path, make: Callable[[], Any], data: Callable[[], Any], *, killed_after: int = KILLED_AFTER, **options: Any
) -> dict[str, Any]:
    """Train in one copy of this process that is killed, and in another that continues; compare the repeated steps.

    Args:
        folder: A new folder, in which the copies work.
        make: Makes the trainer class.
        data: Makes the loader.
        killed_after: The last step of the first copy.
        options: As of `attempt`.

    Returns:
        ``changed``, the first repeated step that changed, if one did; ``kind`` and ``step`` of what the witness found.
    """
    folder.mkdir()
    for name, kill_after in (("first", killed_after), ("second", None)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.chdir(folder)
                trace = Trace(folder / name, kill_after)
                seed = 7 if kill_after else 8
                found = attempt(folder / "checkpoints", make(), data(), seed=seed, callbacks=(trace,), **options)
                words = [
                    (p.difference and p.difference.kind, p.difference and p.difference.step, p.text) for p in found
                ]
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
    (proof,) = json.loads((folder / "proofs").read_text()) or [("nothing was compared", None)]
    return {"changed": min(changed, default=None), "kind": proof[0], "step": proof[1]}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {}
    for at, name in enumerate(names or FAULTS):
        fault = FAULTS[name]
        results[name] = {**restart(folder / str(at), fault.trainer, fault.data), "expected": fault.kind}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
