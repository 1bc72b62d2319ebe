"""The choice of a checkpoint in a directory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genlight.adapter.contract.exceptions import BrokenCheckpointError
from genlight.callbacks.checkpoint import (
    RecordMeta,
    find_checkpoint,
    find_final,
    list_checkpoints,
    load,
    loading,
    newest_valid,
    save,
)
from genlight.callbacks.checkpoint.loading import read_ahead
from genlight.callbacks.checkpoint.selection import newest_complete

pytestmark = pytest.mark.promise(name="checkpoint")


def save_steps(directory, *steps, **meta):
    for step in steps:
        save(directory / f"step-{step:08d}", {"global_step": step}, meta=RecordMeta(run_id="r", **meta))


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def assert_is_read_ahead(directory, step, *, times):
    """Choose the newest checkpoint and load it; check how often the bytes of its tensors are read."""
    before = bytes_read()
    record, warnings = newest_valid(directory, prove=read_ahead)
    assert (record.step, len(warnings)) == (step, 3 - step)
    loaded = load(record.path)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((1 << 20,), float(step)))
    assert times <= (bytes_read() - before) / record.size_bytes < times + 0.5
    assert not loading._ahead


@pytest.fixture
def three_steps(tmp_path):
    for step in (1, 2, 3):
        save(
            tmp_path / f"step-{step:08d}",
            {"global_step": step, "state_dict": {"w": torch.full((1 << 20,), float(step))}},
        )
    return tmp_path


def test_a_start_reads_the_bytes_of_its_checkpoint_once(three_steps):
    assert_is_read_ahead(three_steps, 3, times=1)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_broken_checkpoint_is_not_read_ahead(damage, three_steps):
    path = three_steps / "step-00000003" / "model.safetensors"
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, 5000)
    else:
        with path.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"x")
    assert_is_read_ahead(three_steps, 2, times=2 if damage == "flip" else 1)


def test_without_memory_to_spare_a_checkpoint_is_read_twice(three_steps, monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda: 1 << 20)
    assert_is_read_ahead(three_steps, 3, times=2)


def test_the_bytes_that_were_proven_are_loaded(three_steps):
    """Also if the file changes in between; another checkpoint does not get them."""
    record, _ = newest_valid(three_steps, prove=read_ahead)
    (three_steps / "step-00000003" / "model.safetensors").write_bytes(b"")
    assert float(load(three_steps / "step-00000003")["state_dict"]["w"][0]) == 3
    for step in (1, 2):  # only the last is kept
        chosen, _ = newest_valid(three_steps, accept=lambda record, step=step: record.step == step, prove=read_ahead)
    assert {digest for digest, _ in loading._ahead} == {chosen.digest}
    assert float(load(three_steps / "step-00000001")["state_dict"]["w"][0]) == 1
    assert not loading._ahead
    with pytest.raises(BrokenCheckpointError):
        load(record.path)


def test_records_that_are_not_accepted_are_skipped_without_a_warning(tmp_path):
    save_steps(tmp_path, 1, 2)
    assert newest_valid(tmp_path, accept=lambda record: record.step < 2)[0].step == 1
    assert newest_valid(tmp_path, accept=lambda record: record.step < 2)[1] == []


def test_a_broken_checkpoint_is_skipped_with_a_warning_that_names_the_reason(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003.json").write_text("{")
    os.truncate(tmp_path / "step-00000002" / "training_state.json", 5)
    record, warnings = newest_valid(tmp_path)
    assert record.step == 1
    assert "step-00000003" in warnings[0]
    assert "not JSON" in warnings[0]
    assert "step-00000002/training_state.json has 5 bytes" in warnings[1]


def test_a_missing_directory_has_no_checkpoint(tmp_path):
    assert newest_valid(tmp_path / "nowhere") == (None, [])
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert find_final(tmp_path / "nowhere") is None


def test_an_older_runtimes_record_is_a_candidate(tmp_path):
    save_steps(tmp_path, 3)
    (tmp_path / "step-00000007.json").write_text(json.dumps({"state": {}, "run_id": "old"}))
    record, _ = newest_valid(tmp_path)
    assert (record.step, record.is_old) == (7, True)


def test_a_final_record_is_verified(tmp_path):
    save(tmp_path / "final", {"global_step": 5}, meta=RecordMeta(final=True, max_steps=5, spec_digest="d"))
    final = find_final(tmp_path)
    assert (final.final, final.max_steps, final.spec_digest) == (True, 5, "d")
    os.truncate(tmp_path / "final" / "training_state.json", 5)
    with pytest.raises(BrokenCheckpointError):
        find_final(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run", "final.json"),
        ("run/", "final.json"),
        ("run/checkpoints", "final.json"),
        ("run/checkpoints/final", "final.json"),
        ("run/checkpoints/step-00000003", "step-00000003.json"),
        ("run/checkpoints/step-00000003/", "step-00000003.json"),
        ("run/checkpoints/step-00000003.json", "step-00000003.json"),
        ("run/checkpoints/last.ckpt", "last.ckpt"),
    ],
)
def test_a_checkpoint_is_found_by_its_record_name_or_folder(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    save_steps(checkpoints, 3, 10)
    save(checkpoints / "last.ckpt", {"global_step": 10})
    save(checkpoints / "final", {"global_step": 12}, meta=RecordMeta(final=True))
    (checkpoints / "step-00000020.json").write_text("{")
    assert find_checkpoint(name) == checkpoints / expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "there is nothing at none; name the JSON record of a checkpoint, or the folder that holds it"),
        ("empty", "empty is not a checkpoint; name"),
        ("torn", "no checkpoint in torn can be read: step-00000001: its record step-00000001.json is not JSON: "),
        ("x.safetensors", "x.safetensors is not a checkpoint; name"),
        ("notes.txt", "notes.txt is not a checkpoint; name"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_with_the_reason(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "torn"):
        (tmp_path / folder).mkdir()
    for file in ("torn/step-00000001.json", "x.safetensors", "notes.txt"):
        (tmp_path / file).write_text("{")
    with pytest.raises(FileNotFoundError) as raised:
        find_checkpoint(name)
    assert str(raised.value).startswith(message)


def test_a_file_of_torch_is_distinguished_from_a_broken_record(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"PK\x03\x04" + bytes(100))
    (listed,) = list_checkpoints(tmp_path)
    assert listed.problem == "x.ckpt was written by torch.save and is not a record of genlight"


def test_a_record_that_cannot_be_read_is_listed_and_never_skipped(tmp_path, monkeypatch):
    """It may be the newest complete one, and a run that resumed from an older one would replace it."""
    save_steps(tmp_path, 1, 2)
    real = os.open

    def refuse(path, *rest, **options):
        if str(path).endswith("step-00000002.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert list_checkpoints(tmp_path)[1].problem == "it cannot be read: Permission denied"
    for choose in (newest_valid, find_checkpoint):
        with pytest.raises(PermissionError):
            choose(tmp_path)


def test_records_listings_and_verification_import_neither_torch_nor_lightning_nor_numpy(tmp_path):
    save_steps(tmp_path, 1)
    program = (
        "import sys; from genlight.callbacks.checkpoint import newest_valid, verify, read_record, sweep, Retention\n"
        f"assert newest_valid({str(tmp_path)!r})[0].step == 1; sweep({str(tmp_path)!r})\n"
        "import genlight.callbacks.checkpoint.codec.state_tree\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("search", [newest_valid, newest_complete, find_checkpoint])
def test_a_search_for_the_newest_reads_no_older_record(search, tmp_path, monkeypatch):
    save_steps(tmp_path, *range(1, 6))
    (tmp_path / "step-00000005.json").write_text("broken")
    real, opened = os.open, set()

    def note(path, *rest, **options):
        opened.add(os.path.basename(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", note)
    search(tmp_path)
    assert {name for name in opened if name.startswith("step-")} == {"step-00000005.json", "step-00000004.json"}


def test_a_record_is_listed_by_the_step_in_its_name_and_others_by_their_own(tmp_path: Path) -> None:
    for name, step in (("step-00000030", 30), ("later", 40), ("earlier", 20), ("final", 30)):
        meta = RecordMeta(final=name == "final")
        save(tmp_path / f"{name}.json", {"global_step": step, "state_dict": {}}, meta=meta)
    (tmp_path / "step-00000035.json").write_text('{"format":"genlight')

    names = [listed.path.stem for listed in list_checkpoints(tmp_path)]

    assert names == ["earlier", "step-00000030", "final", "step-00000035", "later"]
