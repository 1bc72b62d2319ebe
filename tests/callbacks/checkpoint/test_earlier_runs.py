"""A plain Lightning trainer with `Checkpoint`, in a directory that already has checkpoints."""

import pytest

from genlight.adapter.contract.exceptions import StartupContractError
from genlight.callbacks.checkpoint import Checkpoint, RecordMeta, list_checkpoints, save
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


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
@pytest.mark.parametrize("ckpt_path", [None, "last"])  # "last" finds only Lightning's own files
def test_checkpoints_of_another_run_are_replaced_only_on_request(tmp_path, train_net, ckpt_path):
    meta = RecordMeta(run_id="another", writer="Checkpoint")
    before = save(tmp_path / "step-00000002", {"global_step": 2}, meta=meta).path.read_bytes()
    with refusal(StartupContractError) as refused:
        train_net(Checkpoint(tmp_path, every_n_steps=1), max_steps=3, ckpt_path=ckpt_path)
    assert refused.value.code == "startup.artifacts_in_use"
    assert (tmp_path / "step-00000002.json").read_bytes() == before

    train_net(Checkpoint(tmp_path, every_n_steps=1, replace_existing=True), max_steps=3)
    assert list_checkpoints(tmp_path)[-1].record.step == 3
