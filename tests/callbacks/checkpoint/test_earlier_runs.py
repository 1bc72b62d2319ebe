"""A plain Lightning trainer with `Checkpoint`, in a directory that already has checkpoints."""

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.callbacks.checkpoint import Checkpoint, list_checkpoints, save
from support.forked import run_forked
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")

ANOTHER_PROCESS = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from genlight.callbacks import Checkpoint

trainer = pl.Trainer(
    accelerator="cpu", max_steps=2, logger=False, limit_val_batches=0, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[Checkpoint(sys.argv[1], every_n_steps=1)],
)
trainer.fit(BoringModel())
"""


def train_elsewhere(directory):
    program = directory.parent / "another.py"
    program.write_text(ANOTHER_PROCESS)
    run_forked(directory, program=str(program), folder=directory.parent).check_returncode()
    return {path: path.read_bytes() for path in directory.glob("*.json")}


def test_a_fit_from_step_zero_among_other_checkpoints_is_refused_with_the_options(tmp_path, train_net):
    before = train_elsewhere(tmp_path / "c")
    assert before
    for on_error in ("stop", "continue"):
        checkpoint = Checkpoint(tmp_path / "c", every_n_steps=1, on_error=on_error)
        with refusal(StartupContractError) as refused:
            train_net(checkpoint, max_steps=3)
        assert refused.value.code == "startup.artifacts_in_use"
        for option in ("ckpt_path=", "final.json", "`dirpath`", "replace_existing=True"):
            assert option in str(refused.value)
    assert {path: path.read_bytes() for path in (tmp_path / "c").glob("*.json")} == before

    replacing = Checkpoint(tmp_path / "c", every_n_steps=1, replace_existing=True)
    train_net(replacing, max_steps=3)
    assert list_checkpoints(tmp_path / "c")[-1].record.step == 3


def test_a_broken_checkpoint_of_another_run_is_not_trained_over(tmp_path, train_net):
    (tmp_path / "step-00000001.json").write_bytes(b'{"format":"genlight.checkpoint"')
    with refusal(StartupContractError):
        train_net(Checkpoint(tmp_path), max_steps=2)


def test_other_files_do_not_prevent_a_fit(tmp_path, train_net):
    (tmp_path / "notes.json").write_text("{}")
    save(tmp_path / "by-hand", {"x": 1})
    train_net(Checkpoint(tmp_path), max_steps=2)


def test_one_process_may_fit_again_in_its_own_directory(tmp_path, train_net, make_trainer, make_net, make_loader):
    trainer = make_trainer(Checkpoint(tmp_path / "c", every_n_steps=1), max_steps=2, num_sanity_val_steps=1)
    trainer.fit(make_net(), make_loader())
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(make_net(), make_loader())
    train_net(Checkpoint(tmp_path / "c", every_n_steps=1), max_steps=2)


def test_best_finds_a_checkpoint_of_genlight_before_training(tmp_path, train_net, make_trainer, make_net, make_loader):
    train_net(Checkpoint(tmp_path, every_n_steps=1, save_final=False), max_steps=2)
    trainer = make_trainer(Checkpoint(tmp_path, every_n_steps=1), max_steps=4)
    trainer.fit(make_net(), make_loader(), ckpt_path="best")
    assert trainer.ckpt_path == str(tmp_path / "step-00000002.json")
    assert trainer.global_step == 4


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_last_finds_only_lightnings_files_and_overwrites_nothing(tmp_path, train_net):
    train_elsewhere(tmp_path / "c")
    with refusal(StartupContractError):
        train_net(Checkpoint(tmp_path / "c"), max_steps=4, ckpt_path="last")
