"""A trainer's own collectives are announced, and work as they would without genlight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from genlight.adapter.gradients import collective_patch


@pytest.fixture
def announced():
    """The names of the collectives that are called, in a group of one rank."""
    names: list[str] = []
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    collective_patch.patch(names.append)
    yield names
    collective_patch.restore()
    dist.destroy_process_group()


def test_point_to_point_operations_are_those_that_torch_compares_with(announced):
    """Both ways to name them; gloo has no way from a rank to itself, so that the zoo sends."""
    for owner in (dist, dist.distributed_c10d):
        assert dist.P2POp(owner.isend, torch.ones(3), 0).op is dist.distributed_c10d.isend
        assert dist.P2POp(owner.irecv, torch.zeros(3), 0).op is dist.distributed_c10d.irecv
    assert announced == []


def test_the_newer_names_of_collectives_are_announced_too(announced):
    rows = torch.zeros(2)
    dist.all_gather_single(rows, torch.ones(2))
    dist.reduce_scatter_single(rows, torch.ones(2))

    assert announced == ["all_gather_single", "reduce_scatter_single"]
