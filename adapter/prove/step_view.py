"""One step of a trainer class: its norms by module, its first value that is not finite, and the rows that cause it."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from ...callbacks.checkpoint.codec.tensors import is_plain
from ...callbacks.checkpoint.rank_state import capture_rng, restore_rng
from ...callbacks.optimizer_state import parameters_of
from ..check.snapshot import live_weights
from ..discovery.discover import Discovered, Found

Kind = Literal["weight before", "output", "gradient at output", "gradient", "weight after"]


@dataclass(frozen=True)
class Value:
    """A tensor at one moment of a step."""

    kind: Kind
    """A weight before or after the step, the output of a module or the gradient at it, or the gradient of a weight."""
    name: str
    """Path of the weight or of the module."""
    norm: float
    """Its L2 norm."""
    is_finite: bool


class StepView:
    """Reads the values of a step in the order in which they are made; waits for the device.

    Gradients of weights are read at the update, where they are unscaled and clipped; those of weights that no update
    used are read at the end of the step.

    Args:
        discovered: The objects of the class.
        counts_memory: Whether to count the bytes that each module keeps for its backward. A class that uses
            ``torch.func`` does not train then, because torch refuses both together.
    """

    def __init__(self, discovered: Discovered, *, counts_memory: bool = False) -> None:
        self.values: list[Value] = []
        self.kept_bytes: dict[str, int] = {}
        """Bytes by module; those that are kept outside of every module have the name ``""``."""
        self._counts_memory = counts_memory
        self._modules = {
            f"{found.path}.{name}" if name else found.path: part
            for found in discovered.modules
            for name, part in found.value.named_modules()
        }
        self._weights = {name: tensor for name, tensor in live_weights(discovered).items() if not is_lazy(tensor)}
        self._names = {id(tensor): name for name, tensor in self._weights.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read the step that is trained in this block."""
        self._note_weights("weight before")
        handles = [
            part.register_forward_hook(functools.partial(self._note_output, name))
            for name, part in self._modules.items()
        ]
        handles.append(register_optimizer_step_pre_hook(self._note_gradients))
        try:
            with self._counting_memory() if self._counts_memory else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()
        updated = {value.name for value in self.values if value.kind == "gradient"}
        for name, weight in self._weights.items():
            if weight.grad is not None and name not in updated:
                self._note("gradient", name, weight.grad)
        self._note_weights("weight after")

    @contextmanager
    def _counting_memory(self) -> Iterator[None]:
        running: list[str] = [""]
        seen = {tensor.untyped_storage().data_ptr() for tensor in self._weights.values()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:  # a storage counts once, and memory that was freed not again
                seen.add(storage.data_ptr())
                self.kept_bytes[running[-1]] = self.kept_bytes.get(running[-1], 0) + storage.nbytes()
            return tensor.detach()

        handles = []
        for name, part in self._modules.items():
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(part.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def first_nonfinite(self) -> Value | None:
        """The first value that is not finite."""
        return next((value for value in self.values if not value.is_finite), None)

    def has_nonfinite(self, *kinds: Kind) -> bool:
        """Whether a value of one of these kinds is not finite."""
        return any(value.kind in kinds and not value.is_finite for value in self.values)

    def by_module(self) -> dict[str, dict[str, float]]:
        """Return for each module the norms ``output`` and ``gradient``, in the order of execution, and ``kept_bytes``.

        The output is the one of all calls, and the gradient the one of the module's own weights.
        """
        norms: dict[str, dict[str, float]] = {}
        for value in self.values:
            if value.kind in ("output", "gradient"):
                owner = value.name if value.kind == "output" else value.name.rpartition(".")[0]
                of_module = norms.setdefault(owner if owner in self._modules else value.name, {})
                of_module[value.kind] = math.hypot(of_module.get(value.kind, 0.0), value.norm)
        for name, size in self.kept_bytes.items():
            norms.setdefault(name, {})["kept_bytes"] = size
        return norms

    def _note_weights(self, kind: Kind) -> None:
        for name, weight in self._weights.items():
            self._note(kind, name, weight)

    def _note_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note("output", name, tensor)
                if tensor.requires_grad:
                    note = functools.partial(self._note, "gradient at output", name)
                    tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        for weight in parameters_of(optimizer):
            if weight.grad is not None and id(weight) in self._names:
                self._note("gradient", self._names[id(weight)], weight.grad)

    def _note(self, kind: Kind, name: str, tensor: Tensor) -> None:
        if is_plain(tensor) and tensor.is_floating_point() and tensor.numel():
            values = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
            norm = float(torch.linalg.vector_norm(values))
            # The squares of finite values may overflow.
            self.values.append(Value(kind, name, norm, math.isfinite(norm) or bool(torch.isfinite(values).all())))


class SavedState:
    """Copies of weights, gradients, optimizers, schedulers and random states before a step, in host memory.

    Other objects of the class, such as counters, are not copied.

    Args:
        discovered: The objects of the class.
    """

    def __init__(self, discovered: Discovered) -> None:
        tensors = [*live_weights(discovered).values(), *(found.value for found in discovered.tensors)]
        self._tensors = [(each, _copy(each), _copy(each.grad)) for each in tensors if not is_lazy(each)]
        stateful: tuple[Found[Any], ...] = (*discovered.optimizers, *discovered.schedulers, *discovered.scalers)
        self._states = [(found.value, tree_map(_copy, found.value.state_dict())) for found in stateful]
        self._random = capture_rng()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value, gradient in self._tensors:
                tensor.copy_(value)
                tensor.grad = None if gradient is None else _copy(gradient).to(tensor.device)
        for part, state in self._states:
            part.load_state_dict(tree_map(_copy, state))
        restore_rng(self._random)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@dataclass(frozen=True)
class RowSearch:
    """The rows that make a step fail."""

    groups: tuple[tuple[int, int], ...] = ()
    """First and last index of rows that make it fail: single rows, or rows that could not be told apart."""
    is_confirmed: bool = False
    """Whether the step without these rows does not fail."""
    trials: int = 0
    problem: str = ""
    """Why there is no result."""


def find_rows(count: int, fails: Callable[[Sequence[int]], bool]) -> RowSearch:
    """Search by bisection for the rows that make a step fail, with at most ``2 * log2(count) + 4`` trials.

    Args:
        count: The number of rows.
        fails: Repeats the step with some rows, and returns whether it fails.

    Raises:
        Exception: `fails` raised it.
    """
    budget, trials = 2 * math.ceil(math.log2(count)) + 3, 1
    if not fails(range(count)):
        return RowSearch(trials=trials, problem="the repeated step does not fail")
    groups, waiting = [], [range(count)]
    while waiting:
        group = waiting.pop(0)
        middle, failing = len(group) // 2, []
        if middle and trials + 2 <= budget:
            trials += 2
            failing = [half for half in (group[:middle], group[middle:]) if fails(half)]
        waiting += failing
        groups += [] if failing else [group]
    others = [row for row in range(count) if not any(row in group for group in groups)]
    bounds = tuple(sorted((group[0], group[-1]) for group in groups))
    return RowSearch(bounds, bool(others) and not fails(others), trials + bool(others))
