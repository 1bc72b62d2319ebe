"""The state that optimizers of every kind have in common.

What they keep is usually a mapping for each parameter, but torch takes anything, under any key:
MADGRAD counts its steps in ``state["k"]``, a tensor; others keep one tensor, and no mapping, for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["map_values", "named_values", "parameters_of", "settings_and_counters", "with_step_hooks"]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that `optimizer` holds now, in the order of its groups; one in two groups comes twice."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def named_values(entry: Any) -> Iterator[tuple[str, Any]]:
    """The values of one entry of ``optimizer.state``, by name; one that is not a mapping has the name ``state``."""
    if isinstance(entry, Mapping):
        yield from entry.items()
    else:
        yield "state", entry


def map_values(function: Callable[[Any], Any], entry: Any) -> Any:
    """An entry like this one with `function` applied to each of its values."""
    if isinstance(entry, Mapping):
        return {name: function(value) for name, value in entry.items()}
    return function(entry)


def settings_and_counters(path: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The state of an optimizer that is no tensor of its parameters: settings of its groups, and whole numbers.

    Args:
        path: What the names begin with.
        optimizer: Of any make.
    """
    for g, group in enumerate(optimizer.param_groups):
        yield from ((f"{path}.param_groups[{g}].{key}", value) for key, value in group.items() if key != "params")
    state: Mapping[Any, Any] = optimizer.state
    for i, (key, entry) in enumerate(state.items()):
        place = key if isinstance(key, str) else f"parameter {i}"
        for name, value in named_values(entry):
            if isinstance(value, int):
                yield f"{path}.state[{place}].{name}", value


def with_step_hooks(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those of `optimizers` whose step calls its hooks; of a wrapper that calls none, the optimizer that it wraps.

    A wrapper whose constructor leaves out that of `torch.optim.Optimizer`, as opacus' DPOptimizer does, has no hooks.
    """
    found: list[Optimizer] = []
    for optimizer in optimizers:
        if "_optimizer_step_pre_hooks" in vars(optimizer):
            found.append(optimizer)
        else:
            found += with_step_hooks(value for value in vars(optimizer).values() if isinstance(value, Optimizer))
    return found
