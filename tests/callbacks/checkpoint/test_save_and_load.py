"""Saving and loading complete checkpoints."""

import json
import os

import pytest
import torch
from safetensors import safe_open

from genlight.adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from genlight.callbacks.checkpoint import RecordMeta, load, read_record, save, verify
from genlight.callbacks.checkpoint.storage import stage
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def dump(model, optimizer, state=None):
    return {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": 7,
        "genlight": {"state": state or {}, "attempt": 1},
    }


def test_the_layout_on_disk_is_a_record_next_to_a_folder(tmp_path, trained):
    record = save(tmp_path / "step-00000007", dump(*trained), meta=RecordMeta(run_id="r", attempt=2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000007.json"]
    content = json.loads((tmp_path / "step-00000007.json").read_text())
    assert (content["step"], content["run_id"], content["attempt"]) == (7, "r", 2)
    assert {file.path for file in record.files} == {
        f"step-00000007/{name}" for name in os.listdir(tmp_path / "step-00000007")
    }


def test_model_file_is_complete_for_safetensors_if_weights_are_tied(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    save(tmp_path / "a", {"state_dict": model.state_dict()})
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"0.weight", "1.weight"}
        assert torch.equal(file.get_tensor("0.weight"), file.get_tensor("1.weight"))
    weights = load(tmp_path / "a")["state_dict"]
    assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()


def test_tensors_shared_by_trainer_and_model_are_stored_once(tmp_path, trained):
    model, optimizer = trained
    plain = save(tmp_path / "a", dump(model, optimizer))
    shared = save(tmp_path / "b", dump(model, optimizer, {"model": model.state_dict(), "opt": optimizer.state_dict()}))
    tensors = [
        {f.path.split("/")[1]: f.size for f in record.files if f.path.endswith(".safetensors")}
        for record in (plain, shared)
    ]
    assert tensors[0] == tensors[1]
    loaded = load(tmp_path / "b")
    assert loaded["genlight"]["state"]["model"]["0.weight"] is loaded["state_dict"]["0.weight"]


def test_files_of_the_trainers_hook_belong_to_the_checkpoint(tmp_path):
    staging = stage(tmp_path / "c" / "step-00000001.json")
    output = staging.folder("trainer")
    (output / "sub").mkdir()
    (output / "sub" / "lora.bin").write_bytes(b"lora")
    meta = RecordMeta(trainer_checkpoint={"primary_path": str(output / "sub" / "lora.bin"), "rank": 4})

    record = save(tmp_path / "c" / "step-00000001", {}, meta=meta, staging=staging)

    assert record.trainer_checkpoint == {"primary_path": "sub/lora.bin", "rank": 4}
    assert record.primary_path.read_bytes() == b"lora"
    assert "trainer/sub/lora.bin" in {record.file_name(file) for file in record.files}
    record.primary_path.write_bytes(b"LORA")
    with refusal(BrokenCheckpointError):
        verify(record.path)


def test_a_link_of_the_trainers_hook_is_refused_by_name_and_nothing_is_written(tmp_path):
    staging = stage(tmp_path / "c" / "step-00000001.json")
    (staging.folder("trainer") / "base.bin").symlink_to(tmp_path / "base")
    with refusal(CheckpointError):
        save(tmp_path / "c" / "step-00000001", {}, staging=staging)
    assert os.listdir(tmp_path / "c") == []


def test_a_record_of_the_older_runtime_returns_its_state_unchanged(tmp_path):
    state = {"w": [1.5], "$tuple": [1]}
    (tmp_path / "step-00000012.json").write_text(json.dumps({"state": state, "request_id": "old"}))
    record = read_record(tmp_path / "step-00000012.json")
    assert (record.is_old, record.step, record.run_id) == (True, 12, "old")
    assert load(tmp_path / "step-00000012")["genlight"]["state"] == state


@pytest.mark.parametrize(("name", "content", "step"), [("step-00000005", {"step": 9}, 9), ("resume", {}, 0)])
def test_the_step_of_an_older_record_comes_from_its_content_or_its_name(tmp_path, name, content, step):
    (tmp_path / f"{name}.json").write_text(json.dumps({"state": {}, **content}))
    assert read_record(tmp_path / f"{name}.json").step == step
