"""``genlight compare --against``: a class under genlight, update by update, beside an old training function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...callbacks.optimizer_state import named_values
from ..contract.exceptions import ContractError
from ..feed.arrow_feed import imported
from ..job.config import RunConfig
from ..module.module import ContractModule
from .causes import Circumstances
from .plain_loop import job_batches, plain_context, random_states
from .snapshot import Recording, Snapshot, leaves, live_weights, whole_copy

if TYPE_CHECKING:
    from .compare import Comparison

__all__ = ["KINDS_OF_UPDATES", "UpdateComparison", "named_function", "record_function"]

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
    ctx = plain_context(config, trainer, model_handles)
    batches = job_batches(config, parquet_paths, how, ctx)
    offered = {
        "batches": batches,
        "ctx": replace(ctx, dataset=batches),
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
    recording = Recording()
    at_first: list[bytes] = []

    def told(reached: Snapshot) -> None:
        states = random_states()
        how.draws = how.draws or states != (at_first or states)
        at_first[:] = at_first or states
        recording.add(reached)
        if len(recording) == updates:
            raise _Enough

    try:
        with _Updates(told).listening():
            function(**given)
    except _Enough:
        pass
    except BaseException:
        recording.close()
        raise
    if not len(recording):
        recording.close()
        raise ContractError(
            "The function of --against came to its end without one call of optimizer.step, in this process and of an "
            "optimizer of torch: there is nothing to compare"
        )
    return recording


class UpdateComparison(pl.Callback):
    """Compares the updates of a hosted training with those of a function, and ends it after the last one.

    Args:
        updates: How many.
        comparison: Gets them.
    """

    def __init__(self, updates: int, comparison: Comparison) -> None:
        self.updates = updates
        self.comparison = comparison
        self.count = 0
        self._seen = _Updates(self._told)
        self._listening = ExitStack()
        self._module: ContractModule | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to listen to optimizers."""
        assert isinstance(pl_module, ContractModule)
        self._module = pl_module
        self._listening.enter_context(self._seen.listening())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End the training after the last update."""
        if self.count >= self.updates:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        """Listen no longer.

        Raises:
            ContractError: There was no update.
        """
        self._listening.close()
        if not self.count:
            raise ContractError("The class calls no optimizer.step: there is nothing to compare with the function")

    def on_exception(self, *_: Any) -> None:
        """Listen no longer."""
        self._listening.close()

    def _told(self, hosted: Snapshot) -> None:
        self.count += 1
        comparison = self.comparison
        if comparison.recording is None or self.count > len(comparison.recording):
            return
        had = comparison.first
        comparison.take(self.count, comparison.recording[self.count - 1], hosted)
        if comparison.first is not had and comparison.first is not None:
            comparison.first = replace(comparison.first, name=self._named(comparison.first.name))

    def _named(self, place: str) -> str:
        """The name of a weight in place of its place in an optimizer, where it has one."""
        assert self._module is not None
        assert self._module.discovered is not None
        names = {id(tensor): name for name, tensor in live_weights(self._module.discovered).items()}
        named = {where: names.get(id(p), where) for each in self._seen.order for where, p in self._seen.places(each)}
        head, bracket, tail = place.partition("]")
        return named.get(head + bracket, head + bracket) + tail


class _Updates:
    """Takes a snapshot of each ``optimizer.step``, of any optimizer of torch.

    Values are named by place: ``optimizer 0 [3]`` is the fourth tensor of the optimizer that stepped first.

    Args:
        told: Called with each; what it raises passes through the step.
    """

    def __init__(self, told: Callable[[Snapshot], None]) -> None:
        self.order: list[Optimizer] = []
        self._told = told
        self._found: dict[str, dict[str, Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to optimizers inside of the block."""
        handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def places(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of an optimizer by their places."""
        number = next(i for i, known in enumerate(self.order) if known is optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return ((f"optimizer {number} [{i}]", p) for i, p in enumerate(parameters))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is other for other in self.order):
            self.order.append(optimizer)
        number = next(i for i, known in enumerate(self.order) if known is optimizer)
        self._found["weight before"] = _copies(self.places(optimizer))
        self._found["setting"] = {
            name: value
            for g, group in enumerate(optimizer.param_groups)
            for key, setting in group.items()
            if key != "params"
            for name, value, _ in leaves(f"optimizer {number} group {g}.{key}", setting)
        }

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        places = list(self.places(optimizer))
        # Not before it: a closure, which is how Lightning steps, makes them within.
        self._found["gradient"] = _copies((place, p.grad) for place, p in places if p.grad is not None)
        self._found["optimizer state"] = {
            name: value
            for place, parameter in places
            for key, entry in named_values(optimizer.state.get(parameter, {}))
            for name, value, is_code in leaves(f"{place}.{key}", entry, whole=True)
            if not is_code
        }
        self._found["weight"] = _copies(places)
        self._told(Snapshot({kind: self._found[kind] for kind in KINDS_OF_UPDATES}))


def _copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {place: whole_copy(tensor) for place, tensor in tensors}
