"""A job's class under genlight beside another loop: ``genlight compare``, with ``--against`` an old function.

The other loop, a plain one of the class or the old function, runs first and leaves a `Recording`. The hosted training
is then compared with it, step by step, or update by update where there is a function. Both run in one process.
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
from ..feed.arrow_feed import imported
from ..inputs.materialize import materialize_inputs
from ..job.config import RunConfig
from ..job.lightning_objects import instantiate_alone, make_data
from ..module.module import ContractModule
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from ..plumbing.devices import release_memory
from .batches import NO_DATA, job_batches
from .isolation import quiet, seeded
from .plain_loop import another_trainer, plain_context, plain_steps
from .snapshot import (
    KINDS,
    Recording,
    Snapshot,
    as_numbers,
    compare_snapshots,
    described,
    leaves,
    live_weights,
    snapshot,
    values_of_optimizer,
)
from .subject import Watched

__all__ = ["Comparison", "compare_job", "step_comparison"]

KINDS_OF_UPDATES: Final = ("weight before", "gradient", "setting", "optimizer state", "weight")
"""In the order in which an update has them."""
_OF_THE_RUN = "trainer/"
"""Metrics that genlight adds to those of the class begin so."""
_CAUSES = {
    "shape": "The two build another model, or hand its parameters to the optimizer in another order.",
    "start": "`configure` builds another thing the second time, by a clock, ctx.device or a variable of a module.",
    "weight before": "Before the model is built, seed both the same way; between updates, something else changes it.",
    "setting": "The optimizer or its schedule has another setting, such as by ctx.dtype; the name says which.",
    "overflow": "The scaler of 16-mixed skipped {} updates that overflowed; take bf16-mixed, or more --steps.",
    "factor": "It is {:.6g} times that of the function: a sum in place of a mean, a clip, or steps of accumulation.",
    "draws, against": "Seed both alike, right before the first step; or they have other rows, or another loss.",
    "draws": "The step draws random numbers, and the two drew others: a callback draws too, or a generator went on.",
    "half": "The rounding of {}, if it is small; judge it with a larger --rtol.",
    "gradient": "The weights agree and the gradient does not: other rows, another order of rows, or another loss.",
    "update": "Gradients and settings agree, and the update does not: another optimizer, or version of its rule.",
    "step": "The same weights and rows give something else: it reads a clock, a file or a variable of a module.",
}
"""The probable cause of a difference, and the way out."""
_PARALLEL = 1e-3
"""Up to this relative rest, one gradient is a multiple of another."""


@dataclass(frozen=True)
class Difference:
    """The first value that two loops do not share."""

    step: int
    """Completed steps, or updates where optimizers are compared; 0 is before the first."""
    kind: str
    """One of what is compared, or ``steps``."""
    name: str
    distance: float
    """Relative; infinite where one loop lacks the value, or it is not finite in one of them, or of another shape."""
    plain: str
    """The other loop's value, in words."""
    hosted: str
    """The value under genlight."""
    cause: str
    """The probable cause, and what to do."""


@dataclass
class Comparison:
    """How far a hosted training is from another loop; grows while it trains."""

    recording: Recording
    """The other loop's snapshots and errors."""
    precision: str = "32-true"
    """Lightning's name for that of the hosted loop; the other one computes in fp32."""
    rtol: float = 0.0
    """Distances up to this are none."""
    kinds: tuple[str, ...] = KINDS
    """The kinds of state that are compared."""
    steps: dict[int, dict[str, tuple[str, float]]] = field(default_factory=dict)
    """By step and kind, the name with the largest distance, and the distance."""
    first: Difference | None = None
    """The difference beyond `rtol` that came first, and of that step the one that stands nearest to its cause."""
    overflow_steps: int = 0
    """Updates that a gradient scaler has skipped."""
    notes: list[str] = field(default_factory=list)
    """Remarks for a reader on how the two ran."""

    def take(self, step: int, plain: Snapshot, hosted: Snapshot) -> None:
        """Compare what the two loops have after a step."""
        is_exact = self.precision == "32-true"
        distances = compare_snapshots(plain, hosted, kinds=self.kinds, exact=is_exact)
        largest = {kind: max(of.items(), key=lambda item: item[1]) for kind, of in distances.items() if of}
        self.steps[step] = largest
        beyond = next((kind for kind, (_, size) in largest.items() if size > self.rtol), None)
        if beyond is not None and self.first is None:
            name, size = largest[beyond]
            a, b = plain[beyond].get(name), hosted[beyond].get(name)
            cause = self._cause(beyond, step, a, b)
            self.first = Difference(step, beyond, name, size, described(a), described(b), cause)

    def _cause(self, kind: str, step: int, a: Any, b: Any) -> str:
        """The most probable reason why one loop has `a` and genlight `b`, and the way out."""
        is_function = self.kinds == KINDS_OF_UPDATES
        if a is None or b is None:
            only = "genlight" if a is None else "the function" if is_function else "the plain loop"
            return (
                f"Only {only} has it: the class looks at ctx.device, ctx.dtype or something outside of itself, or the "
                "optimizers hold other parameters, or some of them are frozen or unused in one of the two."
            )
        if not isinstance(a, str | bytes) and as_numbers(a).shape != as_numbers(b).shape:
            return _CAUSES["shape"]
        is_half, factor = "16" in self.precision, _factor(a, b) if kind == "gradient" else math.nan
        if step == 0 and not (is_half and "true" in self.precision):
            return _CAUSES["start"]
        if kind in ("weight before", "setting"):
            return _CAUSES[kind]
        if self.overflow_steps:
            return _CAUSES["overflow"].format(self.overflow_steps)
        if factor > 0:
            return _CAUSES["factor"].format(factor)
        if self.recording.draws and (kind == "gradient" or not is_function):
            return _CAUSES["draws, against" if is_function else "draws"]
        if is_half:
            return _CAUSES["half"].format(self.precision)
        return _CAUSES["gradient" if kind == "gradient" else "update" if is_function else "step"]

    def finish(self, steps: int, against: str | None) -> Comparison:
        """Training is over: say how the two ran; a loop that made fewer steps than the other is a difference.

        Args:
            steps: How many were asked for.
            against: The old function that ran instead of the class in a plain loop.
        """
        if against is None:
            recorded = len(self.recording) - 1  # without that before the first step
            self.notes.append(f"plain: fp32; genlight: {self.precision}")
            short = f"the job has {recorded} steps, of {steps} that were asked for"
        else:
            recorded = len(self.recording)
            self.notes.append(f"{against}; genlight: {self.precision}; a step is a call of optimizer.step")
            short = f"{against} ended after {recorded} of {steps} updates"
        self.notes += [short] if recorded < steps else []
        made = max(self.steps, default=0)
        if self.first is None and made < recorded:
            what = "steps" if against is None else "updates"
            cause = "A loop met the end of its data before the other, or makes fewer updates of as many batches."
            self.first = Difference(made, "steps", what, math.inf, str(recorded), str(made), cause)
        return self

    def as_json(self) -> str:
        """The comparison as a JSON object; an infinite distance is null."""
        steps = [
            {"step": step, "largest": {kind: {"name": n, "distance": d} for kind, (n, d) in largest.items()}}
            for step, largest in self.steps.items()
        ]
        said = {"equal": self.first is None, "rtol": self.rtol, "notes": self.notes, "first_difference": self.first}
        return msgspec.json.encode({**said, "steps": steps}).decode()


def _factor(a: Any, b: Any) -> float:
    """By what `a` is multiplied to have `b`; nan where no number does it."""
    a, b = as_numbers(a).flatten(), as_numbers(b).flatten()
    factor = float(a @ b / (a @ a)) if float(a @ a) > 0 else math.nan
    return factor if float((b - factor * a).norm()) <= _PARALLEL * float(b.norm()) else math.nan


def step_comparison(steps: int, comparison: Comparison, *, stops: bool = False) -> Watched:
    """A callback that compares each of the first steps of a hosted training with those of a plain loop.

    Args:
        steps: How many.
        comparison: Gets them.
        stops: Whether the training ends after them.
    """

    def at_step(step: int, module: ContractModule) -> None:
        if step > steps or step >= len(comparison.recording):
            return
        metrics = {} if step == 0 else module.metrics()
        comparison.overflow_steps = int(metrics.get("trainer/overflow_steps", 0))
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_RUN)}
        hosted = snapshot(module.contract_state, module.plugin, metrics, kinds=KINDS, host=module)
        comparison.take(step, comparison.recording[step], hosted)

    return Watched(at_step, stop_after=steps if stops else None)


def compare_job(
    config: RunConfig, *, steps: int, against: str | None = None, rtol: float | None = None, seed: int = 0
) -> Comparison:
    """Train a job's class for some steps in a plain loop, then under genlight, and compare all that it has.

    Args:
        config: The job, of one device; of its ``lightning`` block strategy, precision and plugins count.
        steps: How many, at least 1; fewer where the job has fewer steps or batches.
        against: ``module:function``, an old training function that runs instead of the class in a plain loop, and is
            compared at each ``optimizer.step``, of which `steps` are made. It is called with those of ``batches`` (the
            raw batches of the job), ``ctx``, ``steps``, ``hyperparams`` and ``device`` that its signature names.
        rtol: Distances up to this are none; None takes 0.05 in half precision, else 1e-5.
        seed: Of the random numbers of both.

    Raises:
        ContractError: The job has several ranks, there is no such function, it cannot be called so, or one of the two
            never steps an optimizer.
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: What the class or the function itself raises.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        function = None if against is None else _named_function(against)
        trainer = instantiate_alone(config, [])
        if trainer.world_size > 1:
            raise ContractError(
                f"The job has {trainer.world_size} ranks, and the two loops are compared in one process: --set "
                "lightning.devices=1. `genlight check` compares two ranks with one, under DDP and FSDP 2"
            )
        target, inputs = find_trainer(config.trainer), materialize_inputs(config)
        paths, handles = [str(path) for path in inputs.parquet_paths], inputs.model_handles()
        precision = str(trainer.precision)
        default = 0.05 if "16" in precision else 1e-5
        comparison = Comparison(stack.enter_context(Recording()), precision, default if rtol is None else rtol)
        with seeded(seed), ExitStack() as data:
            ctx = plain_context(config, trainer, handles)
            plugin: Any = another_trainer(target) if function is None else None
            ctx, batches = job_batches(config, plugin, ctx, data, parquet_paths=paths)
            if function is None:
                for reached in plain_steps(plugin, ctx, batches, steps=min(steps, ctx.job.max_steps or steps)):
                    comparison.recording.add(reached)
                if len(comparison.recording) < 2:
                    raise InputError("the source of batches is empty: there is no step to compare; check `dataset`")
            elif batches is None:
                raise InputError(NO_DATA)
            else:
                _record_function(function, replace(ctx, dataset=batches), steps, comparison.recording)
            del plugin, ctx, batches
        release_memory()  # the training that follows needs it
        module = ContractModule(make_trainer(target), config.job, model_handles=handles)
        if function is None:
            callbacks_of(trainer).append(step_comparison(steps, comparison, stops=True))
        else:
            stack.enter_context(_comparing_updates(steps, comparison, trainer, module))
        with seeded(seed):
            trainer.fit(module, datamodule=make_data(config, paths))
    return comparison.finish(steps, against)


def _named_function(import_path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    try:
        return imported(import_path.strip(), "--against", "'module:function'")
    except (TypeError, ValueError) as error:
        raise ContractError(str(error)) from None


class _Enough(BaseException):
    """Ends a function from inside of its ``optimizer.step``; not an Exception, which it may well catch."""


def _record_function(function: Callable[..., Any], ctx: StepContext, updates: int, recording: Recording) -> None:
    """Call an old training function, and end it after its last update."""
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

    def at_update(reached: Snapshot) -> None:
        recording.add(reached)
        if len(recording) == updates:
            raise _Enough

    try:
        with _Updates(at_update).listening():
            function(**given)
    except _Enough:
        return
    if not len(recording):
        raise ContractError(
            "The function of --against came to its end without one call of optimizer.step, in this process and of an "
            "optimizer of torch: there is nothing to compare"
        )


@contextmanager
def _comparing_updates(
    updates: int, comparison: Comparison, trainer: pl.Trainer, module: ContractModule
) -> Iterator[None]:
    """Compare the updates of a training with those of a function, and end it after the last one."""
    comparison.kinds, recording, count = KINDS_OF_UPDATES, comparison.recording, 0

    def at_update(hosted: Snapshot) -> None:
        nonlocal count
        count += 1
        trainer.should_stop = trainer.should_stop or count >= updates
        if count <= len(recording):
            comparison.take(count, recording[count - 1], hosted)

    seen = _Updates(at_update)
    with seen.listening():
        yield
    if not count:
        raise ContractError("The class calls no optimizer.step: there is nothing to compare with the function")
    if comparison.first is not None and module.discovered is not None:
        comparison.first = replace(comparison.first, name=seen.named(comparison.first.name, module.discovered))


class _Updates:
    """Takes a snapshot of each ``optimizer.step``, of any optimizer of torch.

    Values are named by place: ``optimizer 0[param_groups[0][3]]`` is the fourth tensor of the first group of the
    optimizer that stepped first.

    Args:
        at_update: Called with each; what it raises passes through the step.
    """

    def __init__(self, at_update: Callable[[Snapshot], None]) -> None:
        self._at_update = at_update
        self._optimizers: list[Optimizer] = []
        self._before: dict[str, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to optimizers inside of the block."""
        handles = [register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def named(self, place: str, discovered: Discovered) -> str:
        """The name of a weight instead of its place in an optimizer, where it has one."""
        names = {id(tensor): name for name, tensor in live_weights(discovered).items()}
        known = {at: names.get(id(p), at) for each in self._optimizers for at, p in self._places(each)}
        return next((name + place.removeprefix(at) for at, name in known.items() if place.startswith(at)), place)

    def _path(self, optimizer: Optimizer) -> str:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return f"optimizer {next(i for i, known in enumerate(self._optimizers) if known is optimizer)}"

    def _places(self, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        path = self._path(optimizer)
        for g, group in enumerate(optimizer.param_groups):
            yield from ((f"{path}[param_groups[{g}][{i}]]", p) for i, p in enumerate(group["params"]))

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = _copies(self._places(optimizer))

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        path = self._path(optimizer)
        kept = list(values_of_optimizer(Found(path, path, optimizer), {}))
        values = {kind: _copies((at, value) for its_kind, at, value in kept if its_kind == kind) for kind in KINDS[1:3]}
        # Gradients not before the update: a closure, which is how Lightning steps, makes them within.
        values["gradient"] = _copies((at, p.grad) for at, p in self._places(optimizer))
        values |= {"weight before": self._before, "weight": _copies(self._places(optimizer))}
        self._at_update(Snapshot({kind: values[kind] for kind in KINDS_OF_UPDATES}))


def _copies(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    copied = (leaf for path, value in values for leaf in leaves(path, value, whole=True))
    return {name: value for name, value, is_code in copied if not is_code}
