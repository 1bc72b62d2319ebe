"""Frozen weights are written once, and yet every checkpoint is complete without the others."""

import copy
import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genlight.adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from genlight.callbacks.checkpoint import (
    CheckpointStore,
    RecordMeta,
    delete_checkpoint,
    list_checkpoints,
    load,
    load_weights,
    read_record,
    storage,
    store,
    sweep,
    verify,
)
from genlight.callbacks.checkpoint.contents import check_contents
from genlight.callbacks.checkpoint.format.record import serialise_record
from genlight.callbacks.checkpoint.frozen import Frozen
from genlight.reporters.uploads.queue import Entry, pack
from support.adapted_model import FROZEN_BYTES, Adapted, assert_equal
from support.messages import refusal

pytestmark = [pytest.mark.promise(name="checkpoint"), pytest.mark.filterwarnings("ignore:You're resuming")]


@pytest.fixture(params=["links", "no links"])
def linking(request, monkeypatch):
    if request.param == "no links":

        def refuse(*_, **__):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    return request.param == "links"


def bytes_on_disk(folder):
    found = {(s.st_dev, s.st_ino): s.st_size for s in (path.lstat() for path in Path(folder).rglob("*")) if s.st_size}
    return sum(size for inode, size in found.items() if inode in files_of(folder))


def files_of(folder):
    return {(s.st_dev, s.st_ino) for s in (path.lstat() for path in Path(folder).rglob("*") if path.is_file())}


def frozen_files_of(folder):
    return {path.stat().st_ino for path in Path(folder).glob("*/frozen.safetensors")}


def test_frozen_weights_are_stored_once_for_all_checkpoints_of_a_run(train, tmp_path, linking):
    directory = tmp_path / "c"
    first = train(Adapted(), 6)
    second = train(Adapted(), 10, resume=directory / "step-00000006.json")

    records = [listed.record for listed in list_checkpoints(directory)]
    assert [record.step for record in records] == [2, 4, 6, 8, 10, 10]
    assert len(frozen_files_of(directory)) == (1 if linking else len(records))
    assert not linking or bytes_on_disk(directory) < 2 * FROZEN_BYTES + len(records) * 100_000
    for record in records:
        assert sum(file.size for file in record.files) > FROZEN_BYTES
        check_contents(verify(record.path))
        assert_equal(load_weights(record.path), (first.seen | second.seen)[record.step])
        assert_equal(dict(load(record.path)["state_dict"]), (first.seen | second.seen)[record.step])


def test_a_save_copies_only_trained_weights(train, tmp_path, monkeypatch):
    copied = []
    real = store.write_checkpoint

    def record(channel, captured):
        copied.append(captured.nbytes)
        return real(channel, captured)

    monkeypatch.setattr(store, "write_checkpoint", record)
    train(Adapted(), 8)

    weights = 4 * 64 * 65 * 4
    assert copied[0] > weights + 40_000
    # All but the frozen weights, with a few hundred bytes of bookkeeping.
    assert all(nbytes < copied[0] - weights + 1_000 for nbytes in copied[1:])


def test_weights_of_an_optimizer_are_not_frozen(train, tmp_path):
    class Thawing(Adapted):
        def on_train_batch_start(self, batch, batch_idx):
            self.base[3].requires_grad_(3 <= self.trainer.global_step < 6)

        def configure_optimizers(self):
            return torch.optim.AdamW([*self.base[3].parameters(), *self.down.parameters()], lr=0.01)

    module = train(Thawing(), 12)

    for listed in list_checkpoints(tmp_path / "c"):
        assert_equal(load_weights(listed.path), module.seen[listed.record.step])
    assert len(frozen_files_of(tmp_path / "c")) == 1


def test_weights_in_the_payload_are_not_stored_twice(train, tmp_path):
    class WithPayload(Adapted):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["payload"] = {"weights": self.state_dict()}

    module = train(WithPayload(), 6)

    assert bytes_on_disk(tmp_path / "c") < FROZEN_BYTES + 4 * 70_000
    payload = load(tmp_path / "c" / "final.json")["payload"]
    assert_equal(dict(payload["weights"]), module.seen[6])


def modify(path):
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"x")


@pytest.mark.parametrize("damage", [modify, Path.unlink])
def test_a_modified_or_missing_shared_file_is_written_again(train, tmp_path, damage):
    class Meddling(Adapted):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 3:
                damage(tmp_path / "c" / "step-00000002" / "frozen.safetensors")

    module = train(Meddling(), 6, asynchronous=False)

    assert_equal(load_weights(tmp_path / "c" / "step-00000006.json"), module.seen[6])
    verify(tmp_path / "c" / "step-00000006.json")
    assert len(frozen_files_of(tmp_path / "c")) == 2 - (damage is Path.unlink)


def test_an_upload_names_every_file_as_a_resume_requests_it(train, tmp_path):
    train(Adapted(), 4, save_final=False)
    record = read_record(tmp_path / "c" / "step-00000004.json")

    files = pack(tmp_path, record.path, [record.path.parent / file.path for file in record.files])
    entry = Entry(run_id="r", kind="checkpoint", step=4, to=("endpoint",), files=files)

    assert [entry.name_in_store(file) for file in files[:-1]] == [record.file_name(file) for file in record.files]
    assert [file.layout for file in files[:-1]] == [file.path for file in record.files]
    assert entry.name_in_store(files[-1]) == record.path.name


def test_a_tensor_in_two_files_makes_a_checkpoint_broken(train, tmp_path):
    train(Adapted(), 2, save_final=False)
    record = read_record(tmp_path / "c" / "step-00000002.json")
    [frozen] = [file for file in record.files if file.path.endswith("frozen.safetensors")]
    twice = replace(frozen, path="step-00000002/model.safetensors")
    shutil.copy(tmp_path / "c" / frozen.path, tmp_path / "c" / twice.path)
    others = [file for file in record.files if file.path != twice.path]
    record.path.write_bytes(change_record(record, files=[*others, twice]))

    for read in (lambda path: check_contents(verify(path)), load):
        with refusal(BrokenCheckpointError):
            read(record.path)


def test_omitted_tensors_are_found_in_a_base_by_their_content(train, tmp_path):
    """The module of a run may hold its base within others, and so under other names."""
    train(Adapted(), 2, save_final=False, weights="trained")
    path = tmp_path / "c" / "step-00000002.json"
    base = {f"inner.{name}": tensor for name, tensor in Adapted().state_dict().items()}
    assert_equal(load_weights(path, base=base), load_weights(path, base=Adapted().state_dict()))

    left = read_record(path).left_out[0]
    base[f"inner.{left.key}"] = base[f"inner.{left.key}"] + 1
    with pytest.raises(CheckpointError):
        load_weights(path, base=base)


@pytest.mark.parametrize("dtype", ["F32", "X9"])
def test_omitted_tensors_of_a_record_take_no_memory(train, tmp_path, dtype):
    train(Adapted(), 2, save_final=False, weights="trained")
    record = read_record(tmp_path / "c" / "step-00000002.json")
    huge = [replace(left, dtype=dtype, shape=(2**40, 2**20)) for left in record.left_out]
    record.path.write_bytes(change_record(record, left_out=huge))

    if dtype == "X9":
        with refusal(BrokenCheckpointError):
            check_contents(verify(record.path))
    with refusal(CheckpointError):
        load(record.path, base=Adapted().state_dict())


def change_record(record, **changed):
    return serialise_record(replace(record, **changed))


class Run:
    """Weights of a trainer and its expected checkpoints, over restarts of its process."""

    def __init__(self, directory, chance):
        self.directory, self.chance = directory, chance
        self.weights = {f"layer{i}": torch.randn(600) for i in range(6)}
        self.trained, self.expected, self.step = {"layer0"}, {}, 0
        directory.mkdir()
        self.restart()

    def restart(self):
        storage._live.clear()
        sweep(self.directory)
        self.store, self.asynchronous = CheckpointStore(), self.chance.random() < 0.5
        frozen = {name: tensor for name, tensor in self.weights.items() if name not in self.trained}
        self.store.begin(self.directory, Frozen(frozen))

    def save(self):
        self.step += 1
        path = self.directory / f"step-{self.step:08d}.json"
        meta = RecordMeta(step=self.step, run_id="r")
        self.expected[path] = copy.deepcopy(self.weights)
        state = {"state_dict": dict(self.weights), "kept": self.weights["layer5"][:10]}
        self.store.save(path, state, meta, asynchronous=self.asynchronous)
        self.train()  # continues while the checkpoint is written
        self.store.wait()

    def train(self):
        for name in self.trained:
            self.weights[name].data.add_(1)

    def freeze(self):
        self.trained.discard(self.chance.choice(sorted(self.weights)))

    def unfreeze(self):
        self.trained.add(self.chance.choice(sorted(self.weights)))

    def edit_by_hand(self):
        self.weights[self.chance.choice(sorted(self.weights))].data[self.chance.randrange(600)] += 1

    def remove_one(self):
        if self.expected:
            path = self.chance.choice(sorted(self.expected))
            del self.expected[path]
            delete_checkpoint(path)


@pytest.mark.parametrize("seed", range(4))
def test_every_kept_checkpoint_is_complete_and_exact_after_random_actions(tmp_path, seed, linking, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power cut is simulated here
    torch.manual_seed(seed)
    chance = random.Random(seed)
    run = Run(tmp_path / "c", chance)
    actions = [run.save] * 5 + [run.train, run.freeze, run.unfreeze, run.edit_by_hand, run.remove_one, run.restart]

    for _ in range(40):
        chance.choice(actions)()
        found = {listed.path: listed.record for listed in list_checkpoints(run.directory)}
        assert found.keys() == run.expected.keys()
    for path, weights in run.expected.items():
        check_contents(verify(path))
        loaded = load(path)
        assert_equal(dict(loaded["state_dict"]), weights)
    sweep(run.directory)
    named = {file.path for path in run.expected for file in read_record(path).files}
    present = {p.relative_to(run.directory).as_posix() for p in run.directory.rglob("*") if p.is_file()}
    assert present - named == {path.name for path in run.expected}
