"""Bytes of tensors, which leave the tensors as they were."""

from __future__ import annotations

import torch

from genlight.callbacks.checkpoint.codec.tensors import bytes_of


def test_a_tensor_whose_bytes_were_read_can_still_be_resized() -> None:
    # As observers of quantization do with their buffers; numpy's view of a tensor would forbid it for good.
    tensor, filled = torch.tensor([1.0, 2.0]), torch.empty(2)
    bytes_of(filled)[:] = bytes_of(tensor)

    assert tensor.resize_(3)[:2].tolist() == [1.0, 2.0]
    assert filled.resize_(3)[:2].tolist() == [1.0, 2.0]


def test_bytes_are_a_view_of_the_tensor_where_it_lies_in_order() -> None:
    tensor = torch.zeros(2, dtype=torch.uint8)
    memory = bytes_of(tensor)
    tensor[1] = 7

    assert bytes(memory) == b"\0\7"
    assert bytes(bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t())) == b"\1\3\2\4"
    assert bytes(bytes_of(torch.empty(0))) == b""
