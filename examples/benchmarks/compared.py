"""The next start of a killed or stopped training, by framework, with the same small model and data.

    python examples/benchmarks/compared.py

Each program below trains two epochs of a shuffled `DataLoader` with dropout, and saves every five steps and resumes as
its framework does it. It is killed (SIGKILL) and stopped (SIGTERM) after the seventh step of the second epoch, and
killed again with the largest file of its newest checkpoint cut in half, as after a power cut. Its final weights are
compared with the weights of an uninterrupted training. Frameworks that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

KILL_AT = 27
BEGIN = """
import hashlib, os, signal, sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

folder, steps = sys.argv[1], 0

def after(*_):
    global steps
    steps += 1
    open(f"{folder}.steps", "a").write("x")
    if steps == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), int(os.environ["KILLED_BY"]))

def ended(model):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    open(f"{folder}.end", "w").write(hashlib.sha256(weights).hexdigest())

register_optimizer_step_post_hook(after)
torch.manual_seed(7)
x = torch.randn(80, 4)
rows = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(rows, batch_size=4, shuffle=True)
body = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
"""
LIGHTNING_MODULE = """
import lightning.pytorch as pl

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = body
    def training_step(self, batch, batch_idx):
        return (self.body(batch[0]) - batch[1]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
"""
PROGRAMS = {
    "genlight": (
        "lightning",
        LIGHTNING_MODULE
        + """
from genlight.callbacks import Checkpoint, StopRequests
from genlight.callbacks.checkpoint import newest_valid

newest, _ = newest_valid(folder)
trainer = pl.Trainer(max_epochs=2, callbacks=[Checkpoint(folder, every_n_steps=5), StopRequests()], **quiet)
trainer.fit(Net(), loader, ckpt_path=None if newest is None else str(newest.path))
ended(body)
""",
    ),
    "Lightning": (
        "lightning",
        LIGHTNING_MODULE
        + """
from lightning.pytorch.callbacks import ModelCheckpoint

keeper = ModelCheckpoint(folder, every_n_train_steps=5, save_last=True, save_top_k=-1)
trainer = pl.Trainer(max_epochs=2, callbacks=[keeper], **quiet)
trainer.fit(Net(), loader, ckpt_path="last")
ended(body)
""",
    ),
    "Composer": (
        "mosaicml",
        """
from composer import Trainer
from composer.models import ComposerModel

class Net(ComposerModel):
    def __init__(self):
        super().__init__()
        self.body = body
    def forward(self, batch):
        return self.body(batch[0])
    def loss(self, outputs, batch):
        return (outputs - batch[1]).pow(2).mean()

net = Net()
Trainer(
    model=net, train_dataloader=loader, optimizers=torch.optim.AdamW(net.parameters(), lr=0.01), max_duration="2ep",
    save_folder=folder, save_interval="5ba", autoresume=True, run_name="run", seed=7, device="cpu", progress_bar=False,
).fit()
ended(body)
""",
    ),
    "Hugging Face Trainer": (
        "transformers",
        """
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = body
    def forward(self, x, y):
        out = self.body(x)
        return {"loss": (out - y).pow(2).mean(), "out": out}

arguments = TrainingArguments(
    folder, num_train_epochs=2, per_device_train_batch_size=4, save_steps=5, seed=7, use_cpu=True, report_to=[],
    disable_tqdm=True, learning_rate=0.01,
)
data = [{"x": a, "y": b} for a, b in rows]
newest = get_last_checkpoint(folder) if os.path.isdir(folder) else None
Trainer(Net(), arguments, train_dataset=data).train(resume_from_checkpoint=newest)
ended(body)
""",
    ),
}


def main() -> None:
    """Try every framework that is installed and print a line for each trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a name of a framework; may be given again")
    parser.add_argument("--first", default="", help="a line of Python that each program runs first")
    args = parser.parse_args()
    for name, (package, program) in PROGRAMS.items():
        if args.only and name not in args.only:
            continue
        try:
            print(f"{name} ({package} {version(package)})", flush=True)
        except PackageNotFoundError:
            print(f"{name}: {package} is not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            for line in tried(f"{args.first}\n{BEGIN}{program}", Path(folder)):
                print(f"  {line}", flush=True)


def tried(program: str, folder: Path) -> list[str]:
    """Return the outcome of the program after each kind of end."""
    run(program, folder / "whole")
    expected = (folder / "whole.end").read_text()
    lines = []
    for name, killed_by, is_cut in (
        ("SIGKILL", signal.SIGKILL, False),
        ("SIGTERM", signal.SIGTERM, False),
        ("SIGKILL and a torn checkpoint", signal.SIGKILL, True),
    ):
        ours = folder / name.replace(" ", "-")
        code, _ = run(program, ours, killed_by)
        if is_cut:
            cut(ours)
        before = len((ours.parent / f"{ours.name}.steps").read_text())
        again, error = run(program, ours)
        if again:
            lines.append(f"{name}: ended with {code}; the next start ends with {again}: {error}")
            continue
        more = len((ours.parent / f"{ours.name}.steps").read_text())
        same = "the same weights" if (ours.parent / f"{ours.name}.end").read_text() == expected else "other weights"
        lines.append(f"{name}: ended with {code}; the next start goes on after step {40 - (more - before)}, {same}")
    return lines


def run(program: str, folder: Path, killed_by: signal.Signals | None = None) -> tuple[int, str]:
    """Run a program once; return its exit code and the last line on standard error."""
    killed = {} if killed_by is None else {"KILL_AT": str(KILL_AT), "KILLED_BY": str(int(killed_by))}
    environ = {**os.environ, **killed, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(folder)],
        cwd=folder.parent, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, lines[-1][:200] if lines else ""


def cut(folder: Path) -> None:
    """Cut the largest file of the newest checkpoint in half; symbolic links to it stay."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    newest = max(path.stat().st_mtime for path in files)
    recent = [path for path in files if path.stat().st_mtime > newest - 0.5 and path.stat().st_size > 1000]
    for path in (max(recent, key=lambda each: (each.stat().st_mtime, each.stat().st_size)),):
        shutil.copy(path, f"{path}.tmp")  # a new file, since an older checkpoint may share the old one
        os.replace(f"{path}.tmp", path)
        os.truncate(path, path.stat().st_size // 2)


if __name__ == "__main__":
    main()
