"""Elsewhere than on Linux the commands that train say so, and names, checkpoints and event logs can still be read."""

from __future__ import annotations

import platform
import subprocess
import sys

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter.cli.command_line import ANYWHERE, COMMANDS
from genlight.callbacks import Checkpoint
from genlight.reporters import EventLog

ELSEWHERE = """
import os, platform, signal, sys
sys.modules["fcntl"] = None  # as on Windows: to import it raises
for module, name in ((os, "fdatasync"), (os, "O_DIRECTORY"), (signal, "SIGUSR1"), (signal, "SIGKILL")):
    delattr(module, name)
import genlight.adapter.cli.command_line as command_line
platform.system = lambda: "Darwin"
"""


def elsewhere(script, folder):
    """Run `script` in a process without what only Linux has."""
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE + script], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("command", sorted({*COMMANDS} - set(ANYWHERE)))
def test_a_command_that_needs_linux_refuses_in_one_line(command, monkeypatch, capsys):
    from genlight.adapter.cli.command_line import main

    monkeypatch.setattr(platform, "system", lambda: "Darwin")

    assert main([command, "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: genlight {command} needs Linux and this system is Darwin")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "name"),
    [("adapter", "run_job"), ("adapter", "run_training_runtime_from_env"), ("reporters.uploads", "Uploader")],
)
def test_a_module_that_needs_linux_refuses_its_import(package, name, tmp_path):
    """The first failure was an import of fcntl deep inside, a message that does not help a caller."""
    done = elsewhere(f"from genlight.{package} import {name}", tmp_path)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: genlight.adapter.")
    assert "needs Linux and this system is Darwin" in done.stderr


def test_the_vocabulary_can_be_imported_elsewhere(tmp_path):
    done = elsewhere("from genlight.adapter import StepContext, StepResult, TrainingJobSpec, GenlightError", tmp_path)

    assert done.returncode == 0, done.stderr


def test_checkpoints_and_event_logs_can_be_read_elsewhere(tmp_path):
    trainer = pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Checkpoint(tmp_path / "checkpoints", every_n_steps=2)],
    )
    trainer.fit(BoringModel())
    with EventLog(tmp_path / "events.jsonl", run_id="elsewhere") as log:
        log.started()

    for words in (["checkpoints", "list", "checkpoints"], ["events", "events.jsonl"]):
        done = elsewhere(f"sys.exit(command_line.main({words}))", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "step-00000002" in done.stdout or "started" in done.stdout
