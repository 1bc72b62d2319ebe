"""``genlight compare --against``: a class under genlight, update by update, beside an old training function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..contract.exceptions import ContractError
from ..discovery.discover import Discovered, Found
from ..feed.arrow_feed import imported
from ..job.config import RunConfig
from .batches import job_batches
from .causes import Circumstances
from .plain_loop import plain_context, random_states
from .snapshot import Recording, Snapshot, leaves, live_weights, values_of_optimizer, whole_copy

__all__ = ["KINDS_OF_UPDATES", "Updates", "named_function", "record_function"]

KINDS_OF_UPDATES: Final = ("weight before", "gradient", "setting", "optimizer state", "weight")
"""In the order in which an update has them."""


def named_function(import_path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises:
        ContractError: There is no such module or name, or it is nothing that can be called.
    """
    try:
        return imported(import_path.strip(), "--against", "'module:function'")
    except (TypeError, ValueError) as error:
        raise ContractError(str(error)) from None


class _Enough(BaseException):
    """Ends a function from inside of its ``optimizer.step``; not an Exception, which it may well catch."""


def record_function(
    function: Callable[..., Any],
    config: RunConfig,
    trainer: pl.Trainer,
    how: Circumstances,
    *,
    updates: int,
    parquet_paths: Sequence[str],
    model_handles: Mapping[str, Any],
) -> Recording:
    """Call an old training function, and end it after its last update.

    Args:
        function: Called with those of ``batches`` (the raw batches of the job), ``ctx``, ``steps``, ``hyperparams`` and
            ``device`` that its signature names.
        config: The job.
        trainer: The Lightning trainer that runs the job, for its device and number of ranks.
        how: Filled in with what the function shows.
        updates: How many calls of ``optimizer.step``, at least 1.
        parquet_paths: Data files that the job's inputs brought here.
        model_handles: What they brought here for the class.

    Returns:
        Of each update what it found (weights, gradients, settings) and what it left (states, weights).

    Raises:
        ContractError: The function cannot be called so, or never steps an optimizer.
        Exception: What it raises.
    """
    at_first: list[bytes] = []
    recording = Recording()

    def at_update(reached: Snapshot) -> None:
        states = random_states()
        how.draws = how.draws or states != (at_first or states)
        at_first[:] = at_first or states
        recording.add(reached)
        if len(recording) == updates:
            raise _Enough

    try:
        with ExitStack() as stack:
            ctx = plain_context(config, trainer, model_handles)
            ctx, batches = job_batches(config, None, ctx, stack, world_size=how.world_size, parquet_paths=parquet_paths)
            given = _arguments(function, replace(ctx, dataset=batches))
            with Updates(at_update).listening():
                function(**given)
        if not len(recording):
            raise ContractError(
                "The function of --against came to its end without one call of optimizer.step, in this process and of "
                "an optimizer of torch: there is nothing to compare"
            )
    except _Enough:
        pass
    except BaseException:
        recording.close()
        raise
    return recording


def _arguments(function: Callable[..., Any], ctx: Any) -> dict[str, Any]:
    """Those of what there is that `function` names, or all of it where it takes any."""
    offered = {
        "batches": ctx.dataset,
        "ctx": ctx,
        "steps": ctx.job.max_steps,
        "hyperparams": dict(ctx.job.hyperparams),
        "device": ctx.device,
    }
    signature = inspect.signature(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {name: value for name, value in offered.items() if takes_any or name in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ContractError(
            f"The function of --against is called with those of {', '.join(offered)} that it names: {error}. Wrap it "
            "in a function that gives it the rest"
        ) from None
    return given


class Updates:
    """Takes a snapshot of each ``optimizer.step``, of any optimizer of torch.

    Values are named by place: ``optimizer 0[param_groups[0][3]]`` is the fourth tensor of the first group of the
    optimizer that stepped first.

    Args:
        at_update: Called with each; what it raises passes through the step.
    """

    def __init__(self, at_update: Callable[[Snapshot], None]) -> None:
        self._at_update = at_update
        self._order: list[Optimizer] = []
        self._values: dict[str, dict[str, Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to optimizers inside of the block."""
        handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def named(self, place: str, discovered: Discovered) -> str:
        """The name of a weight instead of its place in an optimizer, where it has one."""
        names = {id(tensor): name for name, tensor in live_weights(discovered).items()}
        known = {at: names.get(id(p), at) for each in self._order for at, p in self._places(self._found(each))}
        return next((name + place.removeprefix(at) for at, name in known.items() if place.startswith(at)), place)

    def _found(self, optimizer: Optimizer) -> Found[Optimizer]:
        if not any(optimizer is other for other in self._order):
            self._order.append(optimizer)
        name = f"optimizer {next(i for i, known in enumerate(self._order) if known is optimizer)}"
        return Found(name, name, optimizer)

    @staticmethod
    def _places(found: Found[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
        for g, group in enumerate(found.value.param_groups):
            yield from ((f"{found.path}[param_groups[{g}][{i}]]", p) for i, p in enumerate(group["params"]))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        found = self._found(optimizer)
        self._values = {"weight before": _copies(self._places(found)), "setting": _values(found, "setting")}

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        found = self._found(optimizer)
        # Not before it: a closure, which is how Lightning steps, makes them within.
        self._values["gradient"] = _copies((at, p.grad) for at, p in self._places(found) if p.grad is not None)
        self._values["optimizer state"] = _values(found, "optimizer state")
        self._values["weight"] = _copies(self._places(found))
        self._at_update(Snapshot({kind: self._values[kind] for kind in KINDS_OF_UPDATES}))


def _copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {place: whole_copy(tensor) for place, tensor in tensors}


def _values(found: Found[Optimizer], kind: str) -> dict[str, Any]:
    of_kind = [(path, value) for its_kind, path, value in values_of_optimizer(found, {}) if its_kind == kind]
    copied = (leaf for path, value in of_kind for leaf in leaves(path, value, whole=True))
    return {name: value for name, value, is_code in copied if not is_code}
