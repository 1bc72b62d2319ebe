"""Within a step, and in its thread, a trainer's calls are routed; outside of it torch is unchanged."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.autograd import backward as backward_by_name

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepResult
from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.precision import step_precision
from genlight.adapter.gradients.step import StepHooks, StepRouter
from genlight.adapter.gradients.step_part import StepPart
from support.messages import refusal
from support.trainer_class import Trains

pytestmark = pytest.mark.promise(name="ranks")

PATCHED = (
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.autograd, "_engine_run_backward"),
    (torch.optim.SGD, "step"),
    (torch.optim.Optimizer, "zero_grad"),
)


def torch_now() -> list[object]:
    return [getattr(owner, name) for owner, name in PATCHED]


class Run:
    """A model, its optimizer and a router that records what passes through it."""

    def __init__(self, plugin: Precision | None = None, make: type[torch.optim.SGD] = torch.optim.SGD) -> None:
        self.events: list[str] = []
        self.model = nn.Linear(2, 1)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.discovered = discover({"model": self.model, "optimizer": self.optimizer})
        hooks = StepHooks(
            on_before_backward=[lambda loss: self.events.append(f"before_backward {loss.dim()}")],
            on_after_backward=[lambda: self.events.append("after_backward")],
            on_before_optimizer_step=[lambda _: self.events.append("before_optimizer_step")],
            on_before_zero_grad=[lambda _: self.events.append("before_zero_grad")],
        )
        self.router = StepRouter(
            self.discovered,
            torch.device("cpu"),
            precision=step_precision(plugin or Precision(), self.discovered),
            hooks=hooks,
        )

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(1, 2)).sum()


@pytest.mark.parametrize(
    "backward",
    [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss]), backward_by_name],
    ids=["tensor", "autograd", "imported by name"],
)
def test_every_way_to_call_backward_is_routed_inside_a_step_and_none_outside(backward):
    run = Run()
    backward(run.loss())
    assert run.events == []

    with run.router:
        backward(run.loss())

    assert run.events == ["before_backward 0", "after_backward"]


def test_a_closure_runs_before_the_optimizer_hook_and_its_loss_is_returned():
    run = Run()

    def closure() -> torch.Tensor:
        run.events.append("closure")
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    with run.router:
        loss = run.optimizer.step(closure)

    assert loss is not None
    assert run.events[0] == "closure"
    assert run.events[-1] == "before_optimizer_step"


class WithArguments(torch.optim.SGD):
    """Records the arguments of `step`; calls an argument that it takes for a closure."""

    def step(self, first=None, *args, **kwargs):
        self.got = (first, args, kwargs)
        if callable(first) and not isinstance(first, nn.Module):
            return first(backward=True)
        return None


LOSS = torch.tensor(2.0)
MODULE = nn.Identity()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((None, 0.01), {}),
        ((LOSS,), {}),
        ((0.01, 3), {"scale": 2}),
        ((MODULE, 1), {}),
        ((), {"step": 3, "optimizer": "a", "inner": "b", "call": "c"}),
        ((), {"closure": None, "scale": 2}),
    ],
    ids=["nothing", "after None", "loss", "numbers", "module", "names of the router's own", "closure None"],
)
def test_every_argument_of_an_update_reaches_the_optimizer_in_its_place(args, kwargs):
    for precision in (Precision(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))):
        run = Run(precision, WithArguments)
        with run.router:
            run.loss().backward()
            run.optimizer.step(*args, **kwargs)

        first, rest, named = run.optimizer.got
        assert ((first, *rest)[: len(args)], named) == (args, kwargs)
        assert run.events[-1] == "before_optimizer_step"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_is_routed_and_keeps_its_arguments_and_those_behind_it(is_named):
    run = Run(make=WithArguments)
    seen = []

    def closure(backward: bool) -> torch.Tensor:
        seen.append(backward)
        loss = run.loss()
        loss.backward()
        return loss

    with run.router:
        loss = run.optimizer.step(first=closure) if is_named else run.optimizer.step(closure, 0.5, scale=2)

    assert seen == [True]
    assert loss is not None
    assert run.optimizer.got[1:] == (((), {}) if is_named else ((0.5,), {"scale": 2}))
    assert run.events[-1] == "before_optimizer_step"


def test_torch_is_untouched_before_between_and_after_steps():
    run = Run()  # the first optimizer of a class makes torch patch that class
    before = torch_now()
    for _ in range(2):
        with run.router:
            run.loss().backward()
            assert torch_now()[:3] == before[:3]
        assert torch_now() == before


def test_torch_is_untouched_after_a_step_that_failed():
    run = Run(MixedPrecision("bf16-mixed", "cpu"))
    before = torch_now()

    with refusal(RuntimeError), run.router:
        raise RuntimeError("mine")

    assert torch_now() == before
    assert not torch.is_autocast_enabled("cpu")


def replace_the_entry() -> None:
    real = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = lambda *args, **kwargs: real(*args, **kwargs)


class Failing(StepPart):
    """Raises in one of its calls, and records whether it was abandoned."""

    def __init__(self, at: str) -> None:
        self.abandoned = 0
        setattr(self, at, self.fail)

    def fail(self, *_: object) -> None:
        raise RuntimeError("the part's")

    def abandon(self) -> None:
        self.abandoned += 1


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("at", "act", "error"),
    [
        ("nowhere", replace_the_entry, "was replaced by"),
        ("begin", lambda: None, "the part's"),
        ("end", lambda: None, "the part's"),
    ],
    ids=["replaced entry", "begin", "end"],
)
def test_an_error_at_the_edge_of_a_step_restores_torch_and_abandons_all_parts(at, act, error, is_open):
    run = Run(MixedPrecision("bf16-mixed", "cpu"))
    parts = [StepPart(), Failing(at), Failing("nowhere")]
    before = torch_now()
    run.router.parts += parts
    if is_open:
        run.router.open()

    with pytest.raises(RuntimeError, match=error), run.router:
        act()

    assert not torch.is_autocast_enabled("cpu")
    assert [part.abandoned for part in parts[1:]] == [1, 1]
    run.router.close()
    assert torch_now() == before


def test_the_error_of_the_class_is_kept_if_the_entry_was_replaced_too():
    run = Run(MixedPrecision("bf16-mixed", "cpu"))

    with pytest.raises(ZeroDivisionError) as raised, run.router:
        raise ZeroDivisionError(replace_the_entry())

    assert "was replaced by" in raised.value.__notes__[0]
    assert not torch.is_autocast_enabled("cpu")


def test_all_parts_are_closed_even_if_one_raises():
    run = Run()
    closed = []
    last = StepPart()
    last.close = lambda: closed.append(True)
    run.router.parts += [Failing("close"), last]
    run.router.open()

    with refusal(RuntimeError):
        run.router.close()

    assert closed == [True]


def test_a_backward_in_another_thread_is_left_alone_while_a_step_runs():
    run = Run()
    other = nn.Linear(1, 1)

    def work() -> None:
        other(torch.ones(1, 1)).sum().backward()

    with run.router:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert other.weight.grad is not None
    assert run.events == []


def test_two_trainings_in_two_threads_do_not_see_each_other():
    runs = [Run(), Run()]
    meet = threading.Barrier(2, timeout=60)
    before = torch_now()

    def train(run: Run) -> None:
        with run.router:
            meet.wait()
            run.loss().backward()
            meet.wait()

    threads = [threading.Thread(target=train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [run.events for run in runs] == [["before_backward 0", "after_backward"]] * 2
    assert torch_now() == before


def test_an_optimizer_that_appears_inside_a_step_and_trains_a_known_module_is_refused():
    run = Run()

    with run.router:
        run.loss().backward()
        late = torch.optim.Adam(run.model.parameters())
        with refusal(ContractError):
            late.step()


def kept_before_it_was_routed(run: Run) -> Callable[[], object]:
    return functools.partial(type(run.optimizer).step, run.optimizer)


def compiled_before_it_was_routed(run: Run) -> Callable[[], object]:
    return torch.compile(kept_before_it_was_routed(run), backend="eager")


@pytest.mark.filterwarnings("ignore")  # the compiler warns of code that it does not compile
@pytest.mark.parametrize("taken", [kept_before_it_was_routed, compiled_before_it_was_routed])
def test_a_step_kept_before_routing_calls_the_hook_and_is_refused_if_it_cannot_be_skipped(taken):
    run, scaled = Run(), Run(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0)))
    step, scaled_step = taken(run), taken(scaled)

    with run.router:
        run.loss().backward()
        step()
    with scaled.router:
        scaled.loss().backward()
        with refusal(ContractError):
            scaled_step()

    assert run.events[-1] == "before_optimizer_step"


@pytest.mark.filterwarnings("ignore")  # the compiler warns of code that it does not compile
def test_a_compiled_step_trains_like_a_plain_one():
    run, plain = Run(), Run()
    plain.model.load_state_dict(run.model.state_dict())
    compiled = torch.compile(run.optimizer.step, backend="eager")

    for _ in range(3):
        for each, step in ((run, compiled), (plain, plain.optimizer.step)):
            with each.router:
                each.optimizer.zero_grad()
                each.loss().backward()
                step()

    assert torch.equal(run.model.weight, plain.model.weight)
    assert run.events == plain.events


def test_schedulers_made_before_and_after_the_router_count_optimizer_steps():
    run = Run()
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    run = Run()
    late = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)

    with run.router:
        run.loss().backward()
        run.optimizer.step()
        late.step()  # warns, and fails here, if the scheduler missed the optimizer's step

    assert run.optimizer.param_groups[0]["lr"] == 0.05


def test_bf16_mixed_autocasts_the_forward_and_neither_backward_nor_update():
    run = Run(MixedPrecision("bf16-mixed", "cpu"))
    seen = {}
    run.model.weight.register_hook(lambda _: seen.update(backward=torch.is_autocast_enabled("cpu")))
    run.optimizer.register_step_pre_hook(lambda *_: seen.update(step=torch.is_autocast_enabled("cpu")))

    def closure() -> torch.Tensor:
        seen["closure"] = torch.is_autocast_enabled("cpu")
        loss = run.loss()
        assert loss.dtype is torch.bfloat16 or seen["closure"]
        loss.backward()
        return loss

    with run.router:
        seen["forward"] = torch.is_autocast_enabled("cpu")
        run.optimizer.step(closure)

    assert seen == {"forward": True, "closure": True, "backward": False, "step": False}


def entries() -> list[object]:
    """Return the names that a training replaces until it ends."""
    return [torch.autograd._engine_run_backward]


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_replaces_torchs_entries_once_and_puts_them_back_however_it_ends(fit, fails):
    class Linear(Trains):
        def prepare_batch(self, raw, state, ctx):
            return raw

        def train_step(self, batch, state, ctx):
            state["model"](torch.ones(1, 2)).sum().backward()
            state["optimizer"].step()
            seen.append(entries())
            if fails and batch == 2:
                raise ZeroDivisionError
            return StepResult(metrics={})

    seen: list[list[object]] = []
    between = LambdaCallback(on_train_batch_end=lambda *_: seen.append(entries()))
    before = entries()
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        fit(Linear(), [between], plugins=MixedPrecision("16-mixed", "cpu"))

    assert len(seen) == (5 if fails else 8)
    assert all(found == seen[0] for found in seen)
    assert all(led is not own for led, own in zip(seen[0], before, strict=True))
    assert entries() == before
