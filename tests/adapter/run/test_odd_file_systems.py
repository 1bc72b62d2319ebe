"""A run whose working directory is deleted, or whose file system cannot sync directories, completes."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from genlight.callbacks.checkpoint import newest_valid
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


def test_no_part_of_a_run_needs_that_a_directory_can_be_synced(tmp_path, monkeypatch):
    """File systems in user space may answer so. All callers accept it, including the event log and checkpoints."""
    real, refused = os.fsync, []

    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    assert run(write_job(tmp_path)) == 0
    folders = {os.path.relpath(path, tmp_path / "out") for path in refused}
    assert {"checkpoints", "metrics"} <= folders
    assert newest_valid(tmp_path / "out" / "checkpoints")[0].step == 3
