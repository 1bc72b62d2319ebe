"""The real W&B, offline: its files have the configuration of a run, without secrets.

`make` installs the package into `.venv/guides`.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from support import SUPPORT
from support.forked import run_forked

PACKAGES = Path(sys.prefix) / "guides"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make` installs the packages of the guides into .venv/guides"),
]

TRAINER = """
import logging
from support.trainer_class import Counts


class Logs(Counts):
    def setup(self, ctx):
        logging.getLogger("mine").warning("logged in with %s", ctx.job.hyperparams["api_key"])
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
    "model": {"class_path": "support.plain_module.Plain", "init_args": HYPERPARAMS},
}


@pytest.mark.parametrize(("command", "spec"), [("run", JOB), ("fit", FIT)])
def test_its_files_have_the_configuration_without_secrets(tmp_path, command, spec):
    (tmp_path / "logs.py").write_text(TRAINER)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    offline = {"WANDB_SILENT": "true", "WANDB_MODE": "offline", "PYTHONWARNINGS": "ignore"}
    secrets = {"TRAINER_CAPABILITY_TOKEN": "c4nary-0f-th3-t0ken", "MY_API_KEY": "c4nary-0f-4-v4ri4ble"}
    path = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SUPPORT.parent), str(PACKAGES)])}
    words = (command, *(["--config"] if command == "fit" else []), "spec.json")
    done = run_forked(*words, folder=tmp_path, environ=mine | offline | secrets | path)
    assert done.returncode == 0, done.stderr

    files = {path.name: path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()}
    (stream,) = (content for name, content in files.items() if name.endswith(".wandb"))
    assert all(part in stream for part in (b"somebody", b"0.015625", b"<hidden>")), (
        "the configuration is there, in clear"
    )
    assert [name for name, content in files.items() if b"c4nary" in content] == []
