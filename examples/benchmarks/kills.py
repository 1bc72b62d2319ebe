"""Kills at random and at chosen moments: genlight next to torchrun with Lightning's own checkpoints.

    python examples/benchmarks/kills.py --kills 60 --others 20

The same small model trains 100 steps of some 10 ms on one process and on two gloo ranks: as a job of ``genlight run
--restarts``, with a checkpoint on disk every 20 steps and one in memory after each step, and in a plain Lightning
`Trainer` under ``torchrun --max-restarts``, with a `ModelCheckpoint` every 20 steps and ``ckpt_path="last"``. In each
run several ranks kill themselves with SIGKILL, each once:

- `any`: at a random moment of a step
- `exchange`: in the backward pass, while gradients are exchanged
- `update`: before the first write of an update; `updated`: right after the last
- `copy`: at the beginning of the next forward pass, while a checkpoint is copied
- `write`: when the next file of a checkpoint is opened; `commit`: before the next file gets its name

*Lost* is how many completed steps are trained again, *recover* how many seconds pass from a kill to the next step: both
median, 95th percentile and maximum. A run is *equal* if its last weights have the bits of a run without a kill, and
*hung* if it trained no step for a minute.

``--nodes 3`` trains on three ranks that stand for three nodes: each has its own folder of ``/dev/shm`` as its memory,
which is emptied when its process is killed, and sends its checkpoints in memory to the next one (``peer_copies``). The
others end by themselves; then this program, in place of a scheduler, starts all of them again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

STEPS, CADENCE, KILLS_OF_A_RUN = 100, 20, 10
PATIENCE_S = 60
"""A run that trains no step for so long hangs, and is ended."""
POINTS = ("any", "exchange", "update", "updated", "copy", "write", "commit")

TRAINING = """
import hashlib, json, os, signal, sys, threading, time
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from genlight.adapter import StepResult

RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
KILLS = [tuple(kill) for kill in json.loads(Path("kills.json").read_text())]
current = 0


def die(number):
    try:
        with open(f"dead-{number}", "x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def reach(*points):
    for number, (rank, step, point, delay) in enumerate(KILLS):
        if rank != RANK or point not in points or os.path.exists(f"dead-{number}"):
            continue
        if step == current or (step < current and point in ("write", "commit")):
            if point == "any":
                threading.Timer(delay, die, [number]).start()
            else:
                die(number)


def watch_files(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        if any(part in str(arguments[0]) for part in ("checkpoints", "genlight-")):
            reach("write")
    elif event in ("os.rename", "os.link"):
        reach("commit")


sys.addaudithook(watch_files)


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))
    model[0].weight.register_hook(lambda grad: reach("exchange"))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: reach("update"))
    optimizer.register_step_post_hook(lambda *_: reach("updated"))
    return model, optimizer


def forward(model, number, step):
    global current
    if RANK == 0 and current:
        with open("marks", "a") as file:
            file.write(f"{current} {time.time()}\\n")
    current = step
    reach("any", "copy")
    time.sleep(0.01)
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(int(number)))
    return (model(rows) - rows).square().mean()


def finish(model):
    if RANK == 0:
        state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        Path("final").write_text(hashlib.sha256(state).hexdigest())


class Job:
    def setup(self, ctx):
        self.ctx = ctx

    def configure(self, ctx):
        model, optimizer = build()
        return {"model": model, "optimizer": optimizer, "step": 0}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        state["step"] += 1
        loss = forward(state["model"], batch, state["step"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        if state["step"] == STEPS:
            finish(state["model"])
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state):
        return {"step": state["step"]}

    def load_state_dict(self, state, payload, ctx):
        state["step"] = payload["step"]


class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer = build()

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, batch, batch_idx):
        return forward(self.model, batch, self.global_step + 1)

    def on_train_end(self):
        finish(self.model)


if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    numbers = [number for number in range(STEPS * ranks) if number % ranks == RANK]
    saves = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=CADENCE, save_last=True)
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", callbacks=[saves],
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(Plain(), numbers, ckpt_path="last")
"""


def plan(chance: random.Random, ranks: int, kills: int) -> list[tuple[int, int, str, float]]:
    """Return the kills of a run: rank, step, point, and the delay within the step in seconds."""
    steps = sorted(chance.sample(range(3, STEPS - 2), kills))
    return [(chance.randrange(ranks), step, chance.choice(POINTS), chance.uniform(0, 0.012)) for step in steps]


def run_on_nodes(count: int) -> int:
    """Run the job of this folder as one process on each of `count` nodes until it has completed; return its exit code.

    Whenever a process is killed, its node loses its memory, and all start again once the others have ended.
    """
    import lightning.pytorch  # noqa: F401

    import genlight.adapter.run.fit  # noqa: F401

    fork, memories = multiprocessing.get_context("fork"), tempfile.mkdtemp(prefix="kills-", dir="/dev/shm")
    try:
        for attempt in itertools.count():
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            roots = [Path(memories, str(node)) for node in range(count)]
            for root in roots:
                root.mkdir(exist_ok=True)
            nodes = [fork.Process(target=run_node, args=(root, count, attempt, port)) for root in roots]
            for node in nodes:
                node.start()
            for node, root in zip(nodes, roots, strict=True):
                node.join()
                if node.exitcode == -signal.SIGKILL:
                    shutil.rmtree(root)
            codes = [node.exitcode or 0 for node in nodes]
            if -signal.SIGKILL not in codes:
                left = [path for root in roots for path in root.iterdir()]
                return max(codes, key=abs) or len(left)
    finally:
        shutil.rmtree(memories)
    return 0


def run_node(memory: Path, count: int, attempt: int, port: int) -> None:
    """Be the process of the node with this `memory`; `attempt` counts the earlier ones."""
    import genlight.adapter.cli
    from genlight.callbacks.checkpoint import memory_tier

    memory_tier.ROOT = memory
    environ = {"RANK": memory.name, "GROUP_RANK": memory.name, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environ |= {"WORLD_SIZE": count, "GROUP_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ |= {"TORCHELASTIC_RUN_ID": attempt}
    os.environ.update({name: str(value) for name, value in environ.items()})
    sys.argv[1:] = ["run", "job.json", *(["--set", "resume_from_latest=true"] if attempt else [])]
    sys.exit(genlight.adapter.cli.main())


def train(folder: Path, ranks: int, kills: list[Any], *, is_ours: bool, nodes: int = 1) -> dict[str, Any]:
    """Train in `folder` until the end, and return steps lost, seconds to recover, and a digest of the weights.

    The digest is None if the run hung.
    """
    folder.mkdir()
    text = TRAINING.replace("STEPS", str(STEPS)).replace("CADENCE", str(CADENCE))
    (folder / "training.py").write_text(text)
    (folder / "kills.json").write_text(json.dumps(kills))
    lightning: dict[str, Any] = {"accelerator": "cpu", "devices": ranks // nodes, "num_nodes": nodes}
    if ranks > 1:
        lightning["strategy"] = "ddp"
    job = {"run_id": f"kills-{os.getpid()}", "trainer": "training:Job", "max_steps": STEPS, "metric_every": 1}
    job |= {"mock_batches": list(range(STEPS * ranks)), "lightning": lightning, "checkpoint_every": CADENCE}
    job["checkpoints"] = {"memory_every_n_steps": 1, "copy_while_training": True, "peer_copies": nodes > 1}
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "genlight.adapter.cli", "run", "job.json", "--restarts", "1000"]
    if nodes > 1:
        command = [sys.executable, os.path.abspath(__file__), "--run-on-nodes", str(nodes)]
    if not is_ours:
        options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000", "--monitor-interval=0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "training.py"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    progress, is_hung = folder / "marks", False
    while (code := process.poll()) is None:
        time.sleep(0.2)
        started = progress.stat().st_mtime if progress.exists() else (folder / "job.json").stat().st_mtime
        if is_hung := time.time() - started > PATIENCE_S:
            for rank in psutil.Process(process.pid).children(recursive=True):
                rank.kill()
            process.kill()
            code = process.wait()
            break
    if code and not is_hung:
        raise SystemExit(f"{' '.join(command)} ended with {code}: {(folder / 'log').read_text()[-3000:]}")
    marks = [(int(step), float(at)) for step, at in map(str.split, (folder / "marks").read_text().splitlines())]
    lost, seconds, points = [], [], []
    for path in folder.glob("dead-*"):
        died = float(path.read_text())
        before = [step for step, at in marks if at <= died]
        after = [(at, step) for step, at in marks if at > died and step <= max(before, default=0) + 1]
        if after:  # otherwise nothing was left to train
            at, step = min(after)
            lost.append(max(before, default=0) - (step - 1))
            seconds.append(at - died)
            points.append(kills[int(path.name.removeprefix("dead-"))][2])
    final = None if is_hung else (folder / "final").read_text()
    return {"lost": lost, "seconds": seconds, "points": points, "final": final}


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    chosen = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 1)]
    return "{:.3g} ({:.3g}; {:.3g})".format(*chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="kills of genlight with each number of ranks")
    parser.add_argument("--others", type=int, default=20, help="kills of Lightning under torchrun")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0, help="chooses other moments")
    parser.add_argument("--nodes", type=int, default=1, help="of one rank each, in place of --ranks and --others")
    parser.add_argument("--run-on-nodes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_on_nodes:
        sys.exit(run_on_nodes(arguments.run_on_nodes))
    nodes = arguments.nodes
    if nodes > 1:
        arguments.ranks, arguments.others = [nodes], 0
    root = Path(tempfile.mkdtemp())
    try:
        for ranks in arguments.ranks:
            for is_ours, most in ((True, arguments.kills), (False, arguments.others)):
                expected = train(root / "whole", ranks, [], is_ours=is_ours, nodes=nodes)["final"] if most else ""
                shutil.rmtree(root / "whole", ignore_errors=True)
                lost, seconds, points, equal, runs, hung = [], [], dict.fromkeys(POINTS, 0), 0, 0, 0
                while len(lost) < most and hung < 4:
                    kills = plan(random.Random(1_000_000 * arguments.seed + 1000 * ranks + runs), ranks, KILLS_OF_A_RUN)
                    run = train(root / "run", ranks, kills, is_ours=is_ours, nodes=nodes)
                    shutil.rmtree(root / "run")
                    lost, seconds, runs = lost + run["lost"], seconds + run["seconds"], runs + 1
                    equal, hung = equal + (run["final"] == expected), hung + (run["final"] is None)
                    for point in run["points"]:
                        points[point] += 1
                    name = "genlight" if is_ours else "Lightning under torchrun"
                    counts = f"{len(lost)} kills, {runs} runs, {equal} equal, {hung} hung"
                    figures = f"lost {spread(lost)} steps; recover {spread(seconds)} s"
                    print(f"{name}, {ranks} ranks: {counts}; {figures}; {points}", flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
