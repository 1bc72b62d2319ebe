"""Type checkers see ``gen_worker.trainer`` where the real package is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import genlight.adapter
from genlight.adapter import compat
from genlight.adapter.module import old_names

STUBS = Path(genlight.adapter.__file__).parent / "stubs" / "gen_worker-stubs" / "trainer"
PORTED = """
from gen_worker.trainer import StepContext, StepResult
from gen_worker.trainer.contracts import StepControlHints
from gen_worker.trainer.helpers.optim import build_default_adamw_bundle


class Ported:
    def setup(self, ctx: StepContext) -> None:
        self.steps: int = ctx.job.max_steps

    def train_step(self, batch: object, state: object, ctx: StepContext) -> StepResult:
        if build_default_adamw_bundle(None) is None:
            return StepResult(metrics={}, control=StepControlHints(skip_cadence_emit=True))
        return StepResult(metrics={"loss": ctx.job.max_step})
"""
CONFIG = """
[mypy]
strict = true
[mypy-torch.*,lightning.*,pyarrow.*,fsspec.*,huggingface_hub.*,numpy.*,httpx2.*,jsonargparse.*]
follow_imports = skip
"""


@pytest.fixture
def mypy(tmp_path):
    """Check a file in a folder of its own; gives what mypy says."""

    def check(source: str) -> str:
        (tmp_path / "mypy.ini").write_text(CONFIG)
        (tmp_path / "checked.py").write_text(source)
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "checked.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    return check


def test_there_is_a_stub_of_every_module():
    found = {path.relative_to(STUBS).with_suffix("").as_posix().replace("/", ".") for path in STUBS.rglob("*.pyi")}

    assert found - {"__init__"} == {
        f"{name}.__init__" if any(other.startswith(f"{name}.") for other in compat.MODULES) else name
        for name in compat.MODULES
    }


@pytest.mark.slow
def test_mypy_checks_a_ported_class_against_the_types_of_the_contract_and_knows_every_name(mypy):
    names = sorted({*genlight.adapter.__all__, *old_names.__all__})

    said = mypy(f"{PORTED}\nfrom gen_worker.trainer.api import {', '.join(names)}\n")

    assert said.splitlines() == [
        'checked.py:14: error: "TrainingJobSpec" has no attribute "max_step"; maybe "max_steps"?  [attr-defined]',
        "Found 1 error in 1 file (checked 1 source file)",
    ]
