"""A run whose working directory is deleted, or whose file system cannot sync directories, completes."""

from __future__ import annotations

import os

import pytest

from support.jobs import run, write_job
from support.trainer_class import Counts


class Removes(Counts):
    """Removes its working directory in the second step."""

    def train_step(self, batch, state, ctx):
        if state["steps"] == 1:
            os.rmdir(os.getcwd())
        return super().train_step(batch, state, ctx)


def test_a_run_whose_working_directory_is_deleted_completes_and_shows_its_results(tmp_path, capfd):
    (tmp_path / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "here")
        assert run(write_job(tmp_path, trainer=f"{__name__}:Removes")) == 0
    assert not (tmp_path / "here").exists()
    said = capfd.readouterr().err
    assert "run r completed at step 3" in said
    assert str(tmp_path / "out" / "checkpoints" / "final.json") in said
    assert "Traceback" not in said
