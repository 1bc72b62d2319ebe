"""Mistakes that raise nothing: weights that nobody updates, gradients that pile up, scores of nan, settings unread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..discovery.discover import Discovered, walk
from ..discovery.parameter_aliases import key_text
from ..module.module import ContractModule
from ..module.plugin_loading import optional_hook
from ..plumbing.counted_dict import CountedDict
from ..plumbing.finding import Finding
from .isolation import quiet
from .snapshot import Snapshot, live_weights, snapshot
from .subject import Subject, Trained

__all__ = ["Observed", "check_evaluate", "check_gradients", "check_rank_state"]


class Observed:
    """What a run showed while it went on: its metrics, and who updated what."""

    def __init__(self) -> None:
        self.snapshots: dict[int, Snapshot] = {}
        """What the trainer kept after each step, and before the first."""
        self._metrics: list[dict[str, float]] = []
        self._found_gradients: dict[int, bool] = {}
        """By the id of each optimizer that stepped, whether a parameter of it ever had a gradient."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to optimizers."""

        def after(optimizer: Optimizer, *_: Any) -> None:
            found = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            self._found_gradients[id(optimizer)] = found or self._found_gradients.get(id(optimizer), False)

        handle = register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            handle.remove()

    def at_step(self, step: int, module: ContractModule) -> None:
        """Take what there is after a step, or before the first."""
        self.snapshots[step] = snapshot(module.contract_state, module.plugin, host=module)
        if step:
            self._metrics.append(module.metrics())

    def findings(self, discovered: Discovered, hyperparams: Mapping[str, Any]) -> Iterator[Finding]:
        """What to say of it, and of the hyperparameters that it was given, once the run has ended."""
        yield from self._of_metrics()
        yield from self._of_updates(discovered)
        if isinstance(hyperparams, CountedDict) and hyperparams:
            unread = hyperparams.unread
            yield Finding(
                "hyperparams",
                "warn" if unread else "pass",
                f"nobody read {', '.join(unread)}" if unread else "all were read",
                "Read it from ctx.job.hyperparams, mend its name, or leave it out of the job." if unread else "",
            )

    def _of_metrics(self) -> Iterator[Finding]:
        names = dict.fromkeys(name for metrics in self._metrics for name in metrics)
        nan = [name for name in names if all(math.isnan(metrics.get(name, math.nan)) for metrics in self._metrics)]
        if nan:
            yield Finding(
                "metrics",
                "fail" if "train/loss" in nan else "warn",
                f"{', '.join(nan)} is nan after each of {len(self._metrics)} steps",
                "Look for a division by a count of 0, a logarithm of 0, or a mean of nothing.",
            )
        elif names:
            yield Finding("metrics", "pass", ", ".join(names))

    def _of_updates(self, discovered: Discovered) -> Iterator[Finding]:
        parameters = {
            *(f"{found.path}.{name}" for found in discovered.modules for name, _ in found.value.named_parameters()),
            *(found.path for found in discovered.parameters),
        }
        steps = max(self.snapshots)
        changed = parameters & set(self.snapshots[0].differences(self.snapshots[steps]))
        blind = [found.path for found in discovered.optimizers if self._found_gradients.get(id(found.value)) is False]
        copies = f": {', '.join(blind)} never found a gradient at what it holds, which may be a copy of the weights"
        if parameters and not changed:
            yield Finding(
                "updates",
                "fail" if self._found_gradients else "warn",
                f"no weight changed in {steps} steps" + (copies if blind else ""),
                "Give the optimizer the parameters of the model itself."
                if blind
                else "Look for a missing step of the optimizer, a learning rate of 0, or a loss without "
                "the weights in it; if gradients are accumulated for longer, give --steps.",
            )
        elif blind:
            remedy = "Give the optimizer the parameters of the model itself."
            yield Finding("updates", "warn", f"weights change, but{copies[1:]}", remedy)
        elif parameters:
            yield Finding("updates", "pass", f"{len(changed)} of {len(parameters)} parameters changed in {steps} steps")


class _FoundError(Exception):
    """Ends a run that has shown what it was made for."""


def check_gradients(subject: Subject) -> Iterator[Finding]:
    """Whether gradients of one update are still there in the next one, which a ``zero_grad`` that is missing leaves.

    What an update has left when its step ends, and nothing has added to, becomes nan: whoever clears it never notices.
    """
    left: dict[int, tuple[Tensor, Tensor, int]] = {}
    spoilt: set[int] = set()
    stale: set[int] = set()

    def after(optimizer: Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
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

    handle = register_optimizer_step_post_hook(after)
    try:
        # An error of the class may come of the nan, and other runs show those that do not.
        with contextlib.suppress(Exception):
            subject.train(at_step=at_step)
    finally:
        handle.remove()
    if stale:
        named = [name for key, name in names.items() if key in stale]
        yield Finding(
            "gradients",
            "warn",
            f"gradients of the update before are still in the next one, of {', '.join(named[:3]) or 'its parameters'}"
            + (f" and {len(named) - 3} more" if len(named) > 3 else ""),
            "Call zero_grad between an update and the next backward.",
        )


def check_evaluate(subject: Subject) -> Iterator[Finding]:
    """Whether ``evaluate`` leaves weights, optimizer states and the modes of modules as it found them."""
    module = subject.train(stop_after=1).module
    evaluate = optional_hook(module.plugin, "evaluate")
    if evaluate is None:
        return
    assert module.discovered is not None
    state, plugin, ctx = module.contract_state, module.plugin, module.ctx
    parts = {
        f"{found.path}.{name}".removesuffix("."): part
        for found in module.discovered.modules
        for name, part in found.value.named_modules()
    }
    before = snapshot(state, plugin, kinds=("weight", "optimizer state"), host=module)
    modes = {path: part.training for path, part in parts.items()}
    try:
        with quiet():
            evaluate(state, ctx)
    except Exception as error:  # noqa: BLE001  # whatever the class raises is the finding
        yield Finding("evaluate", "warn", f"{type(error).__name__}: {error}", "Have it work with the data of a check.")
        return
    changed = before.differences(snapshot(state, plugin, kinds=("weight", "optimizer state"), host=module))
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
    changed = subject.train(at_step=at_step).reached("weight")
    if reached.differences(changed):
        named = sorted(differing)
        yield Finding(
            "rank state",
            "warn",
            f"{', '.join(named[:3])} differs between ranks ({len(named)} values), and training depends on it: each "
            "rank trains by its own rows there",
            "Average it over all ranks, broadcast that of rank 0, or name it in `rank_local` if it is meant so.",
        )


@torch.no_grad()
def _change(state: Any, trainer: object, paths: Collection[str]) -> None:
    """Give the numbers at `paths` other values; those that cannot be reached stay."""
    seen: dict[int, Any] = {}
    for path, node in (*walk(state, "state", seen=seen, without=trainer), *walk(trainer, "trainer", seen=seen)):
        if isinstance(node, Tensor):
            if path in paths and node.is_floating_point():
                node.mul_(1.5)
        elif isinstance(node, MutableMapping):
            for key, value in node.items():
                if isinstance(value, float) and f"{path}[{key_text(key)}]" in paths:
                    node[key] = 1.5 * value
        elif isinstance(node, list):
            for i, value in enumerate(node):
                if isinstance(value, float) and f"{path}[{i}]" in paths:
                    node[i] = 1.5 * value
        else:
            for name, value in list(getattr(node, "__dict__", {}).items()):
                if isinstance(value, float) and f"{path}.{name}" in paths:
                    object.__setattr__(node, name, 1.5 * value)
