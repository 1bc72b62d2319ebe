"""What hosting a trainer class costs in each step, beside a bare torch loop and other hosts.

    python examples/benchmarks/step_overhead.py --steps 10000 --rounds 7 --json step_overhead.json
    python examples/benchmarks/step_overhead.py --ranks 2 --steps 3000 --rounds 7

The model is one linear layer, the batch has 8 rows: small enough that the host shows. Each host runs the same training
step for ``--steps`` steps; clocks start in step 200, so that start-up does not count. All take part in one interleaved
run, and right before each of them its floor runs: a bare loop over the same steps, for bf16 with autocast, with several
ranks over ``DistributedDataParallel``. Figures are medians over rounds, of ratios and differences to the floor of the
same moment; the first round does not count. CPU time is that of the process with all its threads.

`standard` is what ``genlight run`` puts together: an event log with metrics every 10 steps, stop checks with a cancel
file and a runtime limit, checkpoints and samples (a cadence far away), without the progress lines.
torchtnt, accelerate and transformers take part where they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from genlight.adapter import ContractModule, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Hook, JobProgress, LogMetrics, StopRequests, WriteSamples
from genlight.reporters import EventLogger

WARM_STEPS = 200
FAR = 10**9
BATCH = torch.randn(8, 16), torch.randn(8, 1)

Times = tuple[float, float]
"""CPU and wall-clock seconds of the steps that count."""


class Clock:
    """Notes the time in the step at which counting begins, and in the last one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.total = WARM_STEPS + steps
        self.step = 0
        self.began: Times = (0.0, 0.0)
        self.ended: Times = (0.0, 0.0)

    def tick(self) -> None:
        """Called once in each step."""
        self.step += 1
        if self.step == WARM_STEPS:
            self.began = (time.process_time(), time.perf_counter())
        elif self.step == self.total:
            self.ended = (time.process_time(), time.perf_counter())

    @property
    def times(self) -> Times:
        """Of the steps that count."""
        assert self.step == self.total, f"{self.step} steps of {self.total}"
        return self.ended[0] - self.began[0], self.ended[1] - self.began[1]


class Batches:
    """The same batch again and again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield BATCH


class Linear:
    """The trainer class: one layer, plain SGD."""

    def __init__(self, clock: Clock, *, replicate: bool = False) -> None:
        self.clock = clock
        self.replicate = replicate

    def setup(self, ctx: Any) -> None: ...

    def configure(self, ctx: Any) -> dict[str, Any]:
        model: torch.nn.Module = torch.nn.Linear(16, 1)
        if self.replicate:
            model = DistributedDataParallel(model)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4)}

    def prepare_batch(self, raw: Any, state: Any, ctx: Any) -> Any:
        return raw

    def train_step(self, batch: Any, state: Any, ctx: Any) -> StepResult:
        self.clock.tick()
        x, y = batch
        state["optimizer"].zero_grad()
        loss = torch.nn.functional.mse_loss(state["model"](x), y)
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: Any) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Any, payload: Any, ctx: Any) -> None: ...


class Manual(pl.LightningModule):
    """The same step under stock Lightning, with an optimizer that it steps itself."""

    automatic_optimization = False

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.automatic_optimization = type(self).automatic_optimization
        self.clock = clock
        self.model = torch.nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.tick()
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=1e-4)


class Automatic(Manual):
    """The same step in Lightning's automatic optimization."""

    automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.tick()
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)


class NoOp(Hook):
    """A hook that somebody overrides and that does nothing."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...


class Environment(LightningEnvironment):
    """Ranks that this script started itself."""

    creates_processes_externally = True

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks

    def local_rank(self) -> int:
        return self._rank

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._ranks

    def set_world_size(self, size: int) -> None: ...


def bare(clock: Clock, *, autocast: bool = False, replicate: bool = False) -> None:
    """The loop that somebody would write by hand."""
    trainer = Linear(clock, replicate=replicate)
    state = trainer.configure(None)
    for raw in Batches(clock.total):
        batch = trainer.prepare_batch(raw, state, None)
        if autocast:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                trainer.train_step(batch, state, None)
        else:
            trainer.train_step(batch, state, None)


def fit(module: Any, clock: Clock, folder: Path, **settings: Any) -> None:
    """Train `module` under Lightning, without anything that was not asked for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in settings.get("callbacks", ())),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "max_steps": clock.total,
        "max_epochs": -1,
        "use_distributed_sampler": False,
    }
    pl.Trainer(**{**defaults, **settings}).fit(module, Batches(clock.total))


def hosted(clock: Clock, folder: Path, **settings: Any) -> None:
    """The trainer class in genlight, with nothing beside it."""
    job = TrainingJobSpec(run_id="cost", max_steps=clock.total)
    fit(ContractModule(Linear(clock), job), clock, folder, **{"callbacks": [LogMetrics(0)], **settings})


def standard(clock: Clock, folder: Path, *more: pl.Callback, every: int = 10, **settings: Any) -> None:
    """The trainer class in genlight, with what a job gets."""
    callbacks = [
        StopRequests(cancel_file=folder / "cancel", max_runtime_s=100_000),
        LogMetrics(every),
        WriteSamples(folder / "samples", FAR),
        Checkpoint(folder / "checkpoints", every_n_steps=FAR, save_final=False),
        *more,
    ]
    logger = EventLogger(run_id="cost", save_dir=str(folder))
    hosted(clock, folder, callbacks=callbacks, logger=logger, **settings)


def with_progress(clock: Clock, folder: Path) -> None:
    """Progress as lines, to nobody."""
    with contextlib.redirect_stderr(io.StringIO()):
        standard(clock, folder, JobProgress())


def fabric(clock: Clock, _: Path) -> None:
    """The same step with Fabric."""
    host = Fabric(accelerator="cpu", devices=1)
    layer = torch.nn.Linear(16, 1)
    model, optimizer = host.setup(layer, torch.optim.SGD(layer.parameters(), lr=1e-4))
    for x, y in Batches(clock.total):
        clock.tick()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        host.backward(loss)
        optimizer.step()


def accelerate(clock: Clock, _: Path) -> None:
    """The same step with accelerate."""
    from accelerate import Accelerator

    host = Accelerator(cpu=True)
    layer = torch.nn.Linear(16, 1)
    model, optimizer = host.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1e-4))
    for x, y in Batches(clock.total):
        clock.tick()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        host.backward(loss)
        optimizer.step()


def torchtnt(clock: Clock, _: Path) -> None:
    """The same step in a TorchTNT unit."""
    from torchtnt.framework.train import train
    from torchtnt.framework.unit import TrainUnit

    class Unit(TrainUnit[Any]):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Linear(clock)
            self.state = self.inner.configure(None)

        def train_step(self, state: Any, data: Any) -> None:
            self.inner.train_step(data, self.state, None)

    train(Unit(), Batches(clock.total), max_steps=clock.total)


def hugging_face(clock: Clock, folder: Path) -> None:
    """The same step in the Hugging Face trainer, its reports switched off."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            clock.tick()
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}

    rows = [{"x": torch.randn(16), "y": torch.randn(1)} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=clock.total, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        logging_strategy="no", save_strategy="no", disable_tqdm=True, optim="sgd",
    )  # fmt: skip
    Trainer(model=Model(), args=arguments, train_dataset=rows).train()


Host = Callable[[Clock, Path], None]


def hosts_of_one() -> dict[str, tuple[Host, str]]:
    """Who takes part, and over which floor."""
    found: dict[str, tuple[Host, str]] = {
        "bare torch loop": (lambda clock, _: bare(clock), "bare"),
        "genlight": (hosted, "bare"),
        "genlight, standard": (standard, "bare"),
        "genlight, standard, events every step": (lambda c, f: standard(c, f, every=1), "bare"),
        "genlight, standard, progress": (with_progress, "bare"),
        "genlight, standard, 10 no-op hooks": (lambda c, f: standard(c, f, *[NoOp() for _ in range(10)]), "bare"),
        "genlight, standard, 100 idle hooks": (lambda c, f: standard(c, f, *[Hook() for _ in range(100)]), "bare"),
        "genlight, standard, bf16-mixed": (lambda c, f: standard(c, f, precision="bf16-mixed"), "autocast"),
        "Lightning, manual": (lambda c, f: fit(Manual(c), c, f), "bare"),
        "Lightning, automatic": (lambda c, f: fit(Automatic(c), c, f), "bare"),
        "Lightning, manual, bf16-mixed": (lambda c, f: fit(Manual(c), c, f, precision="bf16-mixed"), "autocast"),
        "Fabric": (fabric, "bare"),
    }
    others: dict[str, tuple[str, Host]] = {
        "torchtnt": ("TorchTNT", torchtnt),
        "accelerate": ("accelerate", accelerate),
        "transformers": ("Hugging Face Trainer", hugging_face),
    }
    for package, (name, host) in others.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name} does not take part: {package} is not installed")
        else:
            found[name] = (host, "bare")
    return found


def hosts_of_ranks(rank: int, ranks: int) -> dict[str, tuple[Host, str]]:
    """Who takes part with several ranks; the floor is ``DistributedDataParallel``."""

    def ddp() -> dict[str, Any]:
        return {"strategy": DDPStrategy(cluster_environment=Environment(rank, ranks)), "devices": ranks}

    return {
        "bare DDP loop": (lambda clock, _: bare(clock, replicate=True), "replicated"),
        "genlight": (lambda c, f: hosted(c, f, **ddp()), "replicated"),
        "genlight, standard": (lambda c, f: standard(c, f, **ddp()), "replicated"),
        "Lightning, manual": (lambda c, f: fit(Manual(c), c, f, **ddp()), "replicated"),
    }


FLOORS: dict[str, Callable[[Clock], None]] = {
    "bare": bare,
    "autocast": lambda clock: bare(clock, autocast=True),
    "replicated": lambda clock: bare(clock, replicate=True),
}


def measured(hosts: dict[str, tuple[Host, str]], steps: int, rounds: int) -> dict[str, list[tuple[Times, Times]]]:
    """For each host and round: times of the floor right before it, and its own."""
    runs: dict[str, list[tuple[Times, Times]]] = {name: [] for name in hosts}
    for number in range(rounds + 1):
        for name, (host, floor) in hosts.items():
            before, clock = Clock(steps), Clock(steps)
            FLOORS[floor](before)
            with tempfile.TemporaryDirectory() as folder:
                host(clock, Path(folder))
            if number:
                runs[name].append((before.times, clock.times))
    return runs


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def lines_of(runs: dict[str, list[tuple[Times, Times]]], steps: int) -> list[dict[str, Any]]:
    """One line of figures for each host."""
    return [
        {
            "host": name,
            "floor_us": spread([floor[0] / steps * 1e6 for floor, _ in pairs]),
            "added_us": spread([(own[0] - floor[0]) / steps * 1e6 for floor, own in pairs]),
            "ratio": spread([own[0] / floor[0] for floor, own in pairs]),
            "wall_ratio": spread([own[1] / floor[1] for floor, own in pairs]),
        }
        for name, pairs in runs.items()
    ]


def show(lines: list[dict[str, Any]]) -> None:
    """Print one table."""
    print(f"  {'':<40}{'floor us':>9}{'added us':>10}{'(IQR)':>18}{'ratio':>8}{'(IQR)':>16}{'wall':>8}")
    for line in lines:
        added, ratio = line["added_us"], line["ratio"]
        print(
            f"  {line['host']:<40}{line['floor_us']['median']:>9.1f}{added['median']:>10.1f}"
            f"{added['q1']:>9.1f} to{added['q3']:>6.1f}{ratio['median']:>8.3f}"
            f"{ratio['q1']:>8.2f} to{ratio['q3']:>5.2f}{line['wall_ratio']['median']:>8.3f}"
        )


FINISHED = {
    "trainer": "counts:Counts",
    "run_id": "finished",
    "max_steps": 1,
    "mock_batches": [1],
    "resume_from_latest": True,
}
COUNTS = """
class Counts:
    def setup(self, ctx): ...
    def configure(self, ctx):
        import torch
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def prepare_batch(self, raw, state, ctx): return raw
    def train_step(self, batch, state, ctx):
        from genlight.adapter import StepResult
        return StepResult(metrics={"loss": 1.0})
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""
LIGHTNING_HELP = "from lightning.pytorch.cli import LightningCLI; LightningCLI(args=['--help'])"
OPTIMIZER = "import torch; torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)"


def start_up(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of CPU of whole processes, interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "counts.py").write_text(COUNTS)
        genlight = str(Path(sys.executable).with_name("genlight"))
        commands = {
            "genlight --help": [genlight, "--help"],
            "genlight run, finished before": [genlight, "run", _job(root, "finished")],
            "genlight run, one step": [genlight, "run", "FRESH"],
            "import torch, make an optimizer": [sys.executable, "-c", OPTIMIZER],
            "LightningCLI --help": [sys.executable, "-c", LIGHTNING_HELP],
        }
        _cpu_seconds([genlight, "run", _job(root, "finished")], root)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name, command in commands.items():
                fresh = [_job(root, f"fresh-{number}") if word == "FRESH" else word for word in command]
                seconds[name].append(_cpu_seconds(fresh, root))
    return {name: spread(values[1:]) for name, values in seconds.items()}


def _job(root: Path, run_id: str) -> str:
    path = root / f"{run_id}.json"
    path.write_text(json.dumps({**FINISHED, "run_id": run_id}))
    return str(path)


def _cpu_seconds(command: list[str], folder: Path) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    return used() - before


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Bars of the microseconds that each host adds to a step; needs matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    from matplotlib import pyplot

    shown = lines[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(shown) + 1), layout="constrained")
    axes.barh([line["host"] for line in shown], [line["added_us"]["median"] for line in shown])
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlabel("CPU time added to a step (us)")
    figure.savefig(path, dpi=150)


def started_rank(rank: int, ranks: int, store: str) -> None:
    """Join the process group of all ranks, which every host then uses."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{store}")


def with_ranks(arguments: list[str], ranks: int) -> int:
    """Run this script once for each rank; the first one prints."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        started = [
            subprocess.Popen([sys.executable, __file__, *arguments, "--rank", str(rank), "--store", store])
            for rank in range(ranks)
        ]
        return max(process.wait() for process in started)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print and return all figures."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="steps that count, in each run of a host")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; medians are over these")
    parser.add_argument("--ranks", type=int, default=1, help="processes, connected by gloo")
    parser.add_argument("--startup", type=int, default=5, metavar="ROUNDS", help="rounds of start-up times; 0: none")
    parser.add_argument("--only", default="", help="hosts whose name has this text")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to draw the figures")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if chosen.ranks > 1 and chosen.rank is None:
        raise SystemExit(with_ranks(given, chosen.ranks))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if chosen.ranks > 1:
        started_rank(chosen.rank, chosen.ranks, chosen.store)
    hosts = hosts_of_ranks(chosen.rank, chosen.ranks) if chosen.ranks > 1 else hosts_of_one()
    hosts = {name: host for name, host in hosts.items() if chosen.only in name}
    lines = lines_of(measured(hosts, chosen.steps, chosen.rounds), chosen.steps)
    report: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("genlight", "torch", "lightning")},
        "python": platform.python_version(),
        "ranks": chosen.ranks,
        "steps": chosen.steps,
        "rounds": chosen.rounds,
        "load_average": os.getloadavg(),
        "hosts": lines,
    }
    if chosen.rank in (None, 0):
        show(lines)
        if chosen.startup and chosen.ranks == 1:
            report["start_up_cpu_s"] = start_up(chosen.startup)
            for name, seconds in report["start_up_cpu_s"].items():
                print(f"  {name:<40}{seconds['median']:>9.3f} s of CPU")
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=2) + "\n")
        if chosen.plot:
            plot(lines, chosen.plot)
    return report


if __name__ == "__main__":
    main()
