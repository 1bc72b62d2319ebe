"""Checkpoints at a URL of fsspec: Lightning's own callbacks save, resume and remove them there."""

from __future__ import annotations

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from genlight.adapter.contract.exceptions import BrokenCheckpointError
from genlight.callbacks import Checkpoint, DurableCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")


@pytest.fixture
def store():
    """The file system of this process's memory, empty before and after."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


def fit(steps, *callbacks, ckpt_path=None, root="memory://runs/one", plugin=None):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        plugins=[plugin or DurableCheckpointIO()],
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    module = BoringModel()
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_default_root_at_a_url_is_saved_to_and_resumed_from(store, asynchronous):
    trainer, first = fit(2, plugin=DurableCheckpointIO(asynchronous=asynchronous))
    path = trainer.checkpoint_callback.best_model_path
    assert path == "memory://runs/one/checkpoints/epoch=0-step=2.ckpt"

    _, resumed = fit(2, ckpt_path=path)
    assert torch.equal(resumed.layer.weight, first.layer.weight)


def test_what_model_checkpoint_deletes_is_gone_with_its_data(store):
    fit(4, ModelCheckpoint("memory://kept", every_n_train_steps=1, save_top_k=1, monitor=None))
    names = sorted(path.removeprefix("/kept/") for path in store.find("/kept"))
    assert {name.split("/")[0] for name in names} == {"epoch=0-step=4", "epoch=0-step=4.ckpt"}


def test_a_save_that_replaces_another_leaves_it_whole_until_it_is_whole_itself(store, monkeypatch):
    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.zeros(2)}}, "memory://a/last.ckpt")

    put, calls = store.put_file, []

    def put_until_it_fails(source, target, **kwargs):
        calls.append(target)
        if target.endswith(".ckpt"):
            raise OSError("the store is gone")
        return put(source, target, **kwargs)

    monkeypatch.setattr(type(store), "put_file", staticmethod(put_until_it_fails))
    with pytest.raises(OSError, match="the store is gone"):
        plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "memory://a/last.ckpt")
    monkeypatch.undo()
    assert len(calls) > 1
    assert torch.equal(plugin.load_checkpoint("memory://a/last.ckpt")["state_dict"]["w"], torch.zeros(2))

    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, "memory://a/last.ckpt")
    assert torch.equal(plugin.load_checkpoint("memory://a/last.ckpt")["state_dict"]["w"], torch.ones(2))
    plugin.remove_checkpoint("memory://a/last.ckpt")
    assert not [path for path in store.find("/a") if "~1" in path]


def test_a_damaged_checkpoint_is_refused_and_a_missing_one_named(store):
    plugin = DurableCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.zeros(2)}}, "memory://a/x.ckpt")
    (weights,) = (path for path in store.find("/a") if path.endswith("model.safetensors"))
    store.pipe_file(weights, store.cat_file(weights)[:-1] + b"x")

    with pytest.raises(BrokenCheckpointError):
        plugin.load_checkpoint("memory://a/x.ckpt")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at memory://a/y\.ckpt"):
        plugin.load_checkpoint("memory://a/y.ckpt")


@pytest.mark.parametrize("made", [lambda: Checkpoint("memory://runs"), Checkpoint])
def test_the_checkpoint_callback_refuses_a_url_before_anything_is_trained(store, tmp_path, monkeypatch, made):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Invalid `dirpath`\. Checkpoint writes to a local file system"):
        fit(2, made())
    assert list(tmp_path.iterdir()) == [], "no folder that is called memory:"


def test_a_module_is_loaded_from_a_url_by_lightning_itself(store):
    """``load_from_checkpoint`` of any module."""
    trainer, module = fit(2)
    loaded = type(module).load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert torch.equal(next(loaded.parameters()), next(module.parameters()))


@pytest.mark.parametrize("made", [lambda: Checkpoint(every_n_steps=1), lambda: ModelCheckpoint(save_last=True)])
def test_a_root_that_is_a_file_url_is_the_folder_it_names(tmp_path, monkeypatch, made):
    monkeypatch.chdir(tmp_path)
    callback = made()
    fit(2, callback, root=(tmp_path / "root").as_uri())
    assert [path.name for path in tmp_path.iterdir()] == ["root"], "no folder that is called file:"
    assert list((tmp_path / "root" / "checkpoints").iterdir())
