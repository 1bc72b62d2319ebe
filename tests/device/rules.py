"""The rules of the device: each check is a mistake that it detects or a correct program that works."""

import copy
import ctypes
import os
import signal
import threading

import pytest
import torch
from torch import nn

from support.device import races, waits


def check_the_host_cannot_read_its_memory():
    tensor = torch.ones(4, device="sim")
    child = os.fork()
    if child == 0:
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def check_tensors_of_host_and_device_do_not_mix():
    on_device = torch.ones(3, device="sim")
    assert (on_device * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a single number may come from the host
    for operation in (torch.add, torch.dot, torch.outer):
        with pytest.raises(RuntimeError, match="same device"):
            operation(on_device, torch.ones(3))


def check_backward_runs_in_a_thread_of_the_device():
    weight, threads = torch.ones(3, device="sim", requires_grad=True), []
    weight.register_hook(lambda gradient: threads.append(threading.get_ident()))
    weight.pow(2).sum().backward()
    assert threads != [threading.get_ident()]
    assert weight.grad.tolist() == [2, 2, 2]


def check_uninitialized_memory_is_nan():
    assert torch.empty(5, device="sim").isnan().all()
    assert torch.empty(5).pin_memory().is_pinned()


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


def check_each_device_has_its_own_random_numbers():
    states = torch.sim.get_rng_state_all()
    drawn = [torch.rand(3, device=f"sim:{index}") for index in range(2)] + [torch.rand(3)]
    assert len({tuple(each.tolist()) for each in drawn}) == 3
    host = torch.get_rng_state()
    nn.functional.dropout(torch.ones(8, device="sim"), 0.5)
    assert torch.equal(torch.get_rng_state(), host)
    torch.sim.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="sim:1"), drawn[1])
    torch.manual_seed(3)
    first = torch.randn(3, device="sim")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(3, device="sim"), first)


def check_devices_and_streams():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    before = torch.accelerator.current_stream()
    with torch.Stream("sim") as stream:
        assert torch.accelerator.current_stream() == stream != before
    with torch.sim.device(1):
        assert torch.zeros(1, device="sim").device.index == 1
    assert torch.zeros(1, device="sim").device.index == 0
    events = [torch.Event("sim", enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    torch.accelerator.synchronize()
    assert events[0].elapsed_time(events[1]) >= 0


def check_memory_is_counted():
    before = torch.accelerator.memory_allocated()
    tensor = torch.zeros(1 << 20, device="sim")
    assert torch.accelerator.memory_allocated() - before == tensor.nbytes
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + (4 << 20)


def check_networks_train_as_on_the_host():
    torch.manual_seed(0)
    networks = {
        "convolution": (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)),
            (5, 1, 6, 6),
        ),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 4, 8)),
        "gru": (nn.GRU(6, 4, batch_first=True), (3, 5, 6)),
        "lstm": (nn.LSTM(6, 4, batch_first=True), (3, 5, 6)),
    }
    for name, (network, shape) in networks.items():
        data, found = torch.randn(shape), []
        for place in ("cpu", "sim"):
            mine = copy.deepcopy(network).to(place)
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            for _ in range(3):
                output = mine(data.to(place))
                loss = (output[0] if isinstance(output, tuple) else output).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found.append([tensor.detach().cpu() for tensor in mine.state_dict().values()])
        for host, device in zip(*found, strict=True):
            torch.testing.assert_close(
                device, host, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def check_a_module_that_moves_keeps_its_parameters():
    network = nn.Linear(3, 3)
    weight, tied = network.weight, nn.Linear(3, 3)
    tied.weight = weight
    nn.Sequential(network, tied).to("sim")
    assert tied.weight is network.weight is weight
    assert weight.device.type == "sim"


def check_conjugated_views_are_copied_as_such():
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    on_device = numbers.to("sim").conj()
    assert torch.equal(on_device.cpu(), numbers.conj())
    assert torch.equal((on_device * 2).cpu(), numbers.conj() * 2)
    assert torch.equal(torch.zeros(2, dtype=numbers.dtype, device="sim").copy_(on_device).imag.cpu(), -numbers.imag)
