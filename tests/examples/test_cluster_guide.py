"""The page about clusters does what it says; ``tests/slurm`` runs what needs one."""

import os
import sys
from pathlib import Path

import pytest

from genlight.adapter.runner.transport import read_result
from support.snippets import run_snippets

PAGE = Path(__file__).parents[2] / "examples/guides/cluster.md"

pytestmark = pytest.mark.slow


def test_its_commands_run_as_they_stand(tmp_path):
    environ = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    assert run_snippets(PAGE, tmp_path, environ=environ) == 7

    assert (tmp_path / "demo/runs/first/checkpoints/final.json").exists()
    assert read_result(tmp_path / "out/result.pickle")["text"] == "hello"
