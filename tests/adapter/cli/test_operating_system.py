"""Elsewhere than on Linux the commands that train say so, and names, checkpoints and event logs can still be read."""

from __future__ import annotations

import platform
import subprocess
import sys

from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter.cli.command_line import ANYWHERE, COMMANDS
from genlight.callbacks import Checkpoint
from genlight.reporters import EventLog
from support.trainers import quiet_trainer

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


def test_a_command_that_needs_linux_refuses_in_one_line(monkeypatch, capsys):
    from genlight.adapter.cli.command_line import main

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    for command in {*COMMANDS} - set(ANYWHERE):
        assert main([command, "x"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: genlight {command} needs Linux and this system is Darwin")
        assert error.count("\n") == 1


def test_a_module_that_needs_linux_refuses_its_import_and_the_vocabulary_does_not(tmp_path):
    """The first failure was an import of fcntl deep inside, a message that does not help a caller."""
    script = """
from genlight.adapter import StepContext, StepResult, TrainingJobSpec, GenlightError
import importlib
for package, name in [("adapter", "run_job"), ("reporters.uploads", "Uploader")]:
    try:
        getattr(importlib.import_module(f"genlight.{package}"), name)
    except ImportError as error:
        assert "genlight.adapter." in str(error), error
        assert "needs Linux and this system is Darwin" in str(error), error
    else:
        raise AssertionError(name)
"""
    done = elsewhere(script, tmp_path)

    assert done.returncode == 0, done.stderr


def test_checkpoints_and_event_logs_can_be_read_elsewhere(tmp_path):
    quiet_trainer(Checkpoint(tmp_path / "checkpoints", every_n_steps=2), max_steps=2).fit(BoringModel())
    with EventLog(tmp_path / "events.jsonl", run_id="elsewhere") as log:
        log.started()

    for words in (["checkpoints", "list", "checkpoints"], ["events", "events.jsonl"]):
        done = elsewhere(f"sys.exit(command_line.main({words}))", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "step-00000002" in done.stdout or "started" in done.stdout
