"""``genlight compare --against``: a class under genlight, update by update, beside an old training function."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...callbacks.optimizer_state import named_values
from ..contract.exceptions import ContractError
from ..job.config import RunConfig
from ..module.module import ContractModule
from ..module.plugin_loading import on_sys_path
from .causes import Circumstances
from .compare import ComparedJob, Comparison, compared_job
from .isolation import quiet, seeded
from .plain_loop import circumstances_of, job_batches, plain_context, random_states
from .snapshot import (
    Difference,
    Recording,
    Snapshot,
    StepDistances,
    as_numbers,
    compare_snapshots,
    described,
    leaves,
    live_weights,
    whole_copy,
)
from .watch import default_rtol

__all__ = ["compare_with_function"]


def compare_with_function(
    config: RunConfig, against: str, *, updates: int, rtol: float | None = None, seed: int = 0
) -> Comparison | None:
    """Run an old training function, then the class of a job under genlight, and compare their updates.

    Of each ``optimizer.step`` that is what it found (weights, gradients, settings) and what it left (states, weights).

    Args:
        config: The job.
        against: ``module:function``. It is called with those of ``batches`` (the raw batches of the job), ``ctx``,
            ``steps``, ``hyperparams`` and ``device`` that its signature names, and ended after the last update.
        updates: How many calls of ``optimizer.step``, at least 1.
        rtol: Distances up to this are none; None takes `default_rtol`.
        seed: Of the random numbers of both.

    Returns:
        What came of it; None on ranks other than the first.

    Raises:
        ContractError: There is no such function, it cannot be called so, or one of the two never steps an optimizer.
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: What the function or the class raises.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        function = find_function(against)
        job = compared_job(config, seed=seed)
        old = Recording()
        stack.callback(old.close)
        watch = _Updates(updates, old, Circumstances())

        def at_start(trainer: pl.Trainer) -> None:
            how = watch.how = circumstances_of(trainer)
            watch.rtol = default_rtol(how) if rtol is None else rtol
            watch.compares = trainer.is_global_zero
            if watch.compares:
                _record_function(function, against, job, trainer, old, how, updates)

        job.train([watch], at_start=at_start)
        return _comparison(watch, old, against) if watch.compares else None


def _record_function(
    function: Any, against: str, job: ComparedJob, trainer: pl.Trainer, old: Recording, how: Circumstances, updates: int
) -> None:
    ctx = plain_context(job.config, trainer, job.inputs.model_handles())
    batches = job_batches(job.config, job.parquet_paths, how, ctx)
    offered = {
        "batches": batches,
        "ctx": replace(ctx, dataset=batches),
        "steps": ctx.job.max_steps,
        "hyperparams": dict(ctx.job.hyperparams),
        "device": ctx.device,
    }
    given = arguments_for(function, offered, named=against)

    def call(end: Any) -> None:
        def told(facts: Snapshot) -> None:
            if len(old) < updates:
                old.add(facts)
            if len(old) >= updates:
                end()

        with seeded(job.seed), recorded_updates(told, how):
            function(**given)

    run_until(call)
    if not len(old):
        raise ContractError(
            f"--against {against!r} came to its end without one call of optimizer.step, in this process and of an "
            "optimizer of torch: there is nothing to compare"
        )


class _Updates(pl.Callback):
    """Compares the updates of a hosted training with those of the function, and ends it after the last one."""

    def __init__(self, updates: int, old: Recording, how: Circumstances) -> None:
        self.updates = updates
        self.old = old
        self.how = how
        self.rtol = 0.0
        self.compares = True
        self.done: list[StepDistances] = []
        self.first: Difference | None = None
        self.count = 0
        self._recorder = ExitStack()
        self._names: dict[str, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to listen to optimizers."""
        assert isinstance(pl_module, ContractModule)
        discovered = pl_module.discovered
        assert discovered is not None
        self._recorder.enter_context(
            recorded_updates(
                self._told,
                names=self._names,
                names_of=lambda: {id(tensor): name for name, tensor in live_weights(discovered).items()},
            )
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End the training after the last update."""
        if self.count >= self.updates:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        """Listen no longer."""
        self._recorder.close()

    def on_exception(self, *_: Any) -> None:
        """Listen no longer."""
        self._recorder.close()

    def _told(self, hosted: Snapshot) -> None:
        self.count += 1
        if self.count > len(self.old):
            return
        plain = self.old[self.count - 1]
        found = compare_snapshots(self.count, plain, hosted, kinds=KINDS_OF_UPDATES, exact=self.how.is_exact)
        self.done.append(found)
        worst = found.beyond(self.rtol)
        if worst is None or self.first is not None:
            return
        kind, place, size = worst
        cause = likely_cause_of_update(kind, place, self.count, plain, hosted, self.how)
        a, b = plain[kind].get(place), hosted[kind].get(place)
        self.first = Difference(self.count, kind, self._named(place), size, described(a), described(b), cause)

    def _named(self, place: str) -> str:
        head, bracket, tail = place.partition("]")
        return self._names.get(head + bracket, head + bracket) + tail


def _comparison(watch: _Updates, old: Recording, against: str) -> Comparison:
    how = watch.how
    if not watch.count:
        raise ContractError("The class calls no optimizer.step: there is nothing to compare with the function")
    notes = [f"{against}: one process; genlight: {how.described}; a step is a call of optimizer.step"]
    first = watch.first
    if len(old) < watch.updates:
        notes.append(f"{against} ended after {len(old)} of {watch.updates} updates")
    if first is None and watch.count < len(old):
        cause = "The class met the end of its data, or makes fewer updates of as many batches."
        first = Difference(watch.count, "steps", "updates", math.inf, str(len(old)), str(watch.count), cause)
    return Comparison(watch.done, first, watch.rtol, KINDS_OF_UPDATES, notes)


class _Enough(BaseException):
    """Ends a function from inside of its ``optimizer.step``; not an Exception, which it may well catch."""


def find_function(import_path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises:
        ContractError: There is no such module or name, or it is not a function that can be called here.
        Exception: What importing the module raises.
    """
    module_name, _, name = import_path.strip().partition(":")
    if not module_name or not name:
        raise ContractError(f"--against {import_path!r} names no function; write it as 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise
        raise ContractError(
            f"--against {import_path!r}: there is no module {error.name!r} beside the job, in the working directory or "
            "among the installed packages"
        ) from None
    function: Any = getattr(module, name, None)
    if function is None:
        raise ContractError(f"--against {import_path!r}: module {module_name!r} has no {name!r}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "a coroutine function" if callable(function) else f"of type {type(function).__name__}"
        raise ContractError(f"--against {import_path!r} is {kind}; name a plain function")
    called: Callable[..., Any] = function
    return called


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any], *, named: str) -> dict[str, Any]:
    """Those of `offered` that the signature of `function` names, or all of them where it takes any.

    Raises:
        ContractError: It requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
        and (parameter.name not in offered or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if required:
        raise ContractError(
            f"--against {named!r} requires {', '.join(required)}; it is called with those of {', '.join(offered)} that "
            "it names. Wrap it in a function that gives it the rest"
        )
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def run_until(function: Callable[[Callable[[], None]], None]) -> None:
    """Call `function` with what ends it: that raises what only this call catches."""
    enough = _Enough()

    def end() -> None:
        raise enough

    try:
        function(end)
    except _Enough as raised:
        if raised is not enough:
            raise


KINDS_OF_UPDATES: Final = ("weight before", "gradient", "setting", "optimizer state", "weight")
"""In the order in which an update has them."""

PARALLEL = 1e-3
"""Up to this relative rest, one gradient is a multiple of another."""


@contextmanager
def recorded_updates(
    told: Callable[[Snapshot], None],
    how: Circumstances | None = None,
    *,
    names: dict[str, str] | None = None,
    names_of: Callable[[], dict[int, str]] = dict,
) -> Iterator[None]:
    """Call `told` with a snapshot of each ``optimizer.step`` inside of the block, of any optimizer of torch.

    Values are named by place: ``optimizer 0 [3]`` is the fourth tensor of the optimizer that stepped first.

    Args:
        told: Called after each update; what it raises passes through the step.
        how: Filled in with whether random numbers were drawn between updates.
        names: Filled in with a name for each place that `names_of` knows.
        names_of: Gives names by the ids of tensors; asked when an optimizer steps for the first time.
    """
    order: list[Optimizer] = []
    found: dict[str, dict[str, Any]] = {}
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
            name: value
            for g, group in groups
            for key, setting in group.items()
            if key != "params"
            for name, value, _ in leaves(f"{prefix} group {g}.{key}", setting)
        }

    def after(optimizer: Optimizer, *_: Any) -> None:
        places = list(_places(order, optimizer))
        # Not before it: a closure, which is how Lightning steps, makes them within.
        found["gradient"] = _copies((place, p.grad) for place, p in places if p.grad is not None)
        found["optimizer state"] = {
            name: value
            for place, parameter in places
            for key, entry in named_values(optimizer.state.get(parameter, {}))
            for name, value, is_code in leaves(f"{place}.{key}", entry, whole=True)
            if not is_code
        }
        found["weight"] = _copies(places)
        if how is not None:
            states.append(random_states())
            how.draws = how.draws or states[-1] != states[0]
        told(Snapshot({kind: found[kind] for kind in KINDS_OF_UPDATES}))

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def likely_cause_of_update(
    kind: str, name: str, update: int, plain: Snapshot, hosted: Snapshot, how: Circumstances
) -> str:
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
    if as_numbers(a).shape != as_numbers(b).shape:
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
    a, b = as_numbers(a).flatten(), as_numbers(b).flatten()
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
