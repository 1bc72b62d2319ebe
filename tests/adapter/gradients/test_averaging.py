"""Gradients are averaged before they are used, and no more often."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.discovery.discover import Discovered, discover
from genlight.adapter.gradients import rank_check
from genlight.adapter.gradients.ddp.averaging import Averaging
from genlight.adapter.gradients.ddp.buckets import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    AveragedParameters,
    Bucket,
    group_tensors,
)
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepHooks, StepRouter
from support.messages import refusal

pytestmark = pytest.mark.promise(name="ranks")

CPU = torch.device("cpu")


def routed(discovered: Discovered, hooks: StepHooks | None = None, bucket_bytes: int = BUCKET_BYTES) -> StepRouter:
    averaging = Averaging(discovered, CPU, bucket_bytes=bucket_bytes)
    return StepRouter(discovered, CPU, precision=StepPrecision("fp32"), hooks=hooks, averaging=averaging)


@pytest.fixture
def averaged(tmp_path, monkeypatch):
    """Record the sizes of the exchanged tensors, in order, in a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    sizes, real = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield sizes
    dist.destroy_process_group()


class Run:
    def __init__(
        self,
        hooks: StepHooks | None = None,
        model: nn.Module | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.model = model or nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.router = routed(discover({"model": self.model, "optimizer": self.optimizer}), hooks, bucket_bytes)

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()


def calls(run: Run, count: int, read_after: int = 0) -> None:
    with run.router:
        run.optimizer.zero_grad()
        for call in range(1, count + 1):
            run.backward()
            if call == read_after:
                assert run.model.weight.grad.tolist() == [[float(call), float(call)]]
        run.optimizer.step()


def exchanges(run: Run, averaged: list[int], *args: int) -> int:
    before = len(averaged)
    calls(run, *args)
    return len(averaged) - before


def test_several_backward_calls_and_one_update_average_once_as_soon_as_their_number_is_known(averaged):
    run = Run()

    assert [exchanges(run, averaged, 3) for _ in range(3)] == [3, 1, 1]


def test_the_learned_number_of_backward_calls_is_restored_in_another_run(averaged):
    run, resumed = Run(), Run()
    calls(run, 3)
    resumed.router.averaging.load_state_dict(run.router.averaging.state_dict())

    assert exchanges(resumed, averaged, 3) == exchanges(run, averaged, 3) == 1


def test_fewer_calls_are_averaged_at_the_update_and_more_calls_once_more(averaged):
    run = Run()
    calls(run, 3)

    assert [exchanges(run, averaged, n) for n in (2, 2, 3, 3)] == [1, 1, 2, 1]


def test_a_read_averages_before_it_answers_and_only_once(averaged):
    run = Run()
    calls(run, 3)

    assert exchanges(run, averaged, 3, 2) == 2, "at the read, and for the call after it"
    with run.router:
        run.backward()
        assert run.model.weight.grad is not None
        assert len(averaged) == 3 + 2 + 1
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()
    assert len(averaged) == 3 + 2 + 1


@pytest.mark.parametrize("look", [lambda p: p.grad, copy.deepcopy], ids=["read", "copy"])
def test_a_read_in_another_thread_averages_nothing_and_warns_once(averaged, caplog, look):
    run = Run()
    calls(run, 3)
    before = len(averaged)

    with run.router:
        run.optimizer.zero_grad()
        run.backward()
        for _ in range(2):
            thread = threading.Thread(target=look, args=(run.model.weight,))
            thread.start()
            thread.join()
        assert len(averaged) == before
        run.backward()
        run.backward()
        run.optimizer.step()

    assert len(averaged) == before + 1
    assert sum("is read in another thread during step" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("calls", "read_after", "counts"), [(2, 1, [2, 2, 2]), (3, 2, [3, 2, 2])])
def test_gradients_are_averaged_once_before_each_place_of_a_step_that_uses_them(averaged, calls, read_after, counts):
    run = Run()

    assert [exchanges(run, averaged, calls, read_after) for _ in counts] == counts


def test_a_step_without_an_update_ends_with_averaged_gradients(averaged):
    run = Run()
    calls(run, 3)

    with run.router:
        run.backward()

    assert len(averaged) == 3 + 1
    assert type(run.model.weight) is nn.Parameter


def test_gradients_of_an_update_in_a_later_step_are_averaged_in_each(averaged):
    run = Run(bucket_bytes=1)

    for step in range(4):
        before = len(averaged)
        with run.router:
            if step < 3:
                run.backward()
            else:
                run.optimizer.step()
        assert len(averaged) - before == (2 if step < 3 else 1), "the last step tells alone that it has no gradient"
        assert type(run.model.weight) is nn.Parameter


def test_a_step_that_fails_averages_nothing_more_and_leaves_plain_parameters(averaged):
    run = Run()
    calls(run, 2)

    def fail() -> None:
        with run.router:
            run.backward()
            raise RuntimeError("mine")

    with refusal(RuntimeError):
        fail()

    assert len(averaged) == 2
    assert type(run.model.weight) is nn.Parameter


def test_a_callback_that_looks_after_each_backward_sees_averages_each_time(averaged):
    run = Run(StepHooks(on_after_backward=[lambda: None]))

    with run.router:
        run.backward()
        run.backward()

    assert len(averaged) == 2


def test_hooks_that_see_gradients_of_one_rank_and_updates_inside_of_backward_are_refused(averaged):
    run, late = Run(), Run()
    run.model.weight.register_post_accumulate_grad_hook(lambda p: None)
    late.model.bias.register_hook(lambda gradient: late.optimizer.step())

    with refusal(ContractError), run.router:
        run.backward()
    with refusal(ContractError), late.router:
        late.backward()
    assert type(run.model.weight) is type(late.model.weight) is nn.Parameter


def test_copies_and_pickles_of_a_guarded_parameter_are_plain(averaged):
    run = Run()

    with run.router:
        run.backward()
        copied = copy.deepcopy(run.model)
        run.backward()
        restored = pickle.loads(pickle.dumps(run.model))

    assert type(copied.weight) is type(restored.weight) is nn.Parameter
    assert torch.equal(copied.weight, run.model.weight)


def test_zeroing_gradients_between_backward_calls_loses_nothing_and_hides_nothing(averaged):
    run = Run()

    with run.router:
        run.backward()
        run.optimizer.zero_grad()
        run.backward()
        run.backward()
        run.optimizer.step()

    assert run.model.weight.grad.tolist() == [[2.0, 2.0]]


@pytest.mark.promise(name="speed")
def test_used_gradients_are_zeroed_without_a_call_for_each_and_others_with_one(averaged):
    run, seen = Run(), []
    guard = run.router.averaging._guard
    with run.router:
        guard._on_write = lambda parameter, value: seen.append(parameter)
        run.optimizer.zero_grad()
        assert seen == []
        run.model.weight.grad = torch.ones(1, 2)
        assert seen == [run.model.weight], "parameters are guarded again"
        run.backward()
        run.optimizer.zero_grad()
        assert len(seen) == 3


def test_gradients_that_zero_grad_of_a_class_writes_are_averaged(averaged):
    class Fills(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)

    model = nn.Linear(2, 1)
    optimizer = Fills(model.parameters(), lr=0.1)
    router = routed(discover({"model": model, "optimizer": optimizer}))
    with router:
        optimizer.zero_grad()
        assert model.weight.grad is not None, "a read"
        assert len(averaged) == 1
        optimizer.step()


@pytest.mark.parametrize("width", [2, 128], ids=["small gradients", "large ones"])
def test_small_and_large_gradients_have_the_bits_of_a_division(averaged, monkeypatch, width):
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 3)
    bucket = Bucket([nn.Parameter(torch.zeros(width, width)), nn.Parameter(torch.zeros(width))])
    gradients = [torch.randn(width, width), torch.randn(width)]
    expected = [gradient / 3 for gradient in gradients]
    bucket.send(gradients)
    bucket.wait()
    assert bucket.unpack(lambda tail: tail.tolist()) == {}
    assert all(map(torch.equal, gradients, expected))
    bucket.send([None, gradients[1]])
    bucket.wait()
    assert bucket.unpack(lambda tail: tail.tolist()) == {}
    assert torch.equal(gradients[1], expected[1] / 3)


def test_written_gradients_are_averaged_at_their_first_read_and_only_once(averaged):
    run = Run()

    with run.router:
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert averaged == []
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()

    assert len(averaged) == 1
    assert type(run.model.weight) is nn.Parameter


def test_writing_all_gradients_one_after_the_other_from_others_that_are_read_averages_each_once(averaged):
    run = Run(model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    first, last = run.model

    with run.router:
        run.backward()
        for written, read in zip(last.parameters(), first.parameters(), strict=True):
            written.grad = read.grad.clone()
        run.optimizer.step()

    assert len(averaged) == 2, "once for backward, once for what was written"


def test_gradients_written_after_an_update_are_averaged_before_they_are_read(averaged):
    run = Run()

    with run.router:
        for _ in range(2):
            run.optimizer.zero_grad()
            for parameter in run.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            assert run.model.weight.grad is not None
            run.optimizer.step()

    assert len(averaged) == 2


def test_results_of_guarded_tensors_are_plain_tensors(averaged):
    scale = torch.ones(2, requires_grad=True)
    discovered = discover({"scale": scale, "optimizer": torch.optim.SGD([scale], lr=0.1)})
    router = routed(discovered)

    with router:
        (scale * 2).sum().backward()
        assert type(scale.exp()) is torch.Tensor


def test_parameters_without_an_optimizer_travel_from_their_first_gradient_on(averaged):
    run = Run()
    other = nn.Linear(2, 3)
    router = routed(discover({"model": run.model, "other": other, "optimizer": run.optimizer}))

    def step(*, uses: bool) -> list[int]:
        before = len(averaged)
        with router:
            loss = run.model(torch.ones(1, 2)).sum()
            (loss + other(torch.ones(1, 2)).sum() if uses else loss).backward()
        return averaged[before:]

    alone, first, then = step(uses=False), step(uses=True), step(uses=False)

    assert len(alone) == len(then) == 1
    assert first[0] == alone[0], "a header that tells whether all ranks have one"
    assert first[1:] == then
    assert then[0] > alone[0]


def test_a_step_without_a_backward_call_sends_a_header(averaged):
    run = Run()

    with run.router:
        pass

    assert len(averaged) == 1


class Own(nn.Parameter):
    """A parameter class that may do anything with its gradient."""


def test_parameters_of_a_foreign_class_are_averaged_after_each_backward(averaged):
    run = Run()
    run.model.weight = Own(run.model.weight.detach())
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    run = Run(model=run.model)

    assert [exchanges(run, averaged, 2) for _ in range(3)] == [2, 2, 2]
    assert type(run.model.weight) is Own


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(BUCKET_BYTES, 1), (64, 2)])
def test_a_small_model_travels_at_once_a_large_one_in_pieces_and_in_the_same_memory_in_each_step(
    averaged, monkeypatch, bucket_bytes, messages
):
    places, real = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, *a, **k: places.append(t.data_ptr()) or real(t, *a, **k))
    run = Run(model=nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), bucket_bytes=bucket_bytes)

    for _ in range(3):
        with run.router:
            run.backward()
            run.optimizer.step()

    assert len(averaged) == 3 * messages
    assert places == places[:messages] * 3


class Device:
    """Simulates copies from a device that executes calls later than the host makes them."""

    def __init__(self, done=0):
        self.recorded, self.done, self.waits = 0, done, 0

    def copy(self, value):
        self.recorded += 1
        return CopyOfADevice(self, self.recorded, value.clone())


class CopyOfADevice:
    is_late = True

    def __init__(self, device, number, value):
        self.device, self.number, self.value = device, number, value

    def is_there(self):
        if self.number <= self.device.done:
            return True
        self.device.waits += 1
        self.device.done = self.number
        return False

    def read(self):
        return self.value


@pytest.mark.parametrize(("behind", "waits"), [(0, 0), (8, 0), (12, 1)])
def test_the_host_waits_for_a_device_only_if_it_is_many_exchanges_behind(averaged, monkeypatch, behind, waits):
    device = Device()
    monkeypatch.setattr(rank_check, "LateCopy", device.copy)
    run = Run()

    for call in range(1, 21):
        device.done = max(device.done, call - behind)
        calls(run, 1)

    assert (device.waits > 0) == waits
    assert len(run.router.averaging._check._in_flight) == rank_check.LATE_EXCHANGES


class _Alone:
    """A sum to which the other rank has not added anything."""

    def wait(self):
        pass


def test_diverged_ranks_are_an_error_some_exchanges_later_on_a_device(averaged, monkeypatch):
    monkeypatch.setattr(rank_check, "LateCopy", Device(done=100).copy)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: _Alone())
    monkeypatch.setattr(rank_check, "_are_together", lambda rows: len(set(map(tuple, rows))) == 1)
    run = Run()

    def of_both(points, mine, group):
        points[:] = [mine, mine]

    monkeypatch.setattr(dist, "all_gather_object", of_both)
    for _ in range(rank_check.LATE_EXCHANGES):
        calls(run, 1)
    with refusal(ContractError):
        calls(run, 1)


@pytest.mark.parametrize("backward_calls", [1, 4])
def test_a_backward_call_of_a_small_model_looks_for_replaced_parameters_at_most_twice(
    averaged, monkeypatch, backward_calls
):
    run = Run()
    looked, real = [], AveragedParameters.refresh
    monkeypatch.setattr(AveragedParameters, "refresh", lambda self: looked.append(1) or real(self))

    with run.router:
        before = len(looked)
        for _ in range(backward_calls):
            run.backward()
        assert len(looked) - before <= 2 * backward_calls


def test_a_training_that_has_ended_leaves_no_threads_of_its_buckets(averaged):
    def threads() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))

    def train() -> None:
        run = Run(bucket_bytes=1)
        with run.router:
            run.backward()
            run.optimizer.step()
        run.router.close()
        run.router.release_group()
        del run
        gc.collect()

    train()
    before = threads()
    for _ in range(5):
        train()

    assert threads() <= before


def test_a_trainer_with_nothing_to_average_warns_once(averaged, caplog):
    state = {"weight": torch.zeros(2)}  # changed by gradients of torch.func; no tensor in it requires a gradient
    router = routed(discover(state))

    for _ in range(2):
        with router:
            gradient = torch.func.grad(lambda weight: (weight - 1).square().sum())(state["weight"])
            state["weight"] = state["weight"] - 0.1 * gradient

    (message,) = (record.message for record in caplog.records)
    assert "Unless it averages by torch.distributed itself" in message


def test_an_optimizer_whose_first_update_comes_later_does_not_warn(averaged, caplog):
    run = Run()
    with run.router:
        pass

    assert not caplog.records


@pytest.mark.promise(name="speed")
def test_each_tensor_is_weighed_once():
    weighed = []

    class Weighed:
        device, dtype = CPU, torch.float32

        @property
        def nbytes(self):
            weighed.append(self)
            return 8

    tensors = [Weighed() for _ in range(50)]
    assert [len(group) for group in group_tensors(tensors, full_bytes=160, first_bytes=80)] == [10, 20, 20]
    assert weighed == tensors


def test_buckets_equal_the_buckets_of_ddp():
    """An additional message costs more than a larger one: an MLP with six large layers is sent in four, not seven."""
    model = nn.Sequential(*[nn.Linear(1984, 1984, device="meta") for _ in range(6)], nn.Linear(4, 4, device="meta"))
    parameters = [*model.parameters()][::-1]

    indices, _ = dist._compute_bucket_assignment_by_size(parameters, [FIRST_BUCKET_BYTES, BUCKET_BYTES])

    ours = [[id(p) for p in group] for group in group_tensors(parameters)]
    assert ours == [[id(parameters[i]) for i in group] for group in indices]
    assert len(indices) == 4
