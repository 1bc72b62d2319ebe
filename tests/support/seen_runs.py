"""A tiny trainer class with pictures and odd names of metrics, and its runs in separate processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

from support.forked import Forked

TRAINER = """
import os, time, zlib, struct
import torch

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

def picture(level):
    rows = (b"\\0" + bytes([level, 64, 255 - level]) * 16) * 16
    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\\x89PNG\\r\\n\\x1a\\n" + chunks

class State(dict):
    def generate_sample(self, output_dir, step):
        with open(os.path.join(output_dir, "picture.png"), "wb") as file:
            file.write(picture(step * 20 % 256))
        with open(os.path.join(output_dir, "fake.png"), "w") as file:
            file.write("<script>alert(1)</script>")

class Tiny:
    def setup(self, ctx):
        self.pause_s = ctx.job.hyperparams.get("pause_s", 0)
        self.fails_at = ctx.job.hyperparams.get("fails_at", -1)
        self.steps = 0
    def configure(self, ctx):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=ctx.job.hyperparams["lr"]))
    def prepare_batch(self, raw, state, ctx): return torch.tensor(raw)
    def train_step(self, batch, state, ctx):
        from genlight.adapter import StepResult
        time.sleep(self.pause_s)
        self.steps += 1
        if self.steps == self.fails_at:
            raise ValueError("no <b>luck</b>")
        loss = state["model"](batch).pow(2).mean()
        state["optimizer"].zero_grad(); loss.backward(); state["optimizer"].step()
        return StepResult(metrics={"loss": loss.item(), "<img src=x onerror=alert(1)>": 1.0, "bell\\x07": 2.0})
    def evaluate(self, state, ctx): return {"score": float(self.steps)}
    def state_dict(self, state): return {}
    def load_state_dict(self, state, payload, ctx): ...
"""


def write_job(folder, run_id, **job):
    """Write the trainer class and a job of it into `folder`; returns the name of the job's file."""
    if not (folder / "tiny.py").exists():  # a run that was started before may just read it
        (folder / "tiny.py").write_text(TRAINER)
    hyperparams = {"lr": 0.1, **job.pop("hyperparams", {})}
    batches = [[[1.0, 2.0]]] * (50_000 if "pause_s" in hyperparams else 40)  # its test ends a run that pauses
    job = {
        "run_id": run_id, "trainer": "tiny:Tiny", "max_steps": 40, "metric_every": 2, "checkpoint_every": 10,
        "sample_every": 20, "sample_prompts": ["a <b>cat</b>"], "mock_batches": batches,
        "hyperparams": hyperparams, "resume_from_latest": True,
        "lightning": {"accelerator": "cpu", "devices": 1}, **job,
    }  # fmt: skip
    (folder / f"{run_id}.json").write_text(json.dumps(job))
    return f"{run_id}.json"


def start(folder, run_id, **job):
    """Start a run of the trainer class below `folder`, in a process of the fork server."""
    words = ("run", write_job(folder, run_id, **job))
    return Forked("genlight.adapter.cli", *words, environ=os.environ, folder=folder, log=folder / f"{run_id}.log")


def wait_for_step(run, step):
    """Wait until the run in the folder `run` has logged `step`."""
    from genlight.adapter.view.summary import summary_of

    give_up_at = time.monotonic() + 240
    while summary_of(run).step < step:
        assert time.monotonic() < give_up_at, "the run makes no steps"
        time.sleep(0.05)


@contextlib.contextmanager
def served(folder, *words):
    """Start ``genlight serve`` for `folder` in a separate process; return the address that it prints."""
    with serving(folder, *words) as (_, address):
        yield address


@contextlib.contextmanager
def serving(folder, *words):
    """The process of ``genlight serve`` of `folder`, and the address that it writes."""
    code = "import sys; from genlight.adapter.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(folder), "--port", "0", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = process.stdout.readline().strip()
        assert address, process.stderr.read()
        yield process, address
    finally:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, ""), said
