"""The checkpoint plugin with plain Lightning: ModelCheckpoint, ckpt_path, removal, Lightning's own files."""

import contextlib
import errno
import os
import threading

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from genlight.adapter.contract.exceptions import CheckpointError, UnwrittenCheckpointError
from genlight.callbacks.checkpoint import Checkpoint, DurableCheckpointIO, find_checkpoint, save, verify
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def plugin(request):
    return DurableCheckpointIO(asynchronous=request.param)


class Scored(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.callback_metrics["score"] = torch.tensor([3.0, 1.0, 2.0, 5.0][trainer.current_epoch])


def test_model_checkpoint_keeps_top_k_and_last(tmp_path, plugin, make_trainer, make_net, make_loader):
    keeper = ModelCheckpoint(
        tmp_path / "c", monitor="score", save_top_k=2, save_last=True, filename="{epoch}-{score:.1f}"
    )
    trainer = make_trainer(Scored(), keeper, plugins=[plugin], max_epochs=4)
    trainer.fit(make_net(), make_loader(2))

    names = ["epoch=1-score=1.0", "epoch=2-score=2.0", "last"]
    assert sorted(os.listdir(tmp_path / "c")) == sorted([*(f"{name}.ckpt" for name in names), *names])
    for name in names:
        verify(tmp_path / "c" / f"{name}.ckpt")
    assert keeper.best_model_path.endswith("epoch=1-score=1.0.ckpt")


@pytest.mark.parametrize("extension", [".ckpt", ".pth", ".json"])
def test_each_start_finds_the_last_checkpoint(
    tmp_path, plugin, make_trainer, make_net, make_loader, monkeypatch, extension
):
    """Each later save finds the name of the last one in use, and gives its data folder another name."""
    monkeypatch.setattr(ModelCheckpoint, "FILE_EXTENSION", extension)
    began = []

    class Notes(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            began.append(trainer.global_step)

    for start in range(4):
        keeper = ModelCheckpoint(tmp_path / "c", save_last=True, every_n_train_steps=2, save_top_k=1)
        trainer = make_trainer(keeper, Notes(), plugins=[plugin], max_steps=2 * (start + 1))
        trainer.fit(make_net(), make_loader(20), ckpt_path="last" if start else None)
    assert began == [0, 2, 4, 6]


def test_a_checkpoint_is_found_by_its_data_folder(tmp_path):
    for step in (1, 2):
        save(tmp_path / "last.pth", {"global_step": step})
    assert find_checkpoint(tmp_path / "last~1.pth") == tmp_path / "last.pth.json"
    assert DurableCheckpointIO().load_checkpoint(tmp_path / "last~1.pth")["global_step"] == 2


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_pickle_in_a_torch_file_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Bomb()}, tmp_path / "a.ckpt")
    with refusal(CheckpointError):
        DurableCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert not (tmp_path / "exploded").exists()


@pytest.fixture
def held_back():
    """A plugin, and the event for which its saves wait in the background."""
    plugin, release = DurableCheckpointIO(asynchronous=True), threading.Event()
    plugin.store.background.submit(release.wait)
    yield plugin, release
    release.set()


@pytest.mark.parametrize("fails", [False, True])
def test_a_removal_waits_until_the_newer_checkpoint_is_durable(tmp_path, held_back, fails):
    plugin, release = held_back
    save(tmp_path / "old.ckpt", {"global_step": 1})
    if fails:
        (tmp_path / "new.ckpt").mkdir()
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "new.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert verify(tmp_path / "old.ckpt").step == 1
    release.set()
    with pytest.raises(CheckpointError) if fails else contextlib.nullcontext():
        plugin.teardown()
    assert (tmp_path / "old.ckpt").exists() is fails
    assert fails or verify(tmp_path / "new.ckpt").step == 2


def test_a_failed_write_names_checkpoint_size_file_and_remedy(tmp_path, plugin, monkeypatch):
    def full(_, part):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    checkpoint = {"state_dict": {"weight": torch.ones(250_000)}, "global_step": 1}
    with pytest.raises(UnwrittenCheckpointError) as failed:  # noqa: PT012 - by one of the two
        plugin.save_checkpoint(checkpoint, tmp_path / "step-00000001")
        plugin.teardown()
    assert str(failed.value) == (
        f"checkpoint step-00000001 (1.0 MB) could not be written to {tmp_path}: No space left on device "
        "(model.safetensors); free some space, keep fewer checkpoints, let this user write there, or choose another "
        "directory"
    )
    assert failed.value.errno == errno.ENOSPC
    assert failed.value.__cause__.filename.endswith("model.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named_with_its_checkpoint(tmp_path, plugin):
    (tmp_path / "c").write_text("in the way")
    with refusal(UnwrittenCheckpointError):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "c" / "a")


def test_an_asynchronous_save_holds_the_values_at_its_start(tmp_path, held_back):
    plugin, release = held_back
    weight, other = torch.ones(1000), torch.arange(12.0).reshape(3, 4).t()
    plugin.save_checkpoint(
        {
            "odd": torch.ones(3, dtype=torch.uint8),
            "w": weight,
            "o": other,
            "empty": torch.zeros(0, 2),
            "n": torch.tensor(5),
        },
        tmp_path / "a.ckpt",
    )
    weight.zero_(), other.zero_()
    release.set()
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert loaded["w"].sum() == 1000
    assert loaded["o"].sum() == 66
    assert loaded["o"].stride() == other.stride()
    assert (loaded["empty"].shape, int(loaded["n"])) == ((0, 2), 5)


def test_a_failed_asynchronous_save_is_raised_by_the_next_call_and_leaves_nothing(tmp_path):
    plugin = DurableCheckpointIO(asynchronous=True)
    (tmp_path / "a.ckpt").mkdir()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    with refusal(CheckpointError):
        plugin.save_checkpoint({}, tmp_path / "b.ckpt")
    plugin.save_checkpoint({}, tmp_path / "b.ckpt")
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b", "b.ckpt"]


@pytest.mark.parametrize("name", ["missing.ckpt", "missing", "folder"])
def test_a_missing_checkpoint_raises_file_not_found(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        DurableCheckpointIO().load_checkpoint(tmp_path / name)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_url_is_refused_with_an_alternative(tmp_path, make_trainer, make_net, make_loader):
    for use in (DurableCheckpointIO().load_checkpoint, lambda path: DurableCheckpointIO().save_checkpoint({}, path)):
        with refusal(ValueError):
            use("memory://a.ckpt")
    trainer = make_trainer(
        ModelCheckpoint("memory://kept"), Checkpoint(tmp_path), plugins=[DurableCheckpointIO()], max_epochs=1
    )
    with refusal(ValueError):
        trainer.fit(make_net(), make_loader(2))
    with refusal(ValueError):
        Checkpoint("s3://bucket/c")
    with refusal(ValueError):
        DurableCheckpointIO().load_checkpoint("http://host/c/final.json")
    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"global_step": 1}, f"file:{tmp_path}/a.ckpt")
    assert plugin.load_checkpoint(f"file://{tmp_path}/a.ckpt")["global_step"] == 1


def test_tensors_are_loaded_to_the_host_and_another_device_is_refused(tmp_path):
    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu")["w"].is_cpu
    with refusal(TypeError):
        plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="cuda:0")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the second trainer lacks those callbacks
def test_files_of_other_callbacks_stay_in_lightnings_format(tmp_path, make_trainer, make_net, make_loader):
    """`Checkpoint` without the plugin changes no other file: plain Lightning loads them and resumes from them."""
    keeper = ModelCheckpoint(tmp_path / "stock", save_last=True, every_n_train_steps=2, save_top_k=1)
    trainer = make_trainer(keeper, Checkpoint(tmp_path / "own", every_n_steps=2), max_steps=6)
    trainer.fit(make_net(), make_loader(20))
    trainer.save_checkpoint(tmp_path / "by-hand.ckpt")
    assert len(os.listdir(tmp_path / "stock")) == 2, "older ones are removed"
    for path in (keeper.best_model_path, keeper.last_model_path, tmp_path / "by-hand.ckpt"):
        assert "genlight" not in torch.load(path, weights_only=True)
        type(make_net()).load_from_checkpoint(path)
        again = make_trainer(max_steps=8, enable_checkpointing=False)
        again.fit(make_net(1), make_loader(20), ckpt_path=path)
        assert again.global_step == 8
        with_genlight = make_trainer(Checkpoint(tmp_path / "further", replace_existing=True), max_steps=8)
        with_genlight.fit(make_net(1), make_loader(20), ckpt_path=path)
        assert with_genlight.global_step == 8
    assert verify(tmp_path / "own" / "step-00000006.json").step == 6


def test_a_plugin_that_the_user_installs_writes_every_file(tmp_path, train_net):
    keeper = ModelCheckpoint(tmp_path / "all", every_n_train_steps=2)
    callbacks = [keeper, Checkpoint(tmp_path / "own", every_n_steps=2)]
    train_net(*callbacks, plugins=[DurableCheckpointIO()], max_steps=4, loader=20)
    assert verify(keeper.best_model_path).step == 4
