"""genlight warns once of clipping shards between two backward calls of one update: it bounds the mean of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.changed_gradients import ChangedGradients
from genlight.adapter.gradients.fsdp.shard import shard
from genlight.adapter.gradients.fsdp.step import ShardedStep
from genlight.adapter.gradients.precision import StepPrecision
from genlight.adapter.gradients.step import StepRouter

pytestmark = pytest.mark.promise(name="ranks")


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    torch.distributed.destroy_process_group()


class Run:
    """A sharded model whose trainer calls backward several times before an update, as one of several ranks."""

    def __init__(self, mesh) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        discovered = discover({"model": self.model, "optimizer": self.optimizer})
        shard(discovered, mesh)
        self.router = StepRouter(discovered, torch.device("cpu"), precision=StepPrecision("fp32"))
        part = ShardedStep(discovered, [self.optimizer], several_ranks=True, group=None, device=torch.device("cpu"))
        self.router.parts = [part, ChangedGradients(self.model.parameters)]
        self.router.open()

    def step(self, between) -> None:
        with self.router:
            for _ in range(3):
                self.model(torch.randn(2, 4)).square().mean().backward()
                between(self)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def run(mesh):
    made = Run(mesh)
    yield made
    made.router.close()


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


def clip_one_by_one(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.01, foreach=False)


def clip_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


def clip_and_sum_up(run: Run) -> None:
    clip(run)
    for parameter in run.model.parameters():
        parameter.summed = parameter.grad + getattr(parameter, "summed", 0)
    run.optimizer.zero_grad()


def clip_and_set_to_zero(run: Run) -> None:
    clip(run)
    run.optimizer.zero_grad(set_to_none=False)


def write(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("between", [clip, clip_one_by_one, clip_values, clip_and_sum_up, clip_and_set_to_zero, write])
def test_a_clip_warns_once_with_its_line_and_the_way_out(run, caplog, between):
    for _ in range(2):
        run.step(between)

    assert len(caplog.messages) == 1
    assert "changed between two backward calls of one update" in caplog.messages[0]
    assert "test_changed_gradients.py" in caplog.messages[0]
    assert "use `strategy: ddp`" in caplog.messages[0]


def look(run: Run) -> None:
    assert all(parameter.grad is not None for parameter in run.model.parameters())


def look_and_set_to_zero(run: Run) -> None:
    look(run)
    run.optimizer.zero_grad(set_to_none=False)


def look_and_drop(run: Run) -> None:
    look(run)
    run.optimizer.zero_grad()


def norm_for_a_log(run: Run) -> None:
    nn.utils.get_total_norm([parameter.grad for parameter in run.model.parameters()])


def clip_and_update(run: Run) -> None:
    clip(run)
    run.optimizer.step()


@pytest.mark.parametrize("between", [look, look_and_set_to_zero, look_and_drop, norm_for_a_log, clip_and_update])
def test_changes_that_bound_no_rows_do_not_warn(run, caplog, between):
    for _ in range(2):
        run.step(between)

    assert not caplog.messages


def test_overflowed_gradients_do_not_count_as_changed(run, caplog):
    for scale in (float("inf"), 1.0):
        with run.router:
            run.optimizer.zero_grad()
            (run.model(torch.randn(2, 4)).square().mean() * scale).backward()
            run.optimizer.step()

    assert not caplog.messages
