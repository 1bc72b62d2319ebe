"""A job folder with a trainer class of the older runtime in it, run in this process."""

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genlight.adapter import RunOptions, read_events, run_job

NUMBERS = count()

TRAINER = '''
import json
from pathlib import Path
from types import SimpleNamespace

from gen_worker.trainer.contracts import StepContext, StepControlHints, StepResult, TrainingJobSpec

NOTES = []


def note(hook, **facts):
    NOTES.append((hook, facts))


class Trainer:
    """Counts; what it does beyond that is said by the hyperparameters."""

    def setup(self, ctx: StepContext) -> None:
        self.asked = dict(ctx.job.hyperparams)
        self.act("setup", ctx=ctx)

    def act(self, hook, **facts):
        note(hook, **facts)
        if hook in self.asked.get("fails_in", ()):
            raise RuntimeError(f"{hook} broke")
        return self.asked.get("returns", {}).get(hook, ...)

    def configure(self, ctx):
        self.act("configure", ctx=ctx)
        return {"steps": 0, "lr": 0.5}

    def prepare_batch(self, raw_batch, state, ctx):
        self.act("prepare_batch", raw_batch=raw_batch, state=state, ctx=ctx)
        return ("prepared", raw_batch)

    def train_step(self, batch, state, ctx):
        returned = self.act("train_step", batch=batch, state=state, ctx=ctx)
        state["steps"] += 1
        if returned is not ...:
            return returned
        kind = SimpleNamespace if self.asked.get("duck_typed") else StepResult
        return kind(metrics={"loss": 1 / state["steps"]})

    def state_dict(self, state):
        returned = self.act("state_dict", state=state)
        return {"steps": state["steps"]} if returned is ... else returned

    def load_state_dict(self, state, payload, ctx):
        self.act("load_state_dict", state=dict(state), payload=payload, ctx=ctx)
        state.update(payload)
'''

CHECKPOINT_HOOKS = """
    def save_checkpoint(self, *, state, step, output_dir, final, ctx):
        folder = {"output_dir": output_dir, "type": type(output_dir)}
        returned = self.act("save_checkpoint", state=state, step=step, final=final, ctx=ctx, **folder)
        (Path(output_dir) / "weights.txt").write_text(str(state["steps"]))
        return {"primary_path": output_dir + "/weights.txt", "rank": 4} if returned is ... else returned

    def load_checkpoint(self, *, state, checkpoint_dir, payload, ctx):
        read = (Path(checkpoint_dir) / "weights.txt").read_text()
        self.act(
            "load_checkpoint", state=dict(state), checkpoint_dir=checkpoint_dir, payload=payload, read=read, ctx=ctx
        )
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``run(source, **job)`` runs a job in the folder; then ``calls(hook)`` has what it got, ``events`` the log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which would outlive a change within its clock's tick
    project = SimpleNamespace(folder=tmp_path, out=tmp_path / "out", notes=[], events=[])
    module = f"contract_trainer_{next(NUMBERS)}"

    def write(source: str = TRAINER + CHECKPOINT_HOOKS, **fields: Any) -> Path:
        sys.modules.pop(module, None)
        (tmp_path / f"{module}.py").write_text(source)
        job = {
            "run_id": "r",
            "trainer": f"{module}:Trainer",
            "max_steps": 3,
            "metric_every": 1,
            "mock_batches": [1, 2, 3, 4],
            "lightning": {"accelerator": "cpu"},
            **fields,
        }
        path = tmp_path / "job.json"
        path.write_text(json.dumps(job))
        return path

    def run(source: str = TRAINER + CHECKPOINT_HOOKS, **fields: Any) -> int:
        path = write(source, **fields)
        code = run_job(RunOptions(spec_path=path, overrides=(f"artifacts_dir={project.out}",)))
        project.notes = list(getattr(sys.modules.get(module), "NOTES", []))
        project.events = [dict(event) for event in read_events(project.out / "metrics" / "events.jsonl")]
        return code

    def calls(hook: str) -> list[dict[str, Any]]:
        return [facts for name, facts in project.notes if name == hook]

    def source(*, in_setup: str = "pass", checkpoints: bool = True) -> str:
        looks = TRAINER.replace('self.act("setup", ctx=ctx)', f'self.act("setup", ctx=ctx)\n        {in_setup}')
        return looks + (CHECKPOINT_HOOKS if checkpoints else "")

    project.write, project.run, project.calls, project.source = write, run, calls, source
    return project
