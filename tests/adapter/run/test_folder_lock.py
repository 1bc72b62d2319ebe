"""One live run per artifacts directory."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.plumbing.durable import temporary_name
from genlight.adapter.run.folder import LOCK_NAME, lock_artifacts, lock_directory, prepare_artifact_dirs
from genlight.adapter.run.start import move_old_artifacts_aside
from genlight.callbacks.checkpoint import save
from support.messages import refusal


@pytest.fixture
def config_of(config_of):
    """Also makes the directories of the run."""

    def resolve(*overrides):
        config = config_of(*overrides)
        prepare_artifact_dirs(config)
        return config

    return resolve


def test_a_second_run_is_refused_while_the_first_lives_and_says_who_holds_it(config_of):
    """``test_file_lock.py`` kills and forks the holder."""
    config = config_of()
    with lock_artifacts(config):
        assert json.loads((config.artifacts_dir / LOCK_NAME).read_text())["pid"] == os.getpid()
        with pytest.raises(StartupContractError) as caught, lock_artifacts(config):
            pass
    assert caught.value.code == "startup.artifacts_in_use"
    for said in (f"process {os.getpid()} ", "'r'", str(config.artifacts_dir)):
        assert said in caught.value.message


def test_the_lock_is_free_after_its_block_even_after_an_error(config_of):
    config = config_of()
    with refusal(RuntimeError), lock_artifacts(config):
        raise RuntimeError("in the block")
    with lock_artifacts(config):
        pass


def test_runs_that_share_only_a_checkpoints_directory_exclude_each_other(config_of, tmp_path):
    shared = f"checkpoints_dir={tmp_path / 'shared'}"
    one = config_of(shared, f"artifacts_dir={tmp_path / 'a'}")
    two = config_of(shared, f"artifacts_dir={tmp_path / 'b'}")
    with lock_artifacts(one):
        with refusal(StartupContractError), lock_artifacts(two):
            pass
        with lock_artifacts(config_of(f"artifacts_dir={tmp_path / 'b'}")):
            pass


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_file_that_cannot_be_written_is_reported_and_released(config_of, monkeypatch, call):
    config = config_of()

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with refusal(StartupContractError) as refused:
            lock_directory(config.artifacts_dir, "r")
    assert refused.value.code == "startup.invalid_artifact_paths"
    with lock_artifacts(config):
        pass


def test_temporary_files_of_killed_processes_are_removed_at_the_next_start(config_of):
    """But not what a command may be writing now, and nothing of the user's."""
    config = config_of()
    debris = [config.artifacts_dir / temporary_name("job.json"), config.metrics_dir / temporary_name("tracking.jsonl")]
    kept = [config.artifacts_dir / name for name in (".tmp-mine", temporary_name(".stop"))]
    for path in (*debris, *kept):
        path.touch()
    for path in debris:
        os.utime(path, (0, 0))
    with lock_artifacts(config):
        assert [path for path in (*debris, *kept) if path.exists()] == kept


def test_fresh_names_a_file_that_it_cannot_move(config_of, monkeypatch):
    config = config_of()
    save(config.checkpoints_dir / "step-00000001", {"global_step": 1})

    def failing(self, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    monkeypatch.setattr(Path, "rename", failing)
    with refusal(StartupContractError):
        move_old_artifacts_aside(config)
