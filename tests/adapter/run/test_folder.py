"""Artifact directories are made and proved writable, or refused with the way out."""

from __future__ import annotations

import errno
import os

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.adapter.run.folder import artifact_dir_faults, prepare_artifact_dirs
from support.messages import refusal


def test_directories_are_made_and_left_without_a_trace_of_the_probe(config_of, tmp_path):
    prepare_artifact_dirs(config_of())
    prepare_artifact_dirs(config_of())
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")) == [
        *("checkpoints", "metrics", "samples")
    ]


def test_a_file_in_the_way_is_named_with_the_directory_that_it_blocks(config_of, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(StartupContractError) as caught:
        prepare_artifact_dirs(config_of())
    assert caught.value.code == "startup.invalid_artifact_paths"
    (fault,) = caught.value.message.splitlines()
    assert fault.startswith(f"`artifacts_dir` '{tmp_path}/out' cannot be written: it is not a directory. ")
    assert "`TRAINER_ARTIFACTS_DIR`" in fault


def test_each_unwritable_directory_is_named(config_of, tmp_path):
    (tmp_path / "file").write_text("")
    places = [f"checkpoints_dir={tmp_path}/file/c", f"samples_dir={tmp_path}/file/s"]
    with pytest.raises(StartupContractError) as caught:
        prepare_artifact_dirs(config_of(*places))
    assert [line.split()[0] for line in caught.value.message.splitlines()] == ["`checkpoints_dir`", "`samples_dir`"]


def test_an_unwritable_probe_is_not_named(config_of, tmp_path, monkeypatch):
    make = os.open

    def read_only(path, *rest):
        if os.fspath(path).startswith(f"{tmp_path}/out"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        return make(path, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with refusal(StartupContractError):
        prepare_artifact_dirs(config_of())


def test_a_name_that_is_too_long_for_a_file_system_is_refused(config_of, tmp_path):
    config = config_of(f"artifacts_dir={tmp_path / ('x' * 300)}")
    with refusal(StartupContractError):
        prepare_artifact_dirs(config)
    assert len(artifact_dir_faults(config, create=False)) == 1


def test_an_events_path_that_is_a_directory_is_refused(config_of, tmp_path):
    (tmp_path / "events").mkdir()
    with refusal(StartupContractError):
        prepare_artifact_dirs(config_of(f"events_path={tmp_path / 'events'}"))


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs a file system that nobody may write")
def test_a_read_only_file_system_is_refused_even_for_root(config_of):
    for place in ("/proc/genlight", "/sys/genlight"):
        with refusal(StartupContractError):
            prepare_artifact_dirs(config_of(f"checkpoints_dir={place}"))


def test_a_check_that_creates_nothing_probes_the_nearest_folder(config_of, tmp_path):
    assert artifact_dir_faults(config_of(), create=False) == []
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("")
    assert len(artifact_dir_faults(config_of(), create=False)) == 1
