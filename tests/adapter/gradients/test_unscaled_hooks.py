"""Under 16-mixed, hooks inside of the graph see and change the gradients that they would in full precision."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import linear, mse_loss
from torch.nn.modules.module import _WrappedHook, register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.precision import step_precision
from genlight.adapter.gradients.router import StepRouter

SCALE = 2.0**12
LIMIT = 0.002
"""Clamps some of the gradients by activations, in true units, and all of them in scaled ones."""

Batch = tuple[Tensor, Tensor]


def fp16(init_scale: float = SCALE) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


class Run:
    """A network, its optimizer and their router under a precision."""

    def __init__(self, plugin: Precision) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.seen: dict[str, list[Tensor]] = {}
        discovered = discover({"model": self.model, "optimizer": self.optimizer})
        self.router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(plugin, discovered))

    def see(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            self.seen.setdefault(name, []).append(tensor.detach().clone())

    def batch(self, step: int) -> Batch:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        return x, x.sum(1, keepdim=True).tanh()

    def train(self, step: Callable[[Run, Tensor, Tensor], None], steps: int) -> dict[str, Tensor]:
        for number in range(steps):
            with self.router:
                self.optimizer.zero_grad()
                step(self, *self.batch(number))
                self.optimizer.step()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def clamp_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-LIMIT, LIMIT)


def mean_square(out: Tensor, y: Tensor) -> Tensor:
    return mse_loss(out.float(), y)


def hook_on_an_activation(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    hidden.register_hook(lambda g: run.see(before=g))
    hidden.register_hook(clamped)
    hidden.register_hook(lambda g: run.see(after=g))
    mean_square(run.model[2](run.model[1](hidden)), y).backward()


def hook_that_changes_its_gradient_in_place(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    hidden.register_hook(clamp_in_place)
    mean_square(run.model[2](run.model[1](hidden)), y).backward()


def hook_on_several_tensors(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    active = run.model[1](hidden)
    handle = torch.autograd.graph.register_multi_grad_hook(
        (hidden, active, run.model[2].bias), lambda grads: run.see(hidden=grads[0], active=grads[1], bias=grads[2])
    )
    mean_square(run.model[2](active), y).backward()
    handle.remove()


def hook_on_the_loss(run: Run, x: Tensor, y: Tensor) -> None:
    loss = mean_square(run.model(x), y)
    loss.register_hook(lambda g: run.see(loss=g))
    loss.backward()


def hooks_and_two_backward_calls_of_one_graph(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    hidden.register_hook(lambda g: run.see(hidden=g))
    hidden.register_hook(clamped)
    out = run.model[2](run.model[1](hidden))
    mean_square(out, y).backward(retain_graph=True)
    (0.1 * out.float().square().mean()).backward()


def backward_from_an_activation_with_a_gradient(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    hidden.register_hook(clamped)
    out = run.model[2](run.model[1](hidden))
    out.backward(gradient=(2 * (out.float() - y).detach() / len(y)).to(out.dtype))


def retained_gradients(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    hidden.register_hook(clamped)
    active = run.model[1](hidden)
    hidden.retain_grad()
    active.retain_grad()
    out = run.model[2](active)
    mean_square(out, y).backward(retain_graph=True)
    run.see(hidden=hidden.grad, active=active.grad)
    (0.1 * out.float().square().mean()).backward()
    run.see(hidden=hidden.grad, active=active.grad)


def backward_with_an_activation_among_its_inputs(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = run.model[0](x)
    mean_square(run.model[2](run.model[1](hidden)), y).backward(inputs=[hidden, *run.model[2].parameters()])
    run.see(hidden=hidden.grad)


def checkpointed(run: Run, x: Tensor, y: Tensor, *, use_reentrant: bool) -> None:
    def first(x: Tensor) -> Tensor:
        hidden = run.model[0](x)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: run.see(hidden=g))
            hidden.register_hook(clamped)
        return run.model[1](hidden)

    x = x.clone().requires_grad_()
    mean_square(run.model[2](checkpoint(first, x, use_reentrant=use_reentrant)), y).backward()
    run.see(x=x.grad)


def checkpointed_by_repeating_the_forward(run: Run, x: Tensor, y: Tensor) -> None:
    checkpointed(run, x, y, use_reentrant=True)


def checkpointed_by_saved_tensor_hooks(run: Run, x: Tensor, y: Tensor) -> None:
    checkpointed(run, x, y, use_reentrant=False)


def gradient_penalty(run: Run, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    hidden = run.model[0](x)
    hidden.register_hook(lambda g: run.see(hidden=g))
    hidden.register_hook(lambda g: 0.5 * g)
    out = run.model[2](run.model[1](hidden)).float()
    (by_x,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    by_x.register_hook(lambda g: run.see(by_x=g))
    run.see(penalty=by_x)
    (mse_loss(out, y) + by_x.square().mean()).backward()


def gradients_that_are_differentiated_again(run: Run, x: Tensor, y: Tensor) -> None:
    parameters = list(run.model.parameters())
    hidden = run.model[0](x)
    hidden.register_hook(lambda g: 0.5 * g)
    hidden.retain_grad()
    mean_square(run.model[2](run.model[1](hidden)), y).backward(create_graph=True)
    by_parameter = [p.grad for p in parameters]
    run.see(hidden=hidden.grad)
    (by_parameter[0].square().mean() + hidden.grad.float().square().mean()).backward(inputs=parameters)
    run.see(weight=parameters[0].grad)


def functional_gradients(run: Run, x: Tensor, y: Tensor) -> None:
    """By samples, and differentiated again as meta-learning does."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        hidden = linear(x, parameters["0.weight"], parameters["0.bias"])
        hidden.register_hook(lambda g: 0.5 * g)
        return mean_square(linear(hidden.tanh(), parameters["2.weight"], parameters["2.bias"]), y)

    parameters = dict(run.model.named_parameters())
    detached = {name: p.detach() for name, p in parameters.items()}
    run.see(of_samples=vmap(grad(loss), (None, 0, 0))(detached, x, y)["0.weight"])
    by_parameter = grad(loss)(parameters, x, y)
    loss({name: p - 0.1 * by_parameter[name] for name, p in parameters.items()}, x, y).backward()


def backward_call_inside_of_a_hook(run: Run, x: Tensor, y: Tensor) -> None:
    """Checkpointing by hand: below the hook there is a graph of its own."""
    hidden = run.model[0](x)
    hidden.register_hook(lambda g: run.see(hidden=g))
    above = hidden.detach().requires_grad_() * 1
    above.register_hook(lambda g: hidden.backward(g.to(hidden.dtype)))
    mean_square(run.model[2](run.model[1](above)), y).backward()


def hooks_on_parameters(run: Run, x: Tensor, y: Tensor) -> None:
    weight, bias = run.model[0].parameters()
    handles = [
        weight.register_hook(lambda g: run.see(weight=g)),
        weight.register_hook(clamped),
        bias.register_hook(clamp_in_place),
        bias.register_post_accumulate_grad_hook(lambda p: run.see(bias=p.grad)),
    ]
    mean_square(run.model(x), y).backward()
    for handle in handles:
        handle.remove()


STEPS = [
    hook_on_an_activation,
    hook_that_changes_its_gradient_in_place,
    hook_on_several_tensors,
    hook_on_the_loss,
    hooks_and_two_backward_calls_of_one_graph,
    backward_from_an_activation_with_a_gradient,
    retained_gradients,
    backward_with_an_activation_among_its_inputs,
    checkpointed_by_repeating_the_forward,
    checkpointed_by_saved_tensor_hooks,
    gradient_penalty,
    gradients_that_are_differentiated_again,
    functional_gradients,
    backward_call_inside_of_a_hook,
    hooks_on_parameters,
]


def assert_close(half: Tensor, full: Tensor, name: str) -> None:
    torch.testing.assert_close(half.float(), full, rtol=5e-2, atol=2e-3, msg=lambda text: f"{name}: {text}")


def assert_trains_alike(half: Run, full: Run, step: Callable[[Run, Tensor, Tensor], None], steps: int = 6) -> None:
    """The same weights, and the same gradients seen, to fp16 accuracy."""
    weights, expected = half.train(step, steps), full.train(step, steps)
    for name in expected:
        assert_close(weights[name], expected[name], name)
    assert half.seen.keys() == full.seen.keys()
    for name in full.seen:
        assert_close(torch.stack(half.seen[name]), torch.stack(full.seen[name]), name)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("scale", [2.0, SCALE])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.replace("_", " "))
def test_trains_and_sees_gradients_as_in_full_precision(step, scale):
    assert_trains_alike(Run(fp16(scale)), Run(Precision()), step)


def full_hook(run: Run, module: nn.Module, entering: tuple, leaving: tuple) -> tuple:
    run.see(entering=entering[0], leaving=leaving[0])
    return (clamped(entering[0]),)


def full_hook_in_place(run: Run, module: nn.Module, entering: tuple, leaving: tuple) -> None:
    run.see(entering=entering[0], leaving=leaving[0])
    clamp_in_place(entering[0])


def on_each_full_hook(run: Run) -> None:
    run.model[1].register_full_backward_hook(functools.partial(full_hook, run))


def two_full_hooks(run: Run) -> None:
    run.model[1].register_full_backward_hook(functools.partial(full_hook_in_place, run))
    run.model[1].register_full_backward_hook(functools.partial(full_hook, run))


def full_pre_hook(run: Run) -> None:
    def hook(module: nn.Module, leaving: tuple) -> tuple:
        run.see(leaving=leaving[0])
        return (clamped(leaving[0]),)

    run.model[1].register_full_backward_pre_hook(hook)
    run.model[1].register_full_backward_hook(lambda _, entering, leaving: run.see(by=entering[0], of=leaving[0]))


def old_hook(run: Run) -> None:
    run.model[1].register_backward_hook(functools.partial(full_hook, run))


def hook_of_a_module_whose_inputs_want_no_gradient(run: Run) -> None:
    def hook(module: nn.Module, entering: tuple, leaving: tuple) -> None:
        assert entering == (None,)
        run.see(leaving=leaving[0])

    run.model[0].register_full_backward_hook(hook)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize(
    "register",
    [on_each_full_hook, two_full_hooks, full_pre_hook, old_hook, hook_of_a_module_whose_inputs_want_no_gradient],
    ids=lambda register: register.__name__.replace("_", " "),
)
def test_hooks_of_modules_made_before_training_act_as_in_full_precision(register):
    runs = [Run(fp16()), Run(Precision())]
    for run in runs:
        register(run)

    assert_trains_alike(*runs, lambda run, x, y: mean_square(run.model(x), y).backward())
    assert runs[0].seen


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_global_hooks_of_modules_act_as_in_full_precision():
    runs = [Run(fp16()), Run(Precision())]

    def hook(module: nn.Module, entering: tuple, leaving: tuple) -> tuple | None:
        run = next((run for run in runs if run.model[1] is module), None)
        return None if run is None else full_hook(run, module, entering, leaving)

    handle = register_module_full_backward_hook(hook)
    try:
        assert_trains_alike(*runs, lambda run, x, y: mean_square(run.model(x), y).backward())
    finally:
        handle.remove()
    assert runs[0].seen


def test_a_clamping_hook_is_bit_equal_to_a_gradient_scaler_loop_that_unscales_in_the_hook():
    half, by_hand = Run(fp16()), Run(Precision())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def clamped_by_hand(gradient: Tensor) -> Tensor:
        return (clamped(gradient.float() / SCALE) * SCALE).to(gradient.dtype)

    for number in range(6):
        x, y = by_hand.batch(number)
        by_hand.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = by_hand.model[0](x)
            hidden.register_hook(clamped_by_hand)
            loss = mean_square(by_hand.model[2](by_hand.model[1](hidden)), y)
        scaler.scale(loss).backward()
        scaler.step(by_hand.optimizer)
        scaler.update()

    weights = half.train(hook_on_an_activation, 6)

    for name, parameter in by_hand.model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_a_hook_does_not_lose_gradients_that_are_too_small_for_fp16():
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        hidden = run.model[0](x)
        hidden.register_hook(lambda g: g.clamp(-1.0, 1.0))
        (mean_square(run.model[2](run.model[1](hidden)), y) * 2.0**-20).backward()
        for parameter in run.model.parameters():
            parameter.grad.mul_(2.0**20)

    assert_trains_alike(Run(fp16(2.0**20)), Run(Precision()), step)


def test_a_hook_that_is_registered_in_a_thread_of_torchs_engine_sees_true_units():
    """Where reentrant checkpoints are nested deeply, and on any GPU, the forward is repeated in such a thread."""
    threads = set()

    def deep(run: Run, x: Tensor, levels: int) -> Tensor:
        if levels:
            return checkpoint(deep, run, x, levels - 1, use_reentrant=True)
        hidden = run.model[0](x)
        if hidden.requires_grad:
            hidden.register_hook(clamped)
            threads.add(threading.get_ident())
        return hidden

    def step(run: Run, x: Tensor, y: Tensor) -> None:
        hidden = deep(run, x.clone().requires_grad_(), 65)
        mean_square(run.model[2](run.model[1](hidden)), y).backward()

    assert_trains_alike(Run(fp16()), Run(Precision()), step, steps=2)
    assert threading.get_ident() not in threads


def test_hooks_of_other_threads_are_registered_as_they_are_while_a_step_runs():
    run = Run(fp16())
    registered = []

    def work() -> None:
        activation = torch.ones(1, requires_grad=True) * 2
        activation.register_hook(clamped)
        registered.extend(activation._backward_hooks.values())
        activation.backward()

    with run.router:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert registered == [clamped]


def test_hooks_by_which_torch_shards_modules_are_registered_as_they_are():
    def gather(gradient: Tensor) -> Tensor:
        return gradient

    gather.__module__ = "torch.distributed.fsdp"
    run = Run(fp16())

    with run.router:
        hidden = run.model[0](run.batch(0)[0])
        hidden.register_hook(gather)

    assert list(hidden._backward_hooks.values()) == [gather]


class Plain(Tensor):
    """A subclass, whose methods torch calls a second time from inside of the first."""


def test_a_hook_of_a_tensor_of_another_class_is_translated_once():
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        hidden = run.model[0](x).as_subclass(Plain)
        hidden.register_hook(lambda g: run.see(hidden=g.as_subclass(Tensor)))
        hidden.retain_grad()
        mean_square(run.model[2](run.model[1](hidden)), y).as_subclass(Tensor).backward()
        run.see(retained=hidden.grad.as_subclass(Tensor))

    assert_trains_alike(Run(fp16()), Run(Precision()), step)


PATCHED = (
    (Tensor, "register_hook"),
    (Tensor, "retain_grad"),
    (Tensor, "requires_grad_"),
    (BackwardHook, "__init__"),
    (_WrappedHook, "__init__"),
)


def torch_now() -> list[object]:
    return [(getattr(owner, name), name in vars(owner)) for owner, name in PATCHED]


@pytest.mark.parametrize("plugin", [Precision(), MixedPrecision("bf16-mixed", "cpu")])
def test_where_no_loss_is_scaled_torch_is_untouched_also_inside_of_a_step(plugin):
    before = torch_now()

    with Run(plugin).router:
        assert torch_now() == before


def test_torch_is_untouched_after_a_step_that_scaled_and_after_one_that_failed():
    run, before = Run(fp16()), torch_now()

    with run.router:
        assert all(now != then for now, then in zip(torch_now(), before, strict=True))
    assert torch_now() == before
    with pytest.raises(RuntimeError, match="mine"), run.router:
        raise RuntimeError("mine")

    assert torch_now() == before


def test_what_somebody_else_put_in_the_place_of_a_method_is_there_again_after_a_step(monkeypatch):
    mine = lambda self: None  # noqa: E731
    monkeypatch.setattr(Tensor, "retain_grad", mine)

    with Run(fp16()).router:
        assert Tensor.retain_grad is not mine

    assert Tensor.retain_grad is mine


def test_a_hook_that_raises_leaves_retained_gradients_in_true_units_and_later_steps_alone():
    run = Run(fp16())
    x, y = run.batch(0)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("mine")

    with run.router:
        hidden = run.model[0](x)
        active = run.model[1](hidden)
        active.retain_grad()
        handle = hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="mine"):
            mean_square(run.model[2](active), y).backward(retain_graph=True)
        once = active.grad.clone()
        handle.remove()
        run.optimizer.zero_grad()
        hook_on_an_activation(run, x, y)

    full = Run(Precision())
    hook_on_an_activation(full, x, y)
    assert once.abs().max() < 1
    assert_close(run.seen["before"][0], full.seen["before"][0], "before")


def test_a_module_hook_that_returns_too_much_is_told_so_by_torch():
    run = Run(fp16())
    run.model[1].register_full_backward_hook(lambda _, entering, leaving: (*entering, *leaving))

    with run.router, pytest.raises(RuntimeError, match="invalid number of grad_input, got 2, but expected 1"):
        mean_square(run.model(run.batch(0)[0]), run.batch(0)[1]).backward()


def by_requires_grad(x: Tensor) -> dict[str, list[Tensor]]:
    x.requires_grad_()
    return {}


def by_a_hook(x: Tensor) -> dict[str, list[Tensor]]:
    x.requires_grad = True
    x.register_hook(lambda g: None)
    return {}


def by_inputs(x: Tensor) -> dict[str, list[Tensor]]:
    x.requires_grad = True
    return {"inputs": [x]}


@pytest.mark.parametrize("ask", [by_requires_grad, by_a_hook, by_inputs], ids=lambda ask: ask.__name__)
def test_a_gradient_by_an_input_that_is_first_wanted_in_a_late_step_reads_in_true_units(ask):
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        run.see(step=torch.zeros(()))
        is_late = len(run.seen["step"]) == 6
        arguments = ask(x) if is_late else {}
        mean_square(run.model(x), y).backward(**arguments)
        if is_late:
            run.see(x=x.grad)

    assert_trains_alike(Run(fp16()), Run(Precision()), step)


def test_a_gradient_by_an_input_reads_in_true_units_when_a_late_step_calls_backward_from_another_place():
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        run.see(step=torch.zeros(()))
        if len(run.seen["step"]) == 6:
            x.requires_grad = True
            mean_square(run.model(x), y).backward()
            run.see(x=x.grad)
        mean_square(run.model(x), y).backward()

    assert_trains_alike(Run(fp16()), Run(Precision()), step)


def test_unfreezing_a_known_network_in_every_step_starts_no_search_for_inputs():
    run = Run(fp16())

    def step(run: Run, x: Tensor, y: Tensor) -> None:
        run.model.requires_grad_(True)
        mean_square(run.model(x), y).backward()

    run.train(step, 3)

    assert not run.router._unscaling._has_visitors


class Fused:
    """Updates each parameter as soon as its gradient is there."""

    def __init__(self, plugin: Precision) -> None:
        self.run = Run(plugin)
        parameters = list(self.run.model.parameters())
        self.optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in parameters}
        discovered = discover({"model": self.run.model, "optimizers": list(self.optimizers.values())})
        self.plugin = plugin
        self.router = StepRouter(discovered, torch.device("cpu"), precision=step_precision(plugin, discovered))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Tensor) -> None:
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad()


def test_optimizers_that_step_inside_of_backward_skip_overflows_and_adapt_the_scale_once_a_call():
    fused, by_hand = Fused(fp16(2.0**22)), Run(Precision())
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in by_hand.model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)

    for number in range(8):
        x, y = by_hand.batch(number)
        with fused.router:
            mean_square(fused.run.model(x), y).backward()
        by_hand.model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mean_square(by_hand.model(x), y)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    assert fused.router.overflow_steps > 0
    assert fused.plugin.scaler.get_scale() == scaler.get_scale() < 2.0**22
    for mine, expected in zip(fused.run.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_one_optimizer_may_step_several_times_inside_of_a_backward_call():
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        def update(_: Tensor) -> None:
            run.optimizer.step()
            run.optimizer.zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in run.model.parameters()]
        mean_square(run.model(x), y).backward()
        for handle in handles:
            handle.remove()

    assert_trains_alike(Run(fp16()), Run(Precision()), step)


def test_a_hook_that_is_taken_into_a_compiled_graph_is_warned_of(caplog):
    run = Run(fp16())

    @torch.compile(backend="aot_eager")
    def forward(x: Tensor) -> Tensor:
        hidden = run.model[0](x)
        hidden.register_hook(clamped)
        return run.model[2](run.model[1](hidden))

    run.train(lambda run, x, y: mean_square(forward(x), y).backward(), 2)

    warned = [record for record in caplog.records if record.name == "genlight.adapter.gradients.unscaled_hooks"]
    assert "registered outside of compiled code" in warned[0].getMessage()


def test_hooks_of_modules_inside_of_a_compiled_one_act_as_in_full_precision():
    runs = [Run(fp16()), Run(Precision())]
    for run in runs:
        on_each_full_hook(run)
        run.forward = torch.compile(run.model, backend="aot_eager")

    assert_trains_alike(*runs, lambda run, x, y: mean_square(run.forward(x), y).backward())
    assert runs[0].seen
