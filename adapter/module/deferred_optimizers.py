"""Optimizers whose groups of parameters changed after ``configure``, as gradual unfreezing does, on resume.

Lightning restores optimizers before the trainer's ``load_state_dict``, which alone knows how to add the groups again.
So the state of an optimizer that does not fit yet waits until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ..contract.exceptions import CheckpointError, ContractError
from ..discovery.discover import Discovered, Found

__all__ = ["optimizer_configs", "put_back_what_fits", "restore_set_aside", "set_aside"]

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What schedulers of torch, which a trainer may make later, put into groups."""


def optimizer_configs(discovered: Discovered) -> list[dict[str, Any]]:
    """What Lightning is told of the optimizers, each with the first scheduler that drives it."""
    configs: list[dict[str, Any]] = [{"optimizer": found.value} for found in discovered.optimizers]
    for found in discovered.schedulers:
        for config in configs:
            if getattr(found.value, "optimizer", None) is config["optimizer"] and "lr_scheduler" not in config:
                config["lr_scheduler"] = {"scheduler": found.value, "interval": "step"}
    return configs


def set_aside(optimizers: Sequence[Found[Optimizer]], states: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Take the states out of `states` that do not fit their optimizers, leaving what changes nothing in their place.

    Returns:
        What was taken out, by the index of its optimizer.

    Raises:
        CheckpointError: A state is that of another kind of optimizer.
    """
    _require_same_kinds(optimizers, states)
    waiting = {}
    for index, (found, state) in enumerate(zip(optimizers, states, strict=False)):
        groups = state.get("param_groups")  # an optimizer may have a state_dict of its own
        if groups is not None and _sizes(groups) != _sizes(found.value.param_groups):
            waiting[index] = state
            states[index] = found.value.state_dict()
    return waiting


def put_back_what_fits(
    optimizers: Sequence[Found[Optimizer]], waiting: dict[int, dict[str, Any]], states: list[dict[str, Any]]
) -> None:
    """Look once more before Lightning restores `states`: a callback may have added the groups again meanwhile."""
    for index, state in list(waiting.items()):
        optimizer = optimizers[index].value
        fits = _sizes(state["param_groups"]) == _sizes(optimizer.param_groups)
        states[index] = waiting.pop(index) if fits else optimizer.state_dict()


def restore_set_aside(optimizers: Sequence[Found[Optimizer]], waiting: Mapping[int, dict[str, Any]]) -> None:
    """Restore what `set_aside` took out.

    Raises:
        ContractError: An optimizer still has other groups than it had.
    """
    for index, state in waiting.items():
        found = optimizers[index]
        had, has = _sizes(state["param_groups"]), _sizes(found.value.param_groups)
        if had != has:
            raise ContractError(
                f"{found.path} had groups of {had} parameters when the checkpoint was saved, and has groups of {has} "
                "now. Build the same groups in `configure`, or add what was added while training in `load_state_dict`."
            )
        found.value.load_state_dict(state)


def _require_same_kinds(optimizers: Sequence[Found[Optimizer]], states: Sequence[Mapping[str, Any]]) -> None:
    """Raise where the settings in a state's groups are not those of its optimizer, which would fail within a step.

    A release of torch adds a setting or drops one; only of another kind of optimizer some lack and others are new.
    """
    for found, state in zip(optimizers, states, strict=False):
        for saved, built in zip(state.get("param_groups", ()), found.value.param_groups, strict=False):
            lacking = sorted(found.value.defaults.keys() - saved.keys())
            foreign = sorted(saved.keys() - built.keys() - _OF_SCHEDULERS)
            if lacking and foreign:
                raise CheckpointError(
                    f"{found.path} is now {type(found.value).__name__}, with {', '.join(lacking)}; the optimizer of "
                    f"the checkpoint had {', '.join(foreign)} instead. Build the optimizer as it was, or start at "
                    "step 0 with `genlight run --fresh`, of a fit `--resume never`."
                )


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
