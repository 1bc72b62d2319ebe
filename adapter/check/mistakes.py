"""Mistakes that raise nothing: weights that nobody updates, gradients that pile up, scores of nan, settings unread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.optimizer_state import parameters_of
from ..discovery.children import below
from ..discovery.discover import walk_both
from ..module.module import ContractModule
from ..module.plugin_loading import optional_hook
from ..plumbing.counted_dict import CountedDict
from ..plumbing.finding import Finding
from .isolation import quiet
from .snapshot import live_weights
from .subject import Subject, Trained

__all__ = [
    "check_evaluate",
    "check_gradients",
    "check_hyperparams",
    "check_metrics",
    "check_rank_state",
    "check_updates",
]


def check_metrics(whole: Trained) -> Iterator[Finding]:
    """Whether a metric is nan after every step."""
    names = dict.fromkeys(name for metrics in whole.metrics for name in metrics)
    nan = [name for name in names if all(math.isnan(metrics.get(name, math.nan)) for metrics in whole.metrics)]
    if nan:
        text = f"{', '.join(nan)} is nan after each of {len(whole.metrics)} steps"
        remedy = "Look for a division by a count of 0, a logarithm of 0, or a mean of nothing."
        yield Finding("metrics", "fail" if "train/loss" in nan else "warn", text, remedy)
    elif names:
        yield Finding("metrics", "pass", ", ".join(names))


def check_updates(whole: Trained, found_gradients: Mapping[int, bool]) -> Iterator[Finding]:
    """Whether weights change, by optimizers that hold them.

    Args:
        whole: A run.
        found_gradients: By the id of each optimizer that stepped in it, whether it ever found a gradient.
    """
    discovered, steps = whole.discovered, max(whole.snapshots)
    parameters = {
        *(f"{found.path}.{name}" for found in discovered.modules for name, _ in found.value.named_parameters()),
        *(found.path for found in discovered.parameters),
    }
    changed = parameters & set(whole.snapshots[0].differences(whole.snapshots[steps]))
    blind = [found.path for found in discovered.optimizers if found_gradients.get(id(found.value)) is False]
    copies = f"{', '.join(blind)} never found a gradient at what it holds, which may be a copy of the weights"
    remedy = "Give the optimizer the parameters of the model itself."
    if parameters and not changed:
        text = f"no weight changed in {steps} steps" + (f": {copies}" if blind else "")
        of_a_step = (
            "Look for a missing step of the optimizer, a learning rate of 0, or a loss without the weights in it; if "
            "gradients are accumulated for longer, give --steps."
        )
        yield Finding("updates", "fail" if found_gradients else "warn", text, remedy if blind else of_a_step)
    elif blind:
        yield Finding("updates", "warn", f"weights change, but {copies}", remedy)
    elif parameters:
        yield Finding("updates", "pass", f"{len(changed)} of {len(parameters)} parameters changed in {steps} steps")


def check_hyperparams(whole: Trained) -> Iterator[Finding]:
    """Whether somebody read each hyperparameter of the job."""
    hyperparams = whole.module.ctx.job.hyperparams
    if isinstance(hyperparams, CountedDict) and hyperparams:
        if unread := hyperparams.unread:
            remedy = "Read it from ctx.job.hyperparams, mend its name, or leave it out of the job."
            yield Finding("hyperparams", "warn", f"nobody read {', '.join(unread)}", remedy)
        else:
            yield Finding("hyperparams", "pass", "all were read")


class _FoundError(Exception):
    """Ends a run that has shown what it was made for."""


def check_gradients(subject: Subject) -> Iterator[Finding]:
    """Whether gradients of one update are still there in the next one, which a ``zero_grad`` that is missing leaves.

    What an update has left when its step ends, and nothing has added to, becomes nan: whoever clears it never notices.
    """
    left: dict[int, tuple[Tensor, Tensor, int]] = {}
    spoilt: set[int] = set()
    stale: set[int] = set()

    def after(optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if id(parameter) in spoilt and bool(gradient.isnan().any()):
                stale.add(id(parameter))
            left[id(parameter)] = (parameter, gradient, gradient._version)
        if stale:
            raise _FoundError

    names: dict[int, str] = {}

    def at_step(_: int, module: ContractModule) -> None:
        assert module.discovered is not None
        names.update({id(tensor): name for name, tensor in live_weights(module.discovered).items()})
        for key, (parameter, gradient, version) in left.items():
            if parameter.grad is gradient and gradient._version == version:
                gradient.detach().fill_(math.nan)
                spoilt.add(key)
        left.clear()

    # An error of the class may come of the nan, and other runs show those that do not.
    with contextlib.suppress(Exception):
        subject.train(at_step=at_step, at_update=after)
    if stale:
        named = [name for key, name in names.items() if key in stale]
        text = (
            f"gradients of the update before are still in the next one, of {', '.join(named[:3]) or 'its parameters'}"
        )
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        remedy = "Call zero_grad between an update and the next backward."
        yield Finding("gradients", "warn", text + more, remedy)


def check_evaluate(subject: Subject) -> Iterator[Finding]:
    """Whether ``evaluate`` leaves weights, optimizer states and the modes of modules as it found them."""
    if optional_hook(subject.make(), "evaluate") is None:
        return
    trained = subject.train(stop_after=1)
    module: Any = trained.module
    parts = {
        f"{found.path}.{name}".removesuffix("."): part
        for found in trained.discovered.modules
        for name, part in found.value.named_modules()
    }
    before = trained.reached("weight", "optimizer state")
    modes = {path: part.training for path, part in parts.items()}
    try:
        with quiet():
            module.plugin.evaluate(module.contract_state, module.ctx)
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield Finding("evaluate", "warn", f"{type(error).__name__}: {error}", "Have it work with the data of a check.")
        return
    changed = before.differences(trained.reached("weight", "optimizer state"))
    modes_left = [path for path, part in parts.items() if part.training != modes[path]]
    if changed:
        remedy = "Put averaged weights back after the evaluation, and evaluate in eval mode."
        yield Finding("evaluate", "fail", f"{changed[0]} is another after it ({len(changed)} values)", remedy)
    elif modes_left:
        mode = "train" if parts[modes_left[0]].training else "eval"
        text = f"{modes_left[0]} is in {mode} mode after it and was not before: the next steps train so"
        yield Finding("evaluate", "fail", text, "Put the modes back at its end: model.train().")
    else:
        yield Finding("evaluate", "pass", "leaves weights and modes as they were")


def check_rank_state(subject: Subject, whole: Trained, differing: Collection[str]) -> Iterator[Finding]:
    """Whether training depends on values that each rank has from its own rows, such as first losses to scale by.

    Args:
        subject: The class under test.
        whole: Its run on one process.
        differing: Paths of the values that two ranks had otherwise; they are changed half-way of another run.
    """

    def at_step(step: int, module: ContractModule) -> None:
        if step == subject.steps:
            _change(module.contract_state, module.plugin, differing)

    reached = whole.reached("weight")
    if not differing or reached.differences(subject.train().reached("weight")):
        return
    if reached.differences(subject.train(at_step=at_step).reached("weight")):
        text = (
            f"{', '.join(sorted(differing)[:3])} differs between ranks ({len(differing)} values), and training depends"
        )
        remedy = "Average it over all ranks, broadcast that of rank 0, or name it in `rank_local` if it is meant so."
        yield Finding("rank state", "warn", f"{text}: each rank trains by its own rows there", remedy)


@torch.no_grad()
def _change(state: Any, trainer: object, paths: Collection[str]) -> None:
    """Give the numbers at `paths` other values; those that cannot be reached stay."""
    for path, node in list(walk_both(state, trainer)):
        if isinstance(node, Tensor):
            if path in paths and node.is_floating_point():
                node.mul_(1.5)
            continue
        for where, value, put, _ in list(below(path, node)):
            if isinstance(value, float) and where in paths and put is not None:
                put(1.5 * value)
