"""Type checkers see ``gen_worker.trainer`` if the real package is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

import genlight.adapter
from genlight.adapter import compat
from genlight.adapter.compat import old_names

pytestmark = pytest.mark.promise(name="old names")

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
USED = """
from genlight.adapter import ArtifactWriter, StepContext, TrainerPlugin, TrainingReporter, current_job_context
from genlight.adapter import run_training_loop
from genlight.callbacks import TrainerHook, TrainerState
from genlight.reporters import read_events, validate_events


class Typed:
    def setup(self, ctx: StepContext) -> None: ...
    def configure(self, ctx: StepContext) -> list[int]:
        return []
    def prepare_batch(self, raw_batch: int, state: list[int], ctx: StepContext) -> int:
        return raw_batch
    def train_step(self, batch: int, state: list[int], ctx: StepContext) -> StepResult:
        return StepResult(metrics={"loss": batch})
    def state_dict(self, state: list[int]) -> dict[str, object]:
        return {}
    def load_state_dict(self, state: list[int], payload: dict[str, object], ctx: StepContext) -> None: ...


class Prints:
    cancel_reason = "canceled"
    def started(self, *, run_id: str) -> None: ...
    def metric(self, *, name: str, value: float, step: int) -> None: ...
    def checkpoint(self, *, path: str, step: int) -> None: ...
    def sample(self, *, path: str, step: int) -> None: ...
    def completed(self, *, step: int, final_checkpoint: str | None) -> None: ...
    def failed(self, *, step: int, error: str) -> None: ...
    def is_canceled(self) -> bool:
        return False


class Writes:
    def write_checkpoint(
        self, *, step: int, state_payload: dict[str, object], trainer: object, state: object, ctx: StepContext
    ) -> str:
        return ""
    def write_samples(self, *, step: int, state: object, ctx: StepContext) -> list[str]:
        return []
    def finalize(
        self, *, state_payload: dict[str, object], trainer: object, state: object, ctx: StepContext
    ) -> str | None:
        return None


class Scores(TrainerHook):
    writes = ("eval_scores",)
    def on_epoch_end(self, trainer_state: TrainerState) -> None:
        trainer_state.eval_scores = {"a": 1.0}


plugin: TrainerPlugin = Typed()
reporter: TrainingReporter = Prints()
writer: ArtifactWriter = Writes()
steps: int = sum(event["step"] for event in read_events("events.jsonl"))
rules: list[str] = [violation.rule for violation in validate_events("events.jsonl")]
place = current_job_context()
print(place.rank if place is not None else 0)
"""
CONFIG = """
[mypy]
strict = true
[mypy-torch.*,lightning.*,pyarrow.*,fsspec.*,huggingface_hub.*,numpy.*,httpx2.*,jsonargparse.*]
follow_imports = skip
"""


@pytest.fixture
def mypy(tmp_path):
    """Check a file in a separate folder; return the output of mypy."""

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

    said = mypy(f"{PORTED}{USED}\nfrom gen_worker.trainer.api import {', '.join(names)}\n")

    assert said.splitlines() == [
        'checked.py:14: error: "TrainingJobSpec" has no attribute "max_step"; maybe "max_steps"?  [attr-defined]',
        "Found 1 error in 1 file (checked 1 source file)",
    ]
