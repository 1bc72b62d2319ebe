"""Slices of sharded tensors: their coverage, the reads of their parts, and their behavior as tensors."""

import copy
import os

import msgspec
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from genlight.adapter.contract.exceptions import BrokenCheckpointError, CheckpointError
from genlight.callbacks.checkpoint import CheckpointStore, load, read_record, save, verify
from genlight.callbacks.checkpoint.capture import capture
from genlight.callbacks.checkpoint.format.record import CheckpointRecord, RecordMeta, digest_of
from genlight.callbacks.checkpoint.format.slice_index import Box, SlicedTensor, StoredSlice, tile_exactly
from genlight.callbacks.checkpoint.loading import StoredSlices, load_record
from genlight.callbacks.checkpoint.sharded.slices import WholeTensor, keep_sharded, view_of_part, whole
from genlight.callbacks.checkpoint.storage import Staging, stage
from genlight.callbacks.checkpoint.writing import require_shared_directory, write_checkpoint
from genlight.callbacks.rank_channel import Channel, RankGroups
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


def load_lazily(path):
    """Load a checkpoint like a rank that reads its own slices."""
    return load_record(read_record(path), share=(0, 1))


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([Box((0, 0), (4, 6))], True),
        ([Box((0, 0), (3, 6)), Box((3, 0), (1, 6))], True),
        ([Box((0, 3), (4, 3)), Box((0, 0), (4, 3))], True),
        ([Box((0, 0), (2, 3)), Box((0, 3), (2, 3)), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))], True),
        ([], False),
        ([Box((0, 0), (3, 6))], False),
        ([Box((0, 0), (3, 6)), Box((2, 0), (1, 6))], False),
        ([Box((0, 0), (4, 3)), Box((0, 0), (4, 3))], False),
        ([Box((0, 0), (3, 6)), Box((4, 0), (1, 6))], False),
    ],
)
def test_slices_tile_a_tensor_without_gap_and_overlap(boxes, expected):
    assert tile_exactly((4, 6), boxes) is expected


@pytest.fixture
def stored(tmp_path):
    values = torch.randn(3 * 1024, 512)
    slices = []
    (tmp_path / "step-1" / "rank-00000").mkdir(parents=True)
    with open(tmp_path / "step-1" / "rank-00000" / "model.safetensors", "wb") as file:
        file.write(b"header")
        for first in range(0, 3 * 1024, 1024):
            data = memoryview(values[first : first + 1024].numpy()).cast("B")
            slices.append(StoredSlice(0, Box((first, 0), (1024, 512)), file.tell(), digest_of(data)))
            file.write(data)
    record = CheckpointRecord(path=tmp_path / "step-1.json", step=1, run_id="", state={}, folder="step-1", files=())
    return values, StoredSlices(
        record, SlicedTensor("model.safetensors", "w", "float32", (3 * 1024, 512), tuple(slices)), {}
    )


@pytest.mark.parametrize(
    ("part", "count"),
    [
        (Box((0, 0), (3 * 1024, 512)), 3),
        (Box((0, 0), (512, 512)), 1),
        (Box((512, 0), (1024, 512)), 2),
        (Box((1000, 7), (100, 3)), 2),
        (Box((0, 0), (0, 512)), 0),
    ],
)
def test_any_part_is_read_from_the_slices_that_hold_it_and_no_others(stored, monkeypatch, part, count):
    values, slices = stored
    read = []
    real = StoredSlices._slice

    def counted(self, slice_):
        read.append(slice_)
        return real(self, slice_)

    monkeypatch.setattr(StoredSlices, "_slice", counted)

    assert torch.equal(slices.read(part), view_of_part(part, values, of=Box((0, 0), tuple(values.shape))))
    assert len(read) == count


def test_a_flipped_bit_is_detected_by_reads_of_its_slice_only(stored, tmp_path):
    values, slices = stored
    path = tmp_path / "step-1" / "rank-00000" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[(2 << 20) + 99] ^= 1
    path.write_bytes(data)

    assert torch.equal(slices.read(Box((0, 0), (512, 512))), values[:512])
    with refusal(BrokenCheckpointError):
        slices.read(Box((1024, 0), (1, 512)))


@pytest.fixture
def sharded(mesh):
    return distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])


def save_in_parts(directory, state) -> None:
    CheckpointStore().save(directory / "step-00000001", state, groups=RankGroups())


@pytest.fixture
def lazy(sharded, tmp_path) -> WholeTensor:
    save_in_parts(tmp_path, {"w": sharded})
    return load_lazily(tmp_path / "step-00000001.json")["w"]


def test_a_sharded_tensor_is_gathered_unless_it_is_saved(sharded):
    assert type(whole(sharded)) is torch.Tensor
    assert whole(3) == 3
    with keep_sharded():
        assert whole(sharded) is sharded


def test_attributes_are_known_without_reading_values(lazy, monkeypatch):
    monkeypatch.setattr(StoredSlices, "read", lambda *_: pytest.fail("read"))

    facts = (lazy.shape, lazy.dtype, lazy.device.type, lazy.numel(), lazy.nbytes)
    assert facts == ((4, 3), torch.float32, "cpu", 12, 48)
    assert "WholeTensor(shape=(4, 3)" in repr(lazy)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: t[1:],
        lambda t: float(t.sum()),
        lambda t: torch.stack([t, t]),
        lambda t: torch.empty(4, 3).copy_(t),
        lambda t: t.half().float(),
        lambda t: copy.deepcopy(t) * 2,
        lambda t: t.detach().clone().to("cpu"),
    ],
)
def test_a_lazy_tensor_behaves_like_the_complete_tensor(lazy, use):
    torch.testing.assert_close(use(lazy), use(torch.arange(12.0).view(4, 3)))


def test_a_lazy_tensor_is_sharded_like_the_tensor_that_it_meets(sharded, lazy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(StoredSlices, "whole", lambda _: pytest.fail("read the whole"))
        target = DTensor.from_local(torch.zeros(4, 3), sharded.device_mesh, [Shard(0)])
        target.copy_(lazy)
    assert torch.equal(target.to_local(), torch.arange(12.0).view(4, 3))
    lazy.add_(1)
    assert torch.equal((sharded - lazy).to_local(), -torch.ones(4, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_slices_of_every_type_come_back_equal(mesh, tmp_path, dtype):
    values = torch.arange(12).view(4, 3).to(torch.float32 if "float8" in str(dtype) else dtype).to(dtype)
    save_in_parts(tmp_path, {"state_dict": {"w": DTensor.from_local(values, mesh, [Shard(0)])}, "also": {"w": values}})

    loaded = load(tmp_path / "step-00000001")
    assert loaded["state_dict"]["w"].dtype == dtype
    assert loaded["state_dict"]["w"].tolist() == loaded["also"]["w"].tolist() == values.tolist()
    sliced = load_lazily(tmp_path / "step-00000001.json")["state_dict"]["w"]
    assert isinstance(sliced, WholeTensor)
    assert sliced.tolist() == values.tolist()


def test_the_same_weights_in_the_trainers_payload_are_stored_once(sharded, tmp_path):
    save_in_parts(tmp_path, {"state_dict": {"w": sharded}, "genlight": {"state": {"model": {"w": sharded.detach()}}}})

    record = verify(tmp_path / "step-00000001")
    names = [name for f in record.files if "rank-" in (name := record.file_name(f))]
    assert names == ["rank-00000/model.safetensors"]
    loaded = load(tmp_path / "step-00000001")
    assert loaded["genlight"]["state"]["model"]["w"] is loaded["state_dict"]["w"]


def test_a_save_by_only_rank_zero_refuses_sharded_tensors_by_name(sharded, tmp_path):
    with refusal(CheckpointError):
        save(tmp_path / "step-00000001", {"state_dict": {"w": sharded}})
    assert os.listdir(tmp_path) == []


def test_ranks_with_different_sharded_tensors_than_rank_zero_are_refused(sharded, tmp_path):
    record = tmp_path / "step-00000001.json"
    captured = capture({"state_dict": {"w": sharded}}, RecordMeta(), stage(record))
    weights = captured.sharded_tensors["model.safetensors", "w"]
    captured.sharded_tensors["model.safetensors", "v"] = msgspec.structs.replace(weights, key="v")

    with refusal(CheckpointError):
        write_checkpoint(Channel(), captured)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_a_rank_does_not_see_is_named_with_rank_and_host(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr("genlight.callbacks.checkpoint.writing.VISIBLE_WITHIN_S", 0.0)
    staging = Staging(tmp_path / "step-00000001.json", tmp_path / "on-another-node")
    captured = capture({"state_dict": {"w": sharded}}, RecordMeta(), staging)

    with pytest.raises(CheckpointError, match=rf"rank 0 on \S+ does not see in {tmp_path} the files of rank 0: .* all"):
        write_checkpoint(Channel(), captured)


def test_a_shared_directory_is_left_unchanged(tmp_path):
    require_shared_directory(Channel(), tmp_path / "checkpoints")
    assert os.listdir(tmp_path / "checkpoints") == []


def test_space_is_checked_for_all_parts_together(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(Channel, "gather", lambda self, nbytes: [nbytes, 1 << 60])

    with refusal(CheckpointError):
        save_in_parts(tmp_path / "c", {"state_dict": {"w": sharded}})
    assert os.listdir(tmp_path / "c") == []
