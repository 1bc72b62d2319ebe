"""Model components from safetensors, on the requested device and in the requested precision."""

import json

import pytest
import torch
from safetensors.torch import save_file

from genlight.adapter.contract.exceptions import InputError
from genlight.adapter.helpers.components import load_components
from support.messages import refusal


@pytest.fixture
def save(tmp_path):
    def run(name, **tensors):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)

    return run


def test_each_folder_is_a_component_and_the_root_is_the_model(tmp_path, save):
    save("model.safetensors", a=torch.ones(2))
    save("unet/diffusion_pytorch_model.safetensors", b=torch.ones(3))
    save("text/encoder/weights.safetensors", c=torch.ones(4))
    components = load_components(tmp_path, "cpu", "fp32")
    assert {name: list(tensors) for name, tensors in components.items()} == {
        "model": ["a"],
        "text/encoder": ["c"],
        "unet": ["b"],
    }


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_floating_tensors_get_the_precision_and_others_keep_their_type(tmp_path, save, name, dtype):
    save("model.safetensors", w=torch.rand(3), h=torch.rand(3).half(), i=torch.tensor([2**40]), b=torch.tensor([True]))
    for given in (name, dtype):
        model = load_components(tmp_path, "cpu", given)["model"]
        assert {key: tensor.dtype for key, tensor in model.items()} == {
            "w": dtype,
            "h": dtype,
            "i": torch.int64,
            "b": torch.bool,
        }
    assert model["i"].item() == 2**40


def test_tensors_go_straight_to_the_device(tmp_path, save):
    save("model.safetensors", w=torch.rand(3))
    assert load_components(tmp_path, torch.device("meta"), "fp32")["model"]["w"].device.type == "meta"


def test_shards_are_joined_by_their_index(tmp_path, save):
    save("unet/m-00001-of-00002.safetensors", a=torch.ones(1))
    save("unet/m-00002-of-00002.safetensors", b=torch.ones(1))
    index = {"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}
    (tmp_path / "unet" / "m.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(load_components(tmp_path, "cpu", "fp32")["unet"]) == ["a", "b"]
    (tmp_path / "unet" / "m-00002-of-00002.safetensors").unlink()
    with refusal(InputError):
        load_components(tmp_path, "cpu", "fp32")


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_broken_index_is_an_input_error(tmp_path, save, content):
    save("other.safetensors", a=torch.ones(1))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with refusal(InputError):
        load_components(tmp_path, "cpu", "fp32")


def test_variant_next_to_the_plain_file_is_skipped(tmp_path, save):
    save("model.safetensors", w=torch.ones(1))
    save("model.fp16.safetensors", w=torch.zeros(1))
    assert load_components(tmp_path, "cpu", "fp32")["model"]["w"].item() == 1.0


def test_a_tensor_in_two_files_is_an_error_that_names_it(tmp_path, save):
    save("a.safetensors", w=torch.ones(1))
    save("b.safetensors", w=torch.zeros(1))
    with refusal(InputError):
        load_components(tmp_path, "cpu", "fp32")


def test_an_unreadable_file_is_an_input_error_that_names_it(tmp_path, save):
    with refusal(InputError):
        load_components(tmp_path / "none", "cpu", "fp32")
    with refusal(InputError):
        load_components(tmp_path, "cpu", "fp32")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with refusal(InputError):
        load_components(tmp_path, "cpu", "fp32")


def test_an_unknown_precision_is_a_value_error(tmp_path, save):
    save("model.safetensors", w=torch.ones(1))
    with refusal(ValueError):
        load_components(tmp_path, "cpu", "int8")
