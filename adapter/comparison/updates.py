"""What each ``optimizer.step`` found and left, whoever calls it: an old training function, or a hosted class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .causes import Circumstances
from .facts import Facts, numbers, whole_copy
from .plain_loop import random_states

__all__ = ["KINDS_OF_UPDATES", "likely_cause_of_update", "recorded_updates"]

KINDS_OF_UPDATES: Final = ("weight before", "gradient", "setting", "optimizer state", "weight")
"""In the order in which an update has them."""

PARALLEL = 1e-3
"""Up to this relative rest, one gradient is a multiple of another."""


@contextmanager
def recorded_updates(
    told: Callable[[Facts], None],
    how: Circumstances | None = None,
    *,
    names: dict[str, str] | None = None,
    names_of: Callable[[], dict[int, str]] = dict,
) -> Iterator[None]:
    """Call `told` with the facts of each ``optimizer.step`` inside of the block, of any optimizer of torch.

    Values are named by place: ``optimizer 0 [3]`` is the fourth tensor of the optimizer that stepped first.

    Args:
        told: Called after each update; what it raises passes through the step.
        how: Filled in with whether random numbers were drawn between updates.
        names: Filled in with a name for each place that `names_of` knows.
        names_of: Gives names by the ids of tensors; asked when an optimizer steps for the first time.
    """
    order: list[Optimizer] = []
    found: dict[str, dict[str, torch.Tensor]] = {}
    states: list[list[bytes]] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is other for other in order):
            order.append(optimizer)
            if names is not None:
                given = names_of()
                names.update({place: given[id(p)] for place, p in _places(order, optimizer) if id(p) in given})
        places = list(_places(order, optimizer))
        groups = list(enumerate(optimizer.param_groups))
        prefix = f"optimizer {_index(order, optimizer)}"
        found["weight before"] = _copies(places)
        found["setting"] = {
            name: value for g, group in groups for name, value in numbers(group, f"{prefix} group {g}").items()
        }

    def after(optimizer: Optimizer, *_: Any) -> None:
        places = list(_places(order, optimizer))
        # Not before it: a closure, which is how Lightning steps, makes them within.
        found["gradient"] = _copies((place, p.grad) for place, p in places if p.grad is not None)
        found["optimizer state"] = {
            name: value
            for place, parameter in places
            for name, value in numbers(optimizer.state.get(parameter, {}), place, tensors=True).items()
        }
        found["weight"] = _copies(places)
        if how is not None:
            states.append(random_states())
            how.draws = how.draws or states[-1] != states[0]
        told({kind: found[kind] for kind in KINDS_OF_UPDATES})

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def likely_cause_of_update(kind: str, name: str, update: int, plain: Facts, hosted: Facts, how: Circumstances) -> str:
    """The most probable reason why an update of an old training function is not that of the class.

    Args:
        kind: One of `KINDS_OF_UPDATES`.
        name: Of the value that differs.
        update: Its number, from 1.
        plain: What the function had.
        hosted: What the class had.
        how: How the two ran.
    """
    a, b = plain[kind].get(name), hosted[kind].get(name)
    if a is None or b is None:
        return (
            f"Only {'genlight' if a is None else 'the function'} has it: the optimizers hold other parameters, or "
            "some of them are frozen or unused in one of the two."
        )
    if a.shape != b.shape:
        return "The two build another model, or hand its parameters to the optimizer in another order."
    if kind == "weight before":
        return (
            "The weights differ from the start: seed both the same way right before the model is built, and build it "
            "in the same order."
            if update == 1
            else "Something other than an optimizer changed the weights between two updates in one of the two."
        )
    if kind == "gradient":
        return _about_gradient(a, b, how)
    if kind == "setting":
        return "The optimizer or its schedule has another setting; the name says which."
    if how.is_half:
        return f"The rounding of {how.precision}, if it is small; judge it with a larger --rtol."
    return "Gradients and settings agree, and the update does not: another optimizer, or another version of its rule."


def _about_gradient(a: torch.Tensor, b: torch.Tensor, how: Circumstances) -> str:
    a, b = a.double().flatten(), b.double().flatten()
    factor = float(a @ b / (a @ a)) if float(a @ a) > 0 else math.nan
    if factor > 0 and float((b - factor * a).norm()) <= PARALLEL * float(b.norm()):
        return (
            f"It is {factor:.6g} times that of the function: one of the two sums where the other takes a mean, "
            "clips, or divides by the steps of accumulation."
        )
    if how.draws:
        return (
            "The step draws random numbers, so seed both alike, right before the first step. Where that is done, they "
            "have other rows, another order of rows, or another loss."
        )
    if how.is_half:
        return f"The rounding of {how.precision}, if it is small; judge it with a larger --rtol."
    return "The weights agree and the gradient does not: other rows, another order of rows, or another loss."


def _copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {place: whole_copy(tensor) for place, tensor in tensors}


def _index(order: list[Optimizer], optimizer: Optimizer) -> int:
    return next(i for i, known in enumerate(order) if known is optimizer)


def _places(order: list[Optimizer], optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return ((f"optimizer {_index(order, optimizer)} [{i}]", p) for i, p in enumerate(parameters))
