"""The bytes of tensors, and digests that differ if the bytes differ, computed on the tensor's device."""

import pytest
import torch

from genlight.callbacks.checkpoint.codec.tensors import as_uint8, bytes_of, content_digests, device_digest

pytestmark = pytest.mark.promise(name="checkpoint")

TENSORS = {
    "seven floats": torch.randn(7),
    "half words": torch.randn(3).bfloat16(),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.randn(9).to(torch.complex64),
    "tiny floats": torch.randn(8).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
    "one of a strided row": torch.randn(10)[3:4].as_strided((1,), (5,)),
    "within another": torch.randn(9)[1:],
    "many": torch.randn(1000, 33),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_changed_bit_changes_the_digest(tensor):
    before = device_digest(tensor)
    changed = tensor.clone()
    memory = as_uint8(changed)

    assert torch.equal(before, device_digest(tensor.clone()))
    for bit in range(min(memory.numel() * 8, 200)):
        memory[bit // 8] ^= 1 << bit % 8
        assert before[0] != device_digest(changed)[0]
        assert content_digests([tensor]) != content_digests([changed])
        memory[bit // 8] ^= 1 << bit % 8
    assert content_digests([tensor]) == content_digests([changed])


def test_the_order_of_the_values_counts_but_not_the_order_in_memory():
    tensor = torch.randn(5, 7)

    assert torch.equal(device_digest(tensor), device_digest(tensor.t().contiguous().t()))
    assert not torch.equal(device_digest(tensor), device_digest(tensor.t()))


def test_swapped_chunks_of_a_large_tensor_change_the_digest(monkeypatch):
    tensor = torch.randn(1000)
    expected = device_digest(tensor)
    monkeypatch.setattr("genlight.callbacks.checkpoint.codec.tensors._CHUNK", 64)

    assert torch.equal(device_digest(tensor), expected)
    assert not torch.equal(device_digest(torch.cat([tensor[128:256], tensor[:128], tensor[256:]])), expected)


def test_threads_of_the_host_do_not_change_digests(monkeypatch):
    tensors = [torch.randn(size) for size in (3, 5000, 0, 700, 90_000)]
    expected = content_digests(tensors)
    monkeypatch.setattr("genlight.callbacks.checkpoint.codec.tensors._WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    assert content_digests(tensors) == expected


def test_an_empty_tensor_has_a_digest():
    assert device_digest(torch.empty(0)).tolist() == [0, 0]
    assert len(set(content_digests([torch.empty(0), torch.empty(0, 3), torch.empty(0)]))) == 2


def test_a_tensor_whose_bytes_were_read_can_still_be_resized() -> None:
    # Observers of quantization resize their buffers; a numpy view of a tensor would forbid it forever.
    tensor, filled = torch.tensor([1.0, 2.0]), torch.empty(2)
    bytes_of(filled)[:] = bytes_of(tensor)

    assert tensor.resize_(3)[:2].tolist() == [1.0, 2.0]
    assert filled.resize_(3)[:2].tolist() == [1.0, 2.0]


def test_bytes_are_a_view_of_a_contiguous_tensor() -> None:
    tensor = torch.zeros(2, dtype=torch.uint8)
    memory = bytes_of(tensor)
    tensor[1] = 7

    assert bytes(memory) == b"\0\7"
    assert bytes(bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t())) == b"\1\3\2\4"
    assert bytes(bytes_of(torch.empty(0))) == b""
