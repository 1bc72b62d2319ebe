"""The time from the death of a rank until the run trains again under torchrun, and the number of restarts.

    python examples/benchmarks/restart_time.py --pairs 5

Each round is one run whose ranks meet in the store of torchrun's agent, as in Lightning, one whose ranks meet in a new
store for each start, as in genlight, one of ``genlight run --restarts`` without torchrun, and two on two nodes of one
rank each: agents of torchrun with ``--max-restarts``, and with ``genlight run --restarts``. They take turns, since
other work on the machine slows all of them. On a busy machine CPU time is more exact than the clock; it is measured for
one rank from its start to its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil

Mark: TypeAlias = dict[str, Any]

TRAINER = """
import json, os, signal, time
import torch
from genlight.adapter import StepResult


def note(what):
    line = {"what": what, "at": time.time(), "cpu": time.process_time(), "rank": os.environ["LOCAL_RANK"]}
    with open("marks.jsonl", "a") as file:
        file.write(json.dumps(line | {"start": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\\n")


class Tiny:
    steps = 0

    def setup(self, ctx):
        torch.manual_seed(0)

    def configure(self, ctx):
        model = torch.nn.Linear(4, 4)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def prepare_batch(self, raw, state, ctx):
        return torch.full((2, 4), float(raw))

    def train_step(self, batch, state, ctx):
        self.steps += 1
        if self.steps == 1:
            note("first step")
        if ctx.rank == 1 and self.steps == 8 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        loss = state["model"](batch).pow(2).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {}

    def load_state_dict(self, state, payload, ctx): ...
"""
JOB = {"run_id": "restart", "trainer": "tiny:Tiny", "max_steps": 12, "checkpoint_every": 2, "resume_from_latest": True}
AS_LIGHTNING = {"class_path": "lightning.fabric.plugins.environments.TorchElasticEnvironment"}


@dataclass(frozen=True)
class Kind:
    """A way to start two ranks again."""

    plugins: Sequence[dict[str, str]] = ()
    nodes: int = 1
    forks: bool = False
    """Whether ``genlight run --restarts`` forks the ranks; otherwise torchrun starts them."""

    def commands(self) -> list[list[str]]:
        """Return the command of each node."""
        run = [sys.executable, "-m", "genlight.adapter.cli", "run", "job.json"]
        run += ["--restarts", "9"] if self.forks else []
        if self.forks and self.nodes == 1:
            return [run]
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--nproc-per-node={2 // self.nodes}", *([] if self.forks else ["--max-restarts=9"])]
        meet = ["--standalone"]
        if self.nodes > 1:
            meet = [f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf"]
        agent = [sys.executable, "-m", "torch.distributed.run", *options, *meet]
        hosts = [f"is_host={node == 0}" for node in range(self.nodes)] if self.nodes > 1 else []
        return [[*agent, host, "--no-python", *run] for host in hosts] or [[*agent, "--no-python", *run]]


def measure(folder: Path, kind: Kind, patience_s: float) -> tuple[float, float, int] | None:
    """Return the seconds from the kill to the next step, the CPU seconds of a rank until then, and the restarts.

    Returns None if that took longer than `patience_s`, or torchrun gave up.
    """
    (folder / "tiny.py").write_text(TRAINER)
    lightning: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "plugins": kind.plugins}
    lightning |= {"devices": 2 // kind.nodes} if kind.forks else {}
    (folder / "job.json").write_text(json.dumps(JOB | {"mock_batches": list(range(24)), "lightning": lightning}))
    with (folder / "log").open("wb") as log:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [psutil.Popen(each, cwd=folder, env=environ, stdout=log, stderr=log) for each in kind.commands()]
    try:
        killed = wait_for(lambda: [mark for mark in marks_in(folder) if mark["what"] == "killed"], started[0], 600)
        assert killed, (folder / "log").read_text()
        again = wait_for(lambda: [m for m in marks_in(folder) if m["at"] > killed[0]["at"]], started[0], patience_s)
    finally:
        for first in started:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has completed
                for process in [*first.children(recursive=True), first]:
                    process.kill()
            first.wait()
    return (again[0]["at"] - killed[0]["at"], again[0]["cpu"], again[0]["start"]) if again else None


def wait_for(look: Callable[[], list[Mark]], process: psutil.Popen, seconds: float) -> list[Mark]:
    """Return the result of `look`, or None if the process has ended or the time is over."""
    end = time.monotonic() + seconds
    while not (found := look()) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    return found or look()


def marks_in(folder: Path) -> list[Mark]:
    path = folder / "marks.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only the kinds with this text in their name")
    parser.add_argument("--patience", type=float, default=120, help="seconds after which a run counts as not restarted")
    args = parser.parse_args()
    kinds = {
        "torchrun, the agent's store": Kind([AS_LIGHTNING]),
        "torchrun, a store of each start": Kind(),
        "--restarts": Kind(forks=True),
        "torchrun on two nodes, a store of each start": Kind(nodes=2),
        "torchrun on two nodes, --restarts": Kind(nodes=2, forks=True),
    }
    kinds = {name: kind for name, kind in kinds.items() if args.only in name}
    found: dict[str, list[tuple[float, float, int] | None]] = {name: [] for name in kinds}
    for _ in range(args.pairs):
        for (name, results), kind in zip(found.items(), kinds.values(), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(Path(folder), kind, args.patience))
            print(name, results[-1], flush=True)
    print("\n| started by | trained again | s from the kill to the next step | CPU s of a rank | restarts | load |")
    print("|---|---|---|---|---|---|")
    for name, results in found.items():
        whole = [result for result in results if result is not None]
        medians = [statistics.median(values) for values in zip(*whole, strict=True)] or [math.nan] * 3
        numbers = " | ".join(f"{median:.1f}" for median in medians)
        print(f"| {name} | {len(whole)} of {len(results)} | {numbers} | {os.getloadavg()[1]:.1f} |")


if __name__ == "__main__":
    main()
