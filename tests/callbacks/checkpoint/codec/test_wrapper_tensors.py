"""Tensors of classes that wrap others, such as the quantized states of an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genlight.adapter.check.snapshot import snapshot
from genlight.adapter.contract.exceptions import CheckpointError
from genlight.callbacks.checkpoint.codec.state_tree import decode, encode, wrapped_tensors
from genlight.callbacks.checkpoint.codec.tensors import TensorTable
from genlight.callbacks.replica_guard import _replicated, _replicated_values
from support.messages import refusal
from support.resumed_fit import STEPS, Trains, fit

pytestmark = pytest.mark.promise(name="checkpoint")


class Quantized(torch.Tensor):
    """Codes of 8 bits and a scale; copying is its only operation."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, bits: int) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor, bits: int) -> None:
        self.codes, self.scale, self.bits = codes, scale, bits

    @classmethod
    def of(cls, tensor: Tensor) -> Quantized:
        scale = tensor.abs().max() / 127 + 1e-12
        return cls((tensor / scale).round().to(torch.int8), scale.reshape(1), 8)

    def dequantize(self) -> Tensor:
        return self.codes * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], list[int]]:
        return ["codes", "scale"], [self.bits]

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, shape: Any, stride: Any) -> Quantized:
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            return cls(args[0].codes, args[0].scale, args[0].bits)
        raise NotImplementedError(func)


class QuantizedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            moment = p.grad if not state else state["moment"].dequantize() * 0.9 + p.grad
            state["moment"] = Quantized.of(moment)
            p.sub_(state["moment"].dequantize(), alpha=self.param_groups[0]["lr"])


class Plugin(Trains):
    def configure(self, ctx: Any) -> dict[str, Any]:
        net = torch.nn.Linear(2, 1)
        return {"net": net, "optimizer": QuantizedMomentum(net.parameters())}


def test_a_run_with_quantized_states_is_saved_and_resumed_exactly(tmp_path: Path) -> None:
    expected = fit(tmp_path / "reference", Plugin(), STEPS)
    fit(tmp_path / "parts", Plugin(), 3)
    resumed = fit(tmp_path / "parts", Plugin(), STEPS, ckpt_path=str(tmp_path / "parts" / "final.json"))

    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_the_inner_tensors_of_a_wrapper_are_compared() -> None:
    tensor = Quantized.of(torch.tensor([1.0, -2.0]))

    assert [name for name, _ in wrapped_tensors("moment", tensor)] == ["codes of moment", "scale of moment"]
    assert [name for name, _ in wrapped_tensors("moment", torch.ones(1))] == ["moment"]
    kept = snapshot({"moment": tensor}, None).digests.keys()
    assert kept == {'codes of state["moment"]', 'scale of state["moment"]'}


@pytest.mark.parametrize("name", ["torch:Tensor", "torch.nn.parameter:Parameter", "collections:OrderedDict"])
def test_a_name_of_another_type_in_a_checkpoint_is_refused(name: str) -> None:
    table = TensorTable()
    tree = encode(Quantized.of(torch.ones(2)), table)

    def tensor_of(reference: dict[str, Any]) -> Tensor:
        keys = [entry.key for entry in table.entries]
        return table.sources[keys.index(reference["key"])]

    assert torch.equal(decode(tree, tensor_of).dequantize(), torch.ones(2))
    tree["$wrapper"][0] = name
    with refusal(CheckpointError):
        decode(tree, tensor_of)


def test_replicas_with_wrappers_are_compared_by_their_inner_tensors() -> None:
    moment = Quantized.of(torch.ones(2))

    class Module:
        def replicated_tensors(self) -> Any:
            yield "moment", moment

        def replicated_values(self) -> Any:
            return [moment]

        def replicated_settings(self) -> Any:
            return ()

    found: Any = list(_replicated(Module(), None))  # type: ignore[arg-type]
    values = _replicated_values(Module(), None)  # type: ignore[arg-type]

    assert [name for name, _ in found] == ["codes of moment", "scale of moment"]
    assert [id(value) for value in values] == [id(tensor) for _, tensor in found]
