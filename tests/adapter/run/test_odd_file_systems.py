"""A run whose working directory is deleted, or whose file system cannot sync directories, completes."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from genlight.adapter.run.run import RunOptions, run_job
from genlight.callbacks.checkpoint import newest_valid

TRAINER = """
import os
from genlight.adapter import StepResult


class Homeless:
    def setup(self, ctx):
        self.ctx = ctx

    def configure(self, ctx):
        return {"steps": 0}

    def prepare_batch(self, raw, state, ctx):
        return raw

    def train_step(self, batch, state, ctx):
        state["steps"] += 1
        if self.ctx.job.hyperparams.get("removes") and state["steps"] == 2:
            os.rmdir(os.getcwd())
        return StepResult(metrics={"loss": 1.0})

    def state_dict(self, state):
        return state

    def load_state_dict(self, state, payload, ctx):
        state.update(payload)
"""


@pytest.fixture
def run_homeless(tmp_path, monkeypatch):
    """Runs four steps from a separate working directory; returns the exit code."""
    (tmp_path / "here").mkdir()
    (tmp_path / "homeless_trainer.py").write_text(TRAINER)
    monkeypatch.chdir(tmp_path / "here")

    def run(**hyperparams):
        job = {"run_id": "r", "trainer": "homeless_trainer:Homeless", "max_steps": 4, "checkpoint_every": 2}
        job |= {"mock_batches": [1, 2, 3, 4], "hyperparams": hyperparams, "lightning": {"accelerator": "cpu"}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        return run_job(RunOptions(tmp_path / "job.json", (f"artifacts_dir={tmp_path / 'out'}",)))

    yield run
    monkeypatch.undo()


def test_a_run_whose_working_directory_is_deleted_completes_and_shows_its_results(run_homeless, tmp_path, capfd):
    assert run_homeless(removes=True) == 0
    assert not (tmp_path / "here").exists()
    said = capfd.readouterr().err
    assert "run r completed at step 4" in said
    assert str(tmp_path / "out" / "checkpoints" / "final.json") in said
    assert "Traceback" not in said


def test_no_part_of_a_run_needs_that_a_directory_can_be_synced(run_homeless, tmp_path, monkeypatch):
    """File systems in user space may answer so. All callers accept it, including the event log and checkpoints."""
    real, refused = os.fsync, []

    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    assert run_homeless() == 0
    folders = {os.path.relpath(path, tmp_path / "out") for path in refused}
    assert {"checkpoints", "metrics"} <= folders
    assert newest_valid(tmp_path / "out" / "checkpoints")[0].step == 4
