"""Buffers of the first rank reach the others with one wait for both kinds that a BatchNorm has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.equal_replicas import BufferSync


@pytest.fixture
def done(tmp_path, monkeypatch):
    """What happened to broadcasts, in order, in a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    happened, real = [], dist.broadcast

    class Work:
        def __init__(self, work, kind):
            self.work, self.kind = work, kind

        def wait(self):
            happened.append(f"{self.kind} awaited")
            self.work.wait()

    def broadcast(tensor, **settings):
        happened.append(f"{tensor.dtype} sent")
        return Work(real(tensor, **settings), tensor.dtype)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    yield happened
    dist.destroy_process_group()


def test_statistics_and_counts_of_a_norm_are_both_on_their_way_before_either_is_awaited(done):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sync = BufferSync(discover({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}))

    sync()

    assert [each.split()[1] for each in done] == ["sent", "sent", "awaited", "awaited"]
    assert len({each.split()[0] for each in done}) == 2


def test_buffers_of_many_kinds_are_not_all_held_twice(done):
    model = nn.Linear(2, 2)
    kinds = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"buffer{number}", torch.zeros(2, dtype=kind))
    sync = BufferSync(discover({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}))

    sync()

    on_their_way, most = 0, 0
    for each in done:
        on_their_way += 1 if each.endswith("sent") else -1
        most = max(most, on_their_way)
    assert (on_their_way, most, len(done)) == (0, 2, 10)
