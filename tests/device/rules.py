"""The rules of the device: each check is a mistake that it detects or a correct program that works."""

import ctypes
import os
import signal

import torch

from support.device import races, waits


def check_the_host_cannot_read_its_memory():
    tensor = torch.ones(4, device="sim")
    child = os.fork()
    if child == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def check_a_late_copy_arrives_with_its_event():
    target, event = torch.zeros(3).pin_memory(), torch.Event("sim")
    with waits() as found:
        target.copy_(torch.ones(3, device="sim"), non_blocking=True)
        event.record()
        assert target.isnan().all()
        assert not event.query()
    assert not found
    with waits() as found:
        event.synchronize()
    assert target.tolist() == [1, 1, 1]
    assert [wait.kind for wait in found] == ["event"]


def check_a_source_that_changes_too_early_is_reported():
    source, target = torch.ones(3).pin_memory(), torch.zeros(3, device="sim")
    target.copy_(source, non_blocking=True)
    source.zero_()
    torch.accelerator.synchronize()
    assert len(races()) == 1
    assert __file__ in races()[0], races()


def check_waits_have_their_places():
    tensor = torch.arange(3.0, device="sim")
    with waits() as found:
        loss = (tensor * 2).sum().add_(1)
        assert not found, found
        loss.item()
        loss.cpu()
        torch.ones(2).to("sim")
        tensor.nonzero()
        torch.accelerator.synchronize()
    kinds = ["item", "copy to host", "copy to device", "operator", "device"]
    assert [wait.kind for wait in found] == kinds, found
    assert all(wait.frames[-1].filename == __file__ or "torch" in wait.frames[-1].filename for wait in found)
