"""With ``gradient_as_bucket_view`` averages become gradients where they arrived, unless somebody would notice."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.buckets import read_gradient
from genlight.adapter.gradients.gradient_sync import GradientSync
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter
from genlight.callbacks.checkpoint.rank_state import gather_gradients


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class CopiesBack(TorchDispatchMode):
    """Counts tensors that averages are copied into."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._foreach_copy_.default:
            self.count += len(args[0])
        return function(*args, **(kwargs or {}))


class Run:
    """Two layers of 16 by 16, of which each parameter travels by itself or all of them together."""

    def __init__(self, model=None, *, views=True, bucket_bytes=None):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        found = discover({"model": self.model, "optimizer": self.optimizer})
        self.sync = GradientSync(found, bucket_bytes=bucket_bytes, gradient_as_bucket_view=views)
        self.router = StepRouter(found, torch.device("cpu"), precision=StepPrecision("fp32"), gradients=self.sync)
        self.batch = torch.randn(4, 16)

    def backward(self, **options):
        self.model(self.batch).square().mean().backward(**options)

    def average(self):
        """Read a gradient; how many averages were copied for that."""
        with CopiesBack() as copies:
            assert self.gradients
        return copies.count

    @property
    def gradients(self):
        return [p.grad for p in self.model.parameters()]


def memories(gradients):
    return {gradient.untyped_storage().data_ptr() for gradient in gradients}


def test_averages_become_the_gradients_and_are_not_copied():
    run = Run()

    with run.router:
        run.backward()
        assert run.average() == 0

        assert len(memories(run.gradients)) == 1
        assert all(type(g) is torch.Tensor and g._base is None and g.is_contiguous() for g in run.gradients)


def test_without_it_gradients_stay_tensors_of_their_own():
    run = Run(views=False)

    with run.router:
        run.backward()
        assert run.average() == 4

        assert len(memories(run.gradients)) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_no_average_is_copied_in_any_step(set_to_none, bucket_bytes):
    run, copied = Run(bucket_bytes=bucket_bytes), Run(views=False)

    for each in (run, copied):
        for _ in range(4):
            with each.router:
                for _ in range(2):
                    each.backward()
                assert each.average() == (0 if each is run else 4)
                each.optimizer.step()
                each.optimizer.zero_grad(set_to_none=set_to_none)
        each.router.close()

    assert all(map(torch.equal, run.model.parameters(), copied.model.parameters()))


def test_what_was_averaged_and_is_added_to_is_not_the_memory_that_travels_next():
    run = Run(bucket_bytes=1)

    with run.router:
        run.backward()
        first = memories(run.gradients)
        run.backward()
        assert run.average() == 0

        assert memories(run.gradients).isdisjoint(first)


def in_a_list(gradient):
    return [gradient]


def without_its_graph(gradient):
    return gradient.detach()


def a_part(gradient):
    return gradient[:1]


def as_an_array(gradient):
    return gradient.numpy()


def of_another_parameter(gradient):
    other = nn.Parameter(torch.zeros_like(gradient))
    other.grad = gradient
    return other


def saved_in_a_graph(gradient):
    return gradient * torch.ones_like(gradient).requires_grad_()


def its_memory(gradient):
    return gradient.untyped_storage()


@pytest.mark.parametrize(
    "hold",
    [in_a_list, without_its_graph, a_part, as_an_array, of_another_parameter, saved_in_a_graph, its_memory],
    ids=lambda hold: hold.__name__,
)
def test_a_gradient_that_somebody_holds_is_written_in_place(hold):
    run = Run()
    weight = run.model[0].weight

    with run.router:
        run.backward()
        before = read_gradient(weight)
        address, held = before.data_ptr(), hold(before)
        del before
        copies = run.average()

        assert copies == 1
        assert weight.grad.data_ptr() == address
        assert held is not None


def test_an_attribute_of_a_gradient_stays():
    run = Run()
    weight = run.model[0].weight

    with run.router:
        run.backward()
        read_gradient(weight).seen = True
        assert run.average() == 1
        assert weight.grad.seen


def test_gradients_of_another_layout_or_with_a_graph_are_written_in_place():
    convolution = nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 8, 2)).to(memory_format=torch.channels_last)
    last = Run(convolution)
    with last.router:
        last.backward()
        assert last.average() == 1  # the bias is a view
        assert convolution[1].weight.grad.is_contiguous(memory_format=torch.channels_last)

    double = Run()
    with double.router:
        with pytest.warns(UserWarning, match="create_graph=True"):
            double.backward(create_graph=True)
        assert double.average() == 4
        assert all(g.requires_grad for g in double.gradients)
        double.model.zero_grad()  # a graph that holds its own leaves


def test_sparse_gradients_stay_sparse():
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.out = nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16)

        def forward(self, batch):
            return self.out(self.rows(torch.tensor([1, 3, 3, 5])) + batch)

    run = Run(Looked())

    with run.router:
        run.backward()
        assert run.average() == 0
        assert run.model.rows.weight.grad.is_sparse
        assert len(memories([run.model.out.weight.grad, run.model.out.bias.grad])) == 1


def test_a_gradient_that_is_kept_does_not_change_when_the_next_ones_are_averaged():
    run = Run(bucket_bytes=1)

    with run.router:
        run.backward()
        kept = run.gradients
        values = copy.deepcopy(kept)
        run.optimizer.zero_grad()
        run.batch *= 2
        run.backward()
        assert run.average() == 0

    assert all(map(torch.equal, kept, values))


def test_the_gradient_of_a_parameter_that_was_frozen_since_stays_what_it_was():
    run = Run()
    first, _, second = run.model

    with run.router:
        run.backward()
        value = first.weight.grad.clone()
        first.requires_grad_(False)
        for _ in range(2):
            second.zero_grad()
            run.backward()
            assert torch.equal(first.weight.grad, value)
        first.requires_grad_(True)
        second.zero_grad()
        run.backward()
        torch.testing.assert_close(first.weight.grad, 2 * value)


def test_a_rank_that_only_takes_part_leaves_gradients_alone():
    run = Run(bucket_bytes=1)

    with run.router:
        run.backward()
        before = copy.deepcopy(run.gradients)
    for _ in range(2):
        with run.router:
            pass  # a step without backward: the exchange that notices it writes to no gradient

    assert all(map(torch.equal, run.gradients, before))


def test_gradients_of_a_rank_are_sent_to_rank_zero_without_the_rest_of_their_buckets(monkeypatch):
    run = Run()
    with run.router:
        run.backward()
        gradient = run.model[2].bias.grad
    assert gradient.untyped_storage().nbytes() > 10 * gradient.nbytes
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: objects.__setitem__(0, {}))
    monkeypatch.setattr(dist, "gather_object", lambda part, parts, dst: sent.append(part))

    gather_gradients({"bias": gradient})

    assert torch.equal(sent[0]["bias"], gradient)
    assert sent[0]["bias"].untyped_storage().nbytes() == gradient.nbytes
