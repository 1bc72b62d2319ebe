"""The real W&B, offline: its files have the configuration of a run, without secrets.

`make` installs the package into `.venv/guides`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.forked import run_forked

PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.promise(name="security"),
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make` installs the packages of the guides into .venv/guides"),
]

TRAINER = """
import logging
from gen_worker.trainer import StepResult


class Logs:
    def setup(self, ctx):
        logging.getLogger("mine").warning("logged in with %s", ctx.job.hyperparams["api_key"])

    def configure(self, ctx):
        return {"step": 0}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        return StepResult(metrics={"loss": 1.0})

    def state_dict(self, state):
        return dict(state)

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)
"""
MODULE = """
import torch
from lightning.pytorch import LightningModule


class Plain(LightningModule):
    def __init__(self, api_key: str, data: str, login: dict, remark: str, lr: float):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 1))

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""
HYPERPARAMS = {
    "api_key": "c4nary-0f-th3-4pi-k3y",
    "data": "https://me:c4nary-0f-4-url@host/x?sig=c4nary-0f-4-sign4ture",
    "login": {"user": "somebody", "password": "c4nary-0f-th3-p4ssw0rd", "auth": {"hf_token": ["c4nary-n3st3d"]}},
    "remark": "ghp_c4nary56789abcdefghijABCDEFGHIJ456789",
    "lr": 0.015625,
}
TRAINER_ARGUMENTS = {
    "accelerator": "cpu",
    "logger": [
        {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": ".", "offline": True}}
    ],
}
JOB = {
    "run_id": "watched",
    "trainer": "logs:Logs",
    "max_steps": 2,
    "mock_batches": [1, 2],
    "hyperparams": HYPERPARAMS,
    "lightning": TRAINER_ARGUMENTS,
}
FIT = {
    "trainer": {**TRAINER_ARGUMENTS, "max_steps": 2, "enable_progress_bar": False},
    "model": {"class_path": "plain.Plain", "init_args": HYPERPARAMS},
}


@pytest.mark.parametrize(("command", "spec"), [("run", JOB), ("fit", FIT)])
def test_its_files_have_the_configuration_without_secrets(tmp_path, command, spec):
    (tmp_path / "logs.py").write_text(TRAINER)
    (tmp_path / "plain.py").write_text(MODULE)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    offline = {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "PYTHONWARNINGS": "ignore"}
    secrets = {"TRAINER_CAPABILITY_TOKEN": "c4nary-0f-th3-t0ken", "MY_API_KEY": "c4nary-0f-4-v4ri4ble"}
    path = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(PACKAGES)])}
    words = (command, *(["--config"] if command == "fit" else []), "spec.json")
    done = run_forked(*words, folder=tmp_path, environ=mine | offline | secrets | path)
    assert done.returncode == 0, done.stderr

    files = {path.name: path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()}
    (stream,) = (content for name, content in files.items() if name.endswith(".wandb"))
    assert all(part in stream for part in (b"somebody", b"0.015625", b"<hidden>")), (
        "the configuration is there, in clear"
    )
    assert [name for name, content in files.items() if b"c4nary" in content] == []
