"""The rules of the device's process group, on two ranks."""

import pytest
import torch
import torch.distributed as dist


def _mine(size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((size,), dist.get_rank() + 1.0, device="sim", dtype=dtype)


def check_tensors_of_the_host_are_refused():
    for collective in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        with pytest.raises(RuntimeError, match="cpu"):
            collective(torch.ones(2))


def check_sums_and_averages():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for operation, expected in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2)):
            tensor = _mine(dtype=dtype)
            dist.all_reduce(tensor, operation)
            assert tensor.tolist() == [expected] * 4


def check_other_collectives():
    rank = dist.get_rank()
    joined = torch.empty(8, device="sim")
    dist.all_gather_into_tensor(joined, _mine())
    assert joined.tolist() == [1] * 4 + [2] * 4
    share = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(share, _mine())
    assert share.tolist() == [3, 3]
    sent = _mine()
    dist.broadcast(sent, 1)
    assert sent.tolist() == [2] * 4
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def check_asynchronous_results_are_complete_after_waiting():
    tensors = [_mine() for _ in range(3)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for work in works:
        work.wait()
    assert all(each.tolist() == [3] * 4 for each in tensors)
