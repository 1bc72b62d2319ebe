"""How long torchrun takes from the death of a rank until the run trains again, and how many restarts that costs.

    python examples/benchmarks/restart_time.py --pairs 5

Each pair is one run that meets in the store of torchrun's agent, as Lightning does it, and one that meets in a store of
its own, as genlight does it; they take turns, since other work on the machine slows both. CPU time tells more than the
clock on a busy machine: it is that of one rank from its start to its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINER = """
import json, os, signal, time
import torch
from genlight.adapter import StepResult


def note(what):
    line = {"what": what, "at": time.time(), "cpu": time.process_time(), "rank": os.environ["RANK"]}
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


def measure(folder: Path, plugins: list[dict[str, str]]) -> tuple[float, float, int]:
    """Seconds from the kill to the first step after it, CPU seconds of a rank until there, and restarts."""
    (folder / "tiny.py").write_text(TRAINER)
    lightning = {"accelerator": "cpu", "strategy": "ddp", "plugins": plugins}
    (folder / "job.json").write_text(json.dumps(JOB | {"mock_batches": list(range(24)), "lightning": lightning}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]
    command += ["--no-python", sys.executable, "-m", "genlight.adapter.cli", "run", "job.json"]
    with (folder / "log").open("wb") as log:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environ, stdout=log, stderr=log, check=True)
    marks = [json.loads(line) for line in (folder / "marks.jsonl").read_text().splitlines()]
    (killed,) = [mark["at"] for mark in marks if mark["what"] == "killed"]
    again = min((mark for mark in marks if mark["at"] > killed), key=lambda mark: mark["at"])
    return again["at"] - killed, again["cpu"], again["start"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, int]]] = {"the agent's store": [], "a store of its own": []}
    for _ in range(args.pairs):
        for (name, results), plugins in zip(found.items(), ([AS_LIGHTNING], []), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(Path(folder), plugins))
            print(name, results[-1], flush=True)
    print("\n| the ranks meet in | s from the kill to the next step | CPU s of a rank | restarts | load |")
    print("|---|---|---|---|---|")
    for name, results in found.items():
        seconds, cpu, restarts = (statistics.median(values) for values in zip(*results, strict=True))
        print(f"| {name} | {seconds:.1f} | {cpu:.1f} | {restarts:g} | {os.getloadavg()[1]:.1f} |")


if __name__ == "__main__":
    main()
