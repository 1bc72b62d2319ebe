"""Where Lightning or torch opens a checkpoint by itself, it reads it, or is told in one line what to do."""

import os
import pickle
import subprocess
import sys
import zipfile

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.cloud_io import _load
from lightning.pytorch.callbacks import ModelCheckpoint

from genlight.callbacks.checkpoint import Checkpoint, DurableCheckpointIO, list_checkpoints, load, read_record, verify
from genlight.callbacks.checkpoint.format.ckpt_file import WAY_OUT, record_in

SAID = f"Unknown endianness type: {WAY_OUT}"


class Regression(pl.LightningModule):
    """Any module, with hyperparameters and a state of its own in the checkpoint."""

    def __init__(self, width, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return self.layer(batch).pow(2).mean()

    def test_step(self, batch, batch_idx):
        self.log("norm", self.layer(batch).pow(2).mean())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.rate)


@pytest.fixture
def trained(tmp_path, make_trainer, make_loader):
    """A module whose run wrote ``c/best.ckpt`` by ModelCheckpoint and ``c/final.json`` by the callback."""
    torch.manual_seed(0)
    module = Regression(3, rate=0.05)
    keeper = ModelCheckpoint(tmp_path / "c", filename="best")
    make_trainer(keeper, Checkpoint(tmp_path / "c"), max_epochs=1).fit(module, make_loader())
    return module


def rows():
    return torch.utils.data.DataLoader(
        list(torch.randn(12, 4, generator=torch.Generator().manual_seed(1))), batch_size=6
    )


def equal(one, other):
    return all(torch.equal(one.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("name", ["best.ckpt", "final.json"])
@pytest.mark.parametrize("as_path", [str, os.fspath, lambda path: path], ids=["text", "fspath", "Path"])
def test_load_from_checkpoint_of_any_module(tmp_path, trained, name, as_path):
    loaded = Regression.load_from_checkpoint(as_path(tmp_path / "c" / name))
    assert equal(loaded, trained)
    assert (dict(loaded.hparams), loaded.seen) == ({"width": 3, "rate": 0.05}, 10)
    other = Regression.load_from_checkpoint(tmp_path / "c" / name, map_location="cpu", weights_only=False, rate=0.5)
    assert other.hparams.rate == 0.5


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided:UserWarning")
@pytest.mark.parametrize("name", ["best.ckpt", "final.json"])
def test_a_trainer_without_the_plugin_goes_on_and_tests(tmp_path, trained, name, make_trainer, make_loader):
    path = tmp_path / "c" / name
    trainer = make_trainer(max_epochs=2, enable_checkpointing=False)
    trainer.fit(Regression(3), make_loader(), ckpt_path=path)
    assert trainer.global_step == 20
    (scores,) = make_trainer(enable_checkpointing=False).test(Regression(3), rows(), ckpt_path=path)
    expected = make_trainer(enable_checkpointing=False).test(trained, rows())
    assert [scores] == expected
    assert Fabric(accelerator="cpu", devices=1).load(path)["global_step"] == 10
    assert _load(path)["global_step"] == 10
    with path.open("rb") as file:
        assert _load(file)["global_step"] == 10


def test_best_is_found_by_test(tmp_path, make_trainer, make_loader):
    keeper = ModelCheckpoint(tmp_path / "c", filename="best")
    trainer = make_trainer(keeper, plugins=[DurableCheckpointIO()], max_epochs=1)
    module = Regression(3)
    trainer.fit(module, make_loader())
    assert trainer.test(module, rows(), ckpt_path="best")


def test_a_damaged_checkpoint_is_not_loaded_by_lightning_either(tmp_path, trained):
    weights = read_record(tmp_path / "c" / "best.ckpt").data_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(Exception, match=r"model\.safetensors has digest"):
        Regression.load_from_checkpoint(tmp_path / "c" / "best.ckpt")


def test_lightning_cli_takes_hyperparameters_from_a_checkpoint(tmp_path, trained):
    code = """
import sys
from lightning.pytorch.cli import LightningCLI
import lightning.pytorch as pl, torch
class Module(pl.LightningModule):
    def __init__(self, width: int = 1, rate: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)
    def test_step(self, batch, batch_idx):
        pass
    def test_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 4))
cli = LightningCLI(Module, save_config_callback=None)
assert cli.model.hparams.rate == 0.05, cli.model.hparams
"""
    (tmp_path / "cli.py").write_text(code)
    plugin = "genlight.callbacks.checkpoint.checkpoint_io.DurableCheckpointIO"
    options = ["--trainer.accelerator=cpu", "--trainer.logger=false", f"--trainer.plugins={plugin}"]
    command = [sys.executable, "cli.py", "test", f"--ckpt_path={tmp_path / 'c' / 'best.ckpt'}", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_files_of_torch_are_read_as_before(tmp_path, make_trainer, make_loader):
    module = Regression(3)
    trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "stock.ckpt")
    assert zipfile.is_zipfile(tmp_path / "stock.ckpt")
    assert equal(Regression.load_from_checkpoint(tmp_path / "stock.ckpt"), module)
    torch.save({"state_dict": pickle.Pickler}, tmp_path / "code.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        Regression.load_from_checkpoint(tmp_path / "code.ckpt")


@pytest.mark.parametrize("weights_only", [True, False, None])
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_says_in_one_line_what_to_do(tmp_path, trained, weights_only, mmap):
    with pytest.raises(ValueError, match="genlight checkpoints export") as said:
        torch.load(tmp_path / "c" / "best.ckpt", weights_only=weights_only, mmap=mmap)
    assert str(said.value) == SAID
    assert "\n" not in SAID


def test_a_process_without_genlight_is_told_what_to_do_and_what_it_says_works(tmp_path, trained):
    code = """
import sys, torch, lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self, width, rate):
        super().__init__()
        self.layer = torch.nn.Linear(4, width)
    def on_load_checkpoint(self, checkpoint):
        assert checkpoint["seen"] == 10
try:
    Module.load_from_checkpoint(sys.argv[1])
except ValueError as error:
    print(error)
from genlight.callbacks import DurableCheckpointIO
Module.load_from_checkpoint(sys.argv[1])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "c" / "best.ckpt")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert SAID in done.stdout.splitlines()


def test_the_record_within_is_the_one_that_counts_and_proves_itself(tmp_path, trained):
    path = tmp_path / "c" / "best.ckpt"
    data = path.read_bytes()
    record = record_in(data)
    assert [listed.record is not None for listed in list_checkpoints(tmp_path / "c")] == [True, True]

    path.write_bytes(record)  # As it was kept before.
    assert verify(path).step == 10
    assert equal(Regression.load_from_checkpoint(path), trained)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)

    for place in (data.index(record) + 5, data.index(record) + len(record) - 2):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert list_checkpoints(tmp_path / "c")[0].record is None
    for size in (len(data) // 2, data.index(record) + len(record) - 1):
        path.write_bytes(data[:size])
        assert list_checkpoints(tmp_path / "c")[0].record is None


def test_a_record_that_torch_opens_holds_no_pickle(tmp_path, trained):
    with zipfile.ZipFile(tmp_path / "c" / "best.ckpt") as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == ["genlight/byteorder", "genlight/record.json", "genlight/version"]
    assert load(tmp_path / "c" / "best.ckpt")["global_step"] == 10
