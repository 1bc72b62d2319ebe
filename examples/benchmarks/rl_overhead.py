"""The cost of the reinforcement learning examples compared with plain loops, and the time until PPO has learned.

    OMP_NUM_THREADS=1 python examples/benchmarks/rl_overhead.py
    OMP_NUM_THREADS=1 python examples/benchmarks/rl_overhead.py --to-solution

The job of `examples/rl`, with its events every 100 steps and its checkpoints, takes turns with `plain_ppo.py` or
`plain_dqn.py` in one process: a phase (rollout and update) of one, then one of the other. Both draw the same random
numbers, and their weights are compared after each phase. The CPU time of the job counts all threads of the process
during its turns; the CPU time of the plain loop counts its own thread. The job has no evaluations, because the plain
loops have none, and the first phases do not count, because torch warms up.

`--to-solution` runs the job of PPO unchanged for several seeds, each in a separate process, from the start of the
process to its end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

RL = Path(__file__).parents[1] / "rl"
WARM_UP = 3
"""Phases that do not count."""
MINIBATCHES = {"ppo": 20, "dqn": 128}
"""Steps of a phase."""


class Turns(pl.Callback):
    """Runs a phase of the plain loop after each phase of the job, and records the times of both.

    Args:
        algorithm: ``ppo`` or ``dqn``.
        seed: Seed of the plain loop and of the job.
        max_steps: Limit of the plain loop and of the job.
        result: The JSON file that is written at the end.
    """

    def __init__(self, algorithm: str, seed: int, max_steps: int, result: str) -> None:
        self.result = Path(result)
        self.phases = importlib.import_module(f"plain_{algorithm}").phases(seed, max_steps)
        self.draws: torch.Tensor | None = None
        self.walls: list[tuple[float, float]] = []
        self.cpus: list[tuple[float, float]] = []
        self.began_cpu_s, self.began_s, self.same_bits = 0.0, 0.0, True

    def on_rollout_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.walls:
            self.began_cpu_s, self.began_s = time.process_time(), time.perf_counter()

    def on_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        hosted_cpu_s, hosted_s = time.process_time() - self.began_cpu_s, time.perf_counter() - self.began_s
        draws = torch.get_rng_state()
        if self.draws is not None:
            torch.set_rng_state(self.draws)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        weights, _ = next(self.phases)
        plain_s, plain_cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        self.draws = torch.get_rng_state()
        torch.set_rng_state(draws)
        hosted = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        self.same_bits &= all(a.equal(b) for a, b in zip(weights, hosted, strict=True))
        self.walls.append((hosted_s, plain_s))
        self.cpus.append((hosted_cpu_s, plain_cpu_s))
        self.began_cpu_s, self.began_s = time.process_time(), time.perf_counter()

    def on_training_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found: dict[str, Any] = {"phases": len(self.walls) - WARM_UP, "same_bits": self.same_bits}
        for name, turns in (("cpu", self.cpus[WARM_UP:]), ("wall", self.walls[WARM_UP:])):
            hosted_s, plain_s = map(sum, zip(*turns, strict=True))
            found |= {f"{name}_s": [hosted_s, plain_s], f"{name}_ratio": hosted_s / plain_s}
            found[f"{name}_median"] = statistics.median(hosted / plain for hosted, plain in turns)
        self.result.write_text(json.dumps(found))


def environment() -> dict[str, str]:
    """Return the environment of a job that can import the examples and this file."""
    folders = [str(RL), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


def run_job(job: dict[str, Any], folder: Path) -> None:
    """Run a job in a separate process.

    Raises:
        CalledProcessError: It failed.
    """
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "genlight.adapter.cli", "run", "job.json"]
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)


def take_turns(algorithm: str, phases: int) -> dict[str, Any]:
    """Return the figures of `phases` phases of the job and of the plain loop."""
    job = json.loads((RL / f"{algorithm}.json").read_text())
    steps = (phases + WARM_UP) * MINIBATCHES[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "found.json")
        arguments = {"algorithm": algorithm, "seed": 0, "max_steps": steps, "result": str(result)}
        callbacks = [{"class_path": "rl_overhead.Turns", "init_args": arguments}]
        job |= {"max_steps": steps, "validate": None, "lightning": {"accelerator": "cpu", "callbacks": callbacks}}
        run_job(job, Path(folder))
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def to_solution(seed: int) -> dict[str, float]:
    """Return the time of the PPO job for `seed`, and when it first had a mean return of 475 in 100 episodes."""
    from genlight.reporters import read_events

    job = json.loads((RL / "ppo.json").read_text()) | {"hyperparams": {"seed": seed}}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_job(job, Path(folder))
        wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        events = list(read_events(Path(folder, "runs", "ppo", "metrics", "events.jsonl")))
    started_ms = next(event["timestamp_ms"] for event in events if event["event"] == "started")
    scores = [event for event in events if event.get("name") == "eval/return"]
    solved = next((event for event in scores if event["value"] >= 475), None)
    return {
        "seed": seed,
        "eval/return": scores[-1]["value"],
        "solved_at_step": float("nan") if solved is None else solved["step"],
        "solved_after_s": float("nan") if solved is None else (solved["timestamp_ms"] - started_ms) / 1000,
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Print and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ppo", "dqn"], nargs="+", default=["ppo", "dqn"])
    parser.add_argument("--phases", type=int, default=60)
    parser.add_argument("--to-solution", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args(arguments)
    found = []
    if chosen.to_solution:
        for seed in chosen.seeds:
            found.append(to_solution(seed))
            print(", ".join(f"{name} {value:g}" for name, value in found[-1].items()))
        return found
    for algorithm in chosen.algorithm:
        found.append({"algorithm": algorithm, **take_turns(algorithm, chosen.phases)})
        figures = found[-1]
        print(
            f"{algorithm}: {figures['cpu_ratio']:.3f} times the CPU time of the plain loop (median of the phases "
            f"{figures['cpu_median']:.3f}), {figures['wall_ratio']:.3f} times its time "
            f"({figures['wall_median']:.3f}), over {figures['phases']} phases; "
            f"the weights {'are the same' if figures['same_bits'] else 'DIFFER'}"
        )
    return found


if __name__ == "__main__":
    main()
