"""Gradients are averaged when somebody wants to see them, and no more often."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients import gradient_sync, sent_points
from genlight.adapter.gradients.averaged_parameters import AveragedParameters
from genlight.adapter.gradients.buckets import Bucket
from genlight.adapter.gradients.early_buckets import EarlyBuckets, Plan
from genlight.adapter.gradients.gradient_sync import GradientSync
from genlight.adapter.gradients.lazy_sync import Accumulation
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.rank_notes import Notes
from genlight.adapter.gradients.rank_points import Point
from genlight.adapter.gradients.step import StepHooks, StepRouter


@pytest.fixture
def averaged(tmp_path, monkeypatch):
    """Sizes of what was averaged, in order, in a process group of one rank."""
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
        bucket_bytes: int | None = None,
        sync_each_batch: bool | None = None,
    ) -> None:
        self.model = model or nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        discovered = discover({"model": self.model, "optimizer": self.optimizer})
        self.router = StepRouter(
            discovered,
            torch.device("cpu"),
            precision=StepPrecision("fp32"),
            hooks=hooks,
            gradients=GradientSync(discovered, bucket_bytes=bucket_bytes, sync_each_batch=sync_each_batch),
        )

    def backward(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()


def test_several_backward_calls_and_one_update_average_once(averaged):
    run = Run()

    with run.router:
        for _ in range(3):
            run.backward()
        assert averaged == []
        run.optimizer.step()

    assert len(averaged) == 1


def test_a_read_averages_before_it_answers_and_only_once(averaged):
    run = Run()

    with run.router:
        run.backward()
        assert run.model.weight.grad.tolist() == [[1.0, 1.0]]
        assert len(averaged) == 1
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizer.step()

    assert len(averaged) == 1


def test_a_step_without_an_update_ends_with_averaged_gradients(averaged):
    run = Run()

    with run.router:
        run.backward()
        run.backward()

    assert len(averaged) == 1
    assert type(run.model.weight) is nn.Parameter


NOTES, ALL = 1, 3
"""Messages of an exchange in two buckets: what ranks tell each other alone, or the buckets as well."""


@pytest.mark.parametrize(
    ("sync_each_batch", "waits", "messages"),
    [
        (False, True, [NOTES, NOTES, NOTES, ALL]),
        (None, True, [NOTES, NOTES, NOTES, ALL]),
        (True, False, [ALL, ALL, ALL, NOTES]),
    ],
)
def test_gradients_in_several_buckets_wait_for_an_update_unless_each_batch_is_to_be_averaged(
    averaged, sync_each_batch, waits, messages
):
    run = Run(bucket_bytes=1, sync_each_batch=sync_each_batch)
    sent = []

    for step in range(4):
        before = len(averaged)
        with run.router:
            if step < 3:
                run.backward()
            else:
                run.optimizer.step()
        sent.append(len(averaged) - before)
        assert run.router.averaging.waits is (waits and step < 3)
        assert type(run.model.weight) is nn.Parameter

    assert sent == messages


def test_gradients_that_would_take_too_much_of_a_checkpoint_are_averaged_in_each_step_and_that_is_said_once(
    averaged, monkeypatch, caplog
):
    monkeypatch.setattr(gradient_sync, "MOST_WAITING_BYTES", 4)
    run = Run(bucket_bytes=1)

    with caplog.at_level("INFO"):
        for _ in range(2):
            with run.router:
                run.backward()

    assert run.router.averaging.waits is False
    (told,) = (record.message for record in caplog.records if "`sync_each_batch: false`" in record.message)
    assert "a checkpoint in between then holds those of each rank" in told


def test_a_step_that_fails_averages_nothing_and_leaves_plain_parameters(averaged):
    run = Run()

    def fail() -> None:
        with run.router:
            run.backward()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()

    assert averaged == []
    assert type(run.model.weight) is nn.Parameter


def test_a_callback_that_looks_after_each_backward_sees_averages_each_time(averaged):
    run = Run(StepHooks(after_backward=lambda: None))

    with run.router:
        run.backward()
        run.backward()

    assert len(averaged) == 2


def test_a_hook_that_runs_inside_of_backward_has_gradients_averaged_after_each(averaged):
    run = Run()
    run.model.weight.register_post_accumulate_grad_hook(lambda p: None)

    with run.router:
        run.backward()
        run.backward()

    assert len(averaged) == 2


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


def test_what_is_computed_from_a_guarded_tensor_is_a_plain_one(averaged):
    scale = torch.ones(2, requires_grad=True)
    discovered = discover({"scale": scale, "optimizer": torch.optim.SGD([scale], lr=0.1)})
    precision = StepPrecision("fp32")
    router = StepRouter(discovered, torch.device("cpu"), precision=precision, gradients=GradientSync(discovered))

    with router:
        (scale * 2).sum().backward()
        assert type(scale.exp()) is torch.Tensor


def test_parameters_without_an_optimizer_travel_once_they_have_a_gradient(averaged):
    run = Run()
    other = nn.Linear(2, 3)
    discovered = discover({"model": run.model, "other": other, "optimizer": run.optimizer})
    sync = GradientSync(discovered)

    sync(Point())
    assert len(averaged) == 1
    other.weight.grad = torch.ones_like(other.weight)
    sync(Point())
    assert len(averaged) == 3
    other.requires_grad_(False)
    sync(Point())
    assert len(averaged) == 5, "one more, by which ranks learn that all of them have frozen it"
    sync(Point())
    assert len(averaged) == 6


@pytest.mark.parametrize("name", ["barrier", "all_reduce"])
def test_a_collective_of_the_trainers_own_waits_for_its_gradients(averaged, name):
    run = Run()
    torchs_own = getattr(dist, name)

    with run.router:
        run.backward()
        assert averaged == []
        getattr(dist, name)(*([torch.ones(1)] if name == "all_reduce" else []))
        assert averaged[0] > 1

    assert getattr(dist, name) is torchs_own


def test_a_step_without_a_backward_call_tells_the_other_ranks(averaged):
    run = Run()

    with run.router:
        pass

    assert len(averaged) == 1


def test_the_ordinal_counts_averagings_of_one_update():
    ordinals = []
    parameter = nn.Parameter(torch.ones(1))
    accumulation = Accumulation(lambda: [parameter], lambda ordinal, why, what: ordinals.append(ordinal))

    for reads in (True, False):
        for _ in range(2):
            accumulation.before_backward()
            parameter.sum().backward()
            accumulation.after_backward()
            _ = parameter.grad if reads else None
        accumulation.before_update()
        accumulation.resume()

    assert ordinals == [0, 1, 0]


class Own(nn.Parameter):
    """A parameter class that may do anything with its gradient."""


def test_parameters_of_a_foreign_class_are_averaged_after_each_backward():
    ordinals = []
    parameter = Own(torch.ones(1))
    accumulation = Accumulation(lambda: [parameter], lambda ordinal, why, what: ordinals.append(ordinal))

    for _ in range(2):
        accumulation.before_backward()
        parameter.sum().backward()
        accumulation.after_backward()

    assert ordinals == [0, 1]
    assert type(parameter) is Own


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(None, 1), (64, 2 + 1)])
def test_a_small_model_travels_at_once_a_large_one_in_pieces_and_notes_and_in_the_same_memory_in_each_step(
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
    """What torch's events are to a device that works through calls later than the host makes them."""

    def __init__(self, done=0):
        self.recorded, self.done, self.waits = 0, done, 0

    def copy(self, value):
        self.recorded += 1
        return value.clone(), DeviceEvent(self, self.recorded)


class DeviceEvent:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        return self.number <= self.device.done

    def synchronize(self):
        self.device.waits += 1
        self.device.done = self.number


@pytest.mark.parametrize(("behind", "waits"), [(0, 0), (8, 0), (12, 1)])
def test_the_host_waits_for_a_device_only_where_that_is_many_calls_behind(averaged, monkeypatch, behind, waits):
    device = Device()
    monkeypatch.setattr(sent_points, "_to_host", device.copy)
    sync = GradientSync(discover({"model": (model := nn.Linear(2, 1)), "o": torch.optim.SGD(model.parameters(), 0.1)}))

    for call in range(1, 21):
        device.done = max(device.done, call - behind)
        sync(Point())

    assert (device.waits > 0) == waits
    assert len(sync._exchange._sent._sent) == sent_points.LATE_CALLS


def test_ranks_at_different_points_are_told_some_calls_later_on_a_device(averaged, monkeypatch):
    device = Device(done=100)
    monkeypatch.setattr(sent_points, "_to_host", device.copy)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: _Alone())
    monkeypatch.setattr(
        dist, "all_gather_object", lambda points, mine, group: points.__setitem__(1, mine._replace(ordinal=0))
    )
    sync = GradientSync(discover({"model": (model := nn.Linear(2, 1)), "o": torch.optim.SGD(model.parameters(), 0.1)}))

    for _ in range(sent_points.LATE_CALLS):
        sync(Point(ordinal=1))
    with pytest.raises(ContractError, match="Ranks part ways"):
        sync(Point(ordinal=1))


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


def test_ranks_agree_on_the_order_of_their_buckets_by_the_device_of_the_gradients(averaged, monkeypatch):
    """Also where this rank has seen no backward call."""
    plan = Plan([Bucket([nn.Parameter(torch.empty(1, device="meta"))]) for _ in range(2)], [], Notes(0, 0))
    seen = []

    def broadcast(tensor, **_):
        seen.append(tensor.device.type)
        raise InterruptedError

    monkeypatch.setattr(dist, "broadcast", broadcast)
    with pytest.raises(InterruptedError):
        EarlyBuckets().close(plan, (0, 0), repeated=False)

    assert seen == ["meta"]


class _Alone:
    """A sum to which the other rank adds nothing."""

    def wait(self):
        pass


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
        run.router.ended()
        del run
        gc.collect()

    train()
    before = threads()
    for _ in range(5):
        train()

    assert threads() <= before


@pytest.mark.parametrize("talks", [False, True])
def test_ranks_that_train_nothing_that_could_be_averaged_are_told_once(averaged, caplog, talks):
    state = {"weight": torch.zeros(2)}  # changed by gradients of torch.func, which no tensor of it requires
    discovered = discover(state)
    router = StepRouter(
        discovered, torch.device("cpu"), precision=StepPrecision("fp32"), gradients=GradientSync(discovered)
    )

    for _ in range(2):
        with router:
            gradient = torch.func.grad(lambda weight: (weight - 1).square().sum())(state["weight"])
            if talks:
                dist.all_reduce(gradient)
            state["weight"] = state["weight"] - 0.1 * gradient

    said = [record.message for record in caplog.records if "do not train together" in record.message]
    assert len(said) == (0 if talks else 1)


def test_ranks_whose_optimizer_updates_in_a_later_step_are_told_nothing(averaged, caplog):
    run = Run()
    with run.router:
        pass

    assert not caplog.records
