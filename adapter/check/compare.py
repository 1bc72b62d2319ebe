"""Compare a job's class under genlight with a plain loop, or with an old function: ``genlight compare [--against]``.

The plain loop or the old function runs first and leaves a `Recording`. The hosted training is then compared with it,
step by step, or update by update for a function. Both run in one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import msgspec
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...callbacks.hook.events import callbacks_of
from ..contract.exceptions import ContractError, InputError
from ..contract.types import StepContext
from ..discovery.discover import Discovered, Found
from ..feed.arrow_feed import import_function
from ..inputs.materialize import materialize_inputs
from ..job.config import RunConfig
from ..job.lightning_objects import instantiate_alone, make_data
from ..module.module import ContractModule
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from ..plumbing.devices import release_memory
from .batches import NO_DATA, job_batches
from .isolation import quiet, seeded
from .plain_loop import new_trainer, plain_context, plain_steps
from .snapshot import (
    KINDS,
    Recording,
    Snapshot,
    compare_snapshots,
    describe,
    leaves,
    live_weights,
    snapshot,
    values_of_optimizer,
)
from .subject import Observer

KINDS_OF_UPDATES: Final = ("weight before", "gradient", "setting", "optimizer state", "weight")
"""Kinds compared for an update, in the order in which they arise."""
_RUN_PREFIX = "trainer/"
"""Prefix of metrics that genlight adds."""
CAUSES = {
    "start": "`configure` builds something else: a seed, a clock, ctx.device or a global variable?",
    "rows": "The data, its order, the batch size or the seed of the loader is different.",
    "random numbers": "The same rows came, but something draws other random numbers: another seed, dropout in "
    "evaluation, or an augmentation?",
    "weight before": "Seed both in the same way before the model is built, and build the same model. If the weights "
    "agreed after the update before, something other than the optimizer changes them.",
    "setting": "The optimizer or its schedule has a different setting, for example because of ctx.dtype; see its name.",
    "gradient": "The weights agree and the gradient does not: different rows, order of rows, random numbers or loss, a "
    "sum instead of a mean, clipping, or accumulation?",
    "metric": "The same weights and rows give a different result: another loss or other kernels, random numbers that a "
    "callback draws too, a generator that was not reset, a clock, a file or a global variable?",
    "optimizer state": "The optimizers hold different parameters, or their updates differ: another optimizer or "
    "version of it, another gradient, or random numbers?",
    "weight": "Settings and optimizer states agree, and the update does not: another optimizer, or version of it, or "
    "something else that changes weights?",
    "value": "Everything else agrees; only this value of the class differs.",
    "steps": "One loop reached the end of its data first, or makes fewer updates from as many batches.",
}
"""The probable cause of a first difference, and what to do, by kind; ``start`` is any kind before the first step."""
_IN_HALF = " In {}, a small difference is rounding (use a larger --rtol), and a scaler skips updates that overflow."


@dataclass(frozen=True)
class ValueDifference:
    """The first value that differs between two loops."""

    step: int
    """Number of completed steps, or of updates if updates are compared; 0 is before the first."""
    kind: str
    """One of the compared kinds, or ``steps``."""
    name: str
    distance: float
    """Relative distance; infinite if a loop lacks the value, if only one is finite, or if shapes differ."""
    plain: str
    """The other loop's value, in words."""
    hosted: str
    """The value under genlight."""
    cause: str
    """The probable cause, and what to do."""


@dataclass
class Comparison:
    """The comparison of a hosted training with another loop; each step of the training extends it."""

    recording: Recording
    """The other loop's snapshots."""
    precision: str = "32-true"
    """Precision of the hosted loop, in Lightning's words; the other loop computes in fp32."""
    rtol: float = 0.0
    """Distances up to this count as equal."""
    kinds: tuple[str, ...] = KINDS
    """The compared kinds."""
    steps: dict[int, dict[str, tuple[str, float]]] = field(default_factory=dict)
    """The name with the largest distance, and that distance, by step and kind."""
    first: ValueDifference | None = None
    """The first difference beyond `rtol`; if a step has several, the one nearest to the cause."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the reader on both runs."""

    def take(self, step: int, plain: Snapshot, hosted: Snapshot) -> None:
        """Compare the two loops after a step."""
        is_exact = self.precision == "32-true"
        distances = compare_snapshots(plain, hosted, kinds=self.kinds, exact=is_exact)
        largest = {kind: max(of.items(), key=lambda item: item[1]) for kind, of in distances.items() if of}
        self.steps[step] = largest
        beyond = next((kind for kind, (_, size) in largest.items() if size > self.rtol), None)
        if beyond is not None and self.first is None:
            name, size = largest[beyond]
            a, b = plain[beyond].get(name), hosted[beyond].get(name)
            cause = CAUSES["start" if step == 0 else beyond] + ("" if is_exact else _IN_HALF.format(self.precision))
            self.first = ValueDifference(step, beyond, name, size, describe(a), describe(b), cause)

    def finish(self, steps: int, against: str | None) -> Comparison:
        """Add the notes at the end of training; report a loop that made fewer steps than the other as a difference.

        Args:
            steps: Number of requested steps.
            against: The old function that ran instead of the plain loop.
        """
        if against is None:
            recorded = len(self.recording) - 1  # without the snapshot before the first step
            self.notes.append(f"plain: fp32; genlight: {self.precision}")
            short = f"the job has only {recorded} of the {steps} requested steps"
        else:
            recorded = len(self.recording)
            self.notes.append(f"{against}; genlight: {self.precision}; a step is a call of optimizer.step")
            short = f"{against} ended after {recorded} of {steps} updates"
        self.notes += [short] if recorded < steps else []
        made = max(self.steps, default=0)
        if self.first is None and made < recorded:
            what = "steps" if against is None else "updates"
            self.first = ValueDifference(made, "steps", what, math.inf, str(recorded), str(made), CAUSES["steps"])
        return self

    def as_json(self) -> str:
        """Return the comparison as a JSON object; an infinite distance becomes null."""
        steps = [
            {"step": step, "largest": {kind: {"name": n, "distance": d} for kind, (n, d) in largest.items()}}
            for step, largest in self.steps.items()
        ]
        summary = {"equal": self.first is None, "rtol": self.rtol, "notes": self.notes, "first_difference": self.first}
        return msgspec.json.encode({**summary, "steps": steps}).decode()


def step_comparison(steps: int, comparison: Comparison) -> Observer:
    """Return a callback that compares the first steps of a training with a recorded plain loop, and ends the training.

    Args:
        steps: Number of steps to compare.
        comparison: Receives the differences.
    """

    def at_step(step: int, module: ContractModule) -> None:
        if step > steps or step >= len(comparison.recording):
            return
        reported = {} if step == 0 else module.metrics()
        metrics = {name: value for name, value in reported.items() if not name.startswith(_RUN_PREFIX)}
        hosted = snapshot(module.contract_state, module.plugin, metrics, kinds=KINDS, host=module)
        comparison.take(step, comparison.recording[step], hosted)

    return Observer(at_step, stop_after=steps)


def compare_job(
    config: RunConfig, *, steps: int, against: str | None = None, rtol: float | None = None, seed: int = 0
) -> Comparison:
    """Train a job's class for some steps in a plain loop, then under genlight, and compare its complete state.

    Args:
        config: The job, on one device; strategy, precision and plugins of its ``lightning`` block are used.
        steps: Number of steps, at least 1; fewer if the job has fewer steps or batches.
        against: ``module:function``, an old training function that runs instead of the plain loop and is compared at
            each of its first `steps` calls of ``optimizer.step``. It is called with those arguments that its signature
            names:
            ``batches`` (the raw batches of the job), ``ctx``, ``steps``, ``hyperparams`` and ``device``.
        rtol: Distances up to this count as equal; None uses 0.05 in half precision, otherwise 1e-5.
        seed: Seed of the random numbers of both loops.

    Raises:
        ContractError: The job has several ranks, the function does not exist or needs other arguments, or one of the
            two loops never steps an optimizer.
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: An exception of the class or of the function.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        function = None if against is None else _import_function(against)
        trainer = instantiate_alone(config, [])
        if trainer.world_size > 1:
            raise ContractError(
                f"The job has {trainer.world_size} ranks, but both loops must run in one process: --set "
                "lightning.devices=1. `genlight check` compares two ranks with one, under DDP and FSDP 2"
            )
        target, inputs = find_trainer(config.trainer), materialize_inputs(config)
        paths, handles = [str(path) for path in inputs.parquet_paths], inputs.model_handles()
        precision = str(trainer.precision)
        default = 0.05 if "16" in precision else 1e-5
        comparison = Comparison(stack.enter_context(Recording()), precision, default if rtol is None else rtol)
        with seeded(seed), ExitStack() as data:
            ctx = plain_context(config, trainer, handles)
            plugin: Any = new_trainer(target) if function is None else None
            ctx, batches = job_batches(config, plugin, ctx, data, parquet_paths=paths)
            if function is None:
                for state in plain_steps(plugin, ctx, batches, steps=min(steps, ctx.job.max_steps or steps)):
                    comparison.recording.add(state)
                if len(comparison.recording) < 2:
                    raise InputError("the source of batches is empty: there is no step to compare; check `dataset`")
            elif batches is None:
                raise InputError(NO_DATA)
            else:
                _record_function(function, replace(ctx, dataset=batches), steps, comparison.recording)
            del plugin, ctx, batches
        release_memory()  # the hosted training needs the memory that the first loop has used
        module = ContractModule(make_trainer(target), config.job, model_handles=handles)
        if function is None:
            callbacks_of(trainer).append(step_comparison(steps, comparison))
        else:
            stack.enter_context(_compare_updates(steps, comparison, trainer, module))
        with seeded(seed):
            trainer.fit(module, datamodule=make_data(config, paths))
    return comparison.finish(steps, against)


def _import_function(import_path: str) -> Callable[..., Any]:
    """Import the function named by ``module:function``."""
    try:
        return import_function(import_path.strip(), "--against", "'module:function'")
    except (TypeError, ValueError) as error:
        raise ContractError(str(error)) from None


class _LastUpdateError(BaseException):
    """Ends a function from within its ``optimizer.step``. Not an `Exception`, because the function may catch it."""


def _record_function(function: Callable[..., Any], ctx: StepContext, updates: int, recording: Recording) -> None:
    """Call an old training function, record its updates, and end it after the last one."""
    offered = {
        "batches": ctx.dataset,
        "ctx": ctx,
        "steps": ctx.job.max_steps,
        "hyperparams": dict(ctx.job.hyperparams),
        "device": ctx.device,
    }
    signature = inspect.signature(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    arguments = {name: value for name, value in offered.items() if takes_any or name in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ContractError(
            f"The function of --against can take only the arguments {', '.join(offered)}: {error}. Wrap it in a "
            "function that passes the others"
        ) from None

    def at_update(state: Snapshot) -> None:
        recording.add(state)
        if len(recording) == updates:
            raise _LastUpdateError

    try:
        with _Updates(at_update).listening():
            function(**arguments)
    except _LastUpdateError:
        return
    if not len(recording):
        raise ContractError(
            "The function of --against returned without calling optimizer.step of a torch optimizer in this process: "
            "there is nothing to compare"
        )


@contextmanager
def _compare_updates(
    updates: int, comparison: Comparison, trainer: pl.Trainer, module: ContractModule
) -> Iterator[None]:
    """Compare the updates of a training with a recorded function; end the training after the last update."""
    comparison.kinds, recording, count = KINDS_OF_UPDATES, comparison.recording, 0

    def at_update(hosted: Snapshot) -> None:
        nonlocal count
        count += 1
        trainer.should_stop = trainer.should_stop or count >= updates
        if count <= len(recording):
            comparison.take(count, recording[count - 1], hosted)

    observed = _Updates(at_update)
    with observed.listening():
        yield
    if not count:
        raise ContractError("The class never calls optimizer.step: there is nothing to compare with the function")
    if comparison.first is not None and module.discovered is not None:
        comparison.first = replace(comparison.first, name=observed.with_name(comparison.first.name, module.discovered))


class _Updates:
    """Takes a snapshot at each ``optimizer.step`` of any torch optimizer.

    The name of a value is its place: ``optimizer 0[param_groups[0][3]]`` is the fourth tensor of the first group of the
    optimizer that stepped first.

    Args:
        at_update: Called with each snapshot; an exception from it is raised by ``optimizer.step``.
    """

    def __init__(self, at_update: Callable[[Snapshot], None]) -> None:
        self._at_update = at_update
        self._optimizers: list[Optimizer] = []
        self._before: dict[str, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Observe all optimizers during the block."""
        handles = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def with_name(self, place: str, discovered: Discovered) -> str:
        """Return `place`, with a weight's place in its optimizer replaced by the name of the weight, if it has one."""
        names = {id(tensor): name for name, tensor in live_weights(discovered).items()}
        by_place = {at: names.get(id(p), at) for each in self._optimizers for at, p in self._places(each)}
        return next((name + place.removeprefix(at) for at, name in by_place.items() if place.startswith(at)), place)

    def _path(self, optimizer: Optimizer) -> str:
        if not any(optimizer is each for each in self._optimizers):
            self._optimizers.append(optimizer)
        return f"optimizer {next(i for i, each in enumerate(self._optimizers) if each is optimizer)}"

    def _places(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        path = self._path(optimizer)
        for g, group in enumerate(optimizer.param_groups):
            yield from ((f"{path}[param_groups[{g}][{i}]]", p) for i, p in enumerate(group["params"]))

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = _copies(self._places(optimizer))

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        path = self._path(optimizer)
        values_by_kind = list(values_of_optimizer(Found(path, path, optimizer), {}))
        values = {kind: _copies((at, value) for of, at, value in values_by_kind if of == kind) for kind in KINDS[1:3]}
        # Gradients are read only now, because Lightning passes a closure that computes them within the update.
        values["gradient"] = _copies((at, p.grad) for at, p in self._places(optimizer))
        values |= {"weight before": self._before, "weight": _copies(self._places(optimizer))}
        self._at_update(Snapshot({kind: values[kind] for kind in KINDS_OF_UPDATES}))


def _copies(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    copied = (leaf for path, value in values for leaf in leaves(path, value, gather=True))
    return {name: value for name, value, is_code in copied if not is_code}
