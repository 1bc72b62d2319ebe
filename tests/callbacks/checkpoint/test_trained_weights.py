"""Checkpoints without frozen weights: a resume takes these from the class, if they are the same."""

import json

import pytest
import safetensors.torch
import torch

from genlight.adapter.cli import main
from genlight.adapter.contract.exceptions import CheckpointError
from genlight.adapter.contract.types import TrainingJobSpec
from genlight.adapter.module.module import ContractModule
from genlight.callbacks.checkpoint import list_checkpoints, load, load_weights, read_record, verify
from genlight.callbacks.checkpoint.contents import check_contents
from support.adapted_model import FROZEN_BYTES, Adapted, assert_equal
from support.messages import refusal

pytestmark = [pytest.mark.promise(name="resume"), pytest.mark.filterwarnings("ignore:You're resuming")]


def left_out(path):
    return {left.key for left in read_record(path).left_out}


FROZEN = {key for key in Adapted().state_dict() if key.startswith("base.")}


def test_frozen_weights_are_in_no_checkpoint_and_a_resume_ends_with_the_same_bits(train, tmp_path):
    expected = train(Adapted(), 10, weights="trained")
    sizes = [listed.record.size_bytes for listed in list_checkpoints(tmp_path / "c")]
    (tmp_path / "c").rename(tmp_path / "other")
    train(Adapted(), 6, weights="trained")

    resumed = train(Adapted(), 10, resume=tmp_path / "c" / "step-00000006.json", weights="trained")

    assert max(sizes) < FROZEN_BYTES
    assert_equal(resumed.state_dict(), expected.state_dict())
    for listed in list_checkpoints(tmp_path / "c"):
        check_contents(verify(listed.path))
        assert left_out(listed.path) == FROZEN
        assert listed.record.finite_weights
        assert_equal(load_weights(listed.path, base=Adapted().state_dict()), expected.seen[listed.record.step])


def test_a_changed_base_is_refused_by_name_with_both_digests_and_the_remedy(train, tmp_path):
    train(Adapted(), 2, weights="trained")
    record = read_record(tmp_path / "c" / "step-00000002.json")
    [saved] = [left for left in record.left_out if left.key == "base.1.weight"]
    other = Adapted()
    other.base[1].weight.data[3, 3] += 1

    with pytest.raises(CheckpointError) as refused:
        train(other, 4, resume=record.path, weights="trained")

    message = str(refused.value)
    assert f" with the digest {saved.xxh3_128}, and the module has " in message
    assert "build the module, unsharded, with the base that it was trained with, or begin a new run" in message


def test_a_base_of_another_shape_or_without_a_tensor_is_refused(train, tmp_path):
    train(Adapted(), 2, weights="trained")
    path, base = tmp_path / "c" / "step-00000002.json", Adapted().state_dict()

    with refusal(CheckpointError):
        load(path, base=base | {"base.1.weight": torch.zeros(5)})
    base.pop("base.1.weight")
    with refusal(CheckpointError):
        load(path, base=base)


class Edited(Adapted):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            self.base[2].weight.data.mul_(2)


def test_weights_that_differ_from_those_that_the_class_built_are_saved(train, tmp_path):
    module = train(Edited(), 8, weights="trained")
    changed = {"base.2.weight"}

    assert left_out(tmp_path / "c" / "step-00000002.json") == FROZEN
    for step in (4, 6, 8):
        path = tmp_path / "c" / f"step-{step:08d}.json"
        assert left_out(path) == FROZEN - changed
        assert_equal(load_weights(path, base=Adapted().state_dict()), module.seen[step])


def test_weights_that_changed_before_a_resume_are_still_saved_after_it(train, tmp_path):
    train(Edited(), 4, weights="trained")

    resumed = train(Adapted(), 8, resume=tmp_path / "c" / "step-00000004.json", weights="trained")

    newest = tmp_path / "c" / "step-00000008.json"
    assert left_out(newest) == FROZEN - {"base.2.weight"}
    assert_equal(load_weights(newest, base=Adapted().state_dict()), resumed.seen[8])


@pytest.mark.parametrize("first", ["all", "trained"])
def test_a_run_may_change_its_weights_setting_and_saves_the_weights_of_its_checkpoint(train, tmp_path, first):
    other = {"all": "trained", "trained": "all"}[first]
    train(Adapted(), 2, weights=first)

    module = train(Adapted(), 4, resume=tmp_path / "c" / "step-00000002.json", weights=other)

    newest = tmp_path / "c" / "step-00000004.json"
    assert left_out(newest) == set()
    assert_equal(load_weights(newest), module.seen[4])


def test_a_load_without_a_base_names_the_missing_tensors_and_the_remedy(train, tmp_path, capsys):
    module = train(Adapted(), 2, weights="trained")
    path = tmp_path / "c" / "step-00000002.json"
    missing = r"step-00000002 omits 8 tensors \(base.0.weight, .* 3 more\).*load\(path, base=module.state_dict\(\)\)"

    for read in (load, load_weights):
        with pytest.raises(CheckpointError, match=missing):
            read(path)
    assert_equal(dict(load(path, base=Adapted().state_dict())["state_dict"]), module.seen[2])

    target, base = tmp_path / "all.safetensors", tmp_path / "base.safetensors"
    safetensors.torch.save_file(Adapted().state_dict(), base)
    assert main(["checkpoints", "export", str(path), "--to", str(target)]) == 2
    assert "--base FILE.safetensors" in capsys.readouterr().err
    assert main(["checkpoints", "export", str(path), "--to", str(target), "--base", str(base)]) == 0
    assert_equal(safetensors.torch.load_file(target), module.seen[2])
    assert main(["checkpoints", "verify", str(path)]) == 0
    assert "8 tensors omitted" in capsys.readouterr().out


ADAPTER = '''
import torch
from support.trainer_class import Trains


class Trainer(Trains):
    """A class whose payload contains the frozen weights too."""

    def configure(self, ctx):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(40, 40).requires_grad_(False), torch.nn.Linear(40, 2))
        return {"model": model, "optimizer": torch.optim.SGD(model[1].parameters(), lr=0.1)}

    def prepare_batch(self, raw_batch, state, ctx):
        return torch.ones(2, 40)
'''


def test_a_job_omits_weights_that_its_class_builds(tmp_path, caplog):
    (tmp_path / "adapter_of_job.py").write_text(ADAPTER)
    job = {
        "run_id": "adapted",
        "trainer": "adapter_of_job:Trainer",
        "max_steps": 4,
        "checkpoint_every": 2,
        "checkpoints": {"weights": "trained"},
        "resume_from_latest": True,
        "mock_batches": [{}] * 8,
        "lightning": {"accelerator": "cpu"},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert main(["run", str(tmp_path / "job.json")]) == 0
    assert main(["run", str(tmp_path / "job.json"), "--set", "max_steps=6"]) == 0
    checkpoints = tmp_path / "runs" / "adapted" / "checkpoints"

    record = read_record(checkpoints / "final.json")

    assert (record.step, record.attempt) == (6, 2)
    assert len(record.left_out) == 2
    assert sum(file.size for file in record.files if file.path.endswith("model.safetensors")) < 40 * 40 * 4
    assert main(["run", str(tmp_path / "job.json"), "--set", "checkpoints.weights=some"]) == 2
    assert 'Invalid `checkpoints.weights`. Expected "all" or "trained"' in caplog.text
    module = ContractModule.load_from_checkpoint(
        checkpoints / "final.json", plugin="adapter_of_job:Trainer", job=TrainingJobSpec("adapted", 6)
    )
    assert module.contract_state["model"][0].weight.shape == (40, 40)
