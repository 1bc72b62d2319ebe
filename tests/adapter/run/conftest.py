"""Another process that is a rank, and the configuration of a job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from genlight.adapter.job.config import resolve_run_config
from support.jobs import write_job

RANK = """
import sys
from pathlib import Path
from genlight.adapter.run.rank_files import RankFiles
with RankFiles(Path(sys.argv[1])).present(3):
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def rank(tmp_path):
    """Another process as rank 3 on the node n10; it leaves when its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SLURMD_NODENAME": "n10"},
        text=True,
    )
    assert process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def config_of(tmp_path):
    """Resolves a job whose artifacts go to ``out``."""

    def resolve(*overrides):
        overrides = [f"artifacts_dir={tmp_path / 'out'}", *overrides]
        return resolve_run_config(spec_path=write_job(tmp_path), overrides=overrides, environ={})

    return resolve
