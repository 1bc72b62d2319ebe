"""A job's class under genlight beside another loop: ``genlight compare``, with ``--against`` an old function.

The other loop runs first, in one process, and leaves a `Recording`. The hosted training is then compared with it, step
by step or update by update. ``run --shadow`` does the same with the first steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.pytorch.strategies import ModelParallelStrategy

from ...callbacks.hook.events import callbacks_of
from ..contract.exceptions import ContractError
from ..inputs import materialize_inputs
from ..job.config import RunConfig
from ..job.lightning_objects import instantiate_alone, make_data
from ..module.module import ContractModule
from ..module.plugin_loading import find_trainer, make_trainer, on_sys_path
from .against import KINDS_OF_UPDATES, Updates, named_function, record_function
from .causes import Circumstances, likely_cause
from .isolation import quiet, seeded
from .plain_loop import recorded_plain_loop
from .snapshot import KINDS, Difference, Recording, Snapshot, StepDistances, compare_snapshots, described, snapshot
from .subject import AfterSteps

__all__ = ["Comparison", "compare_job", "step_comparison"]

_OF_THE_RUN = "trainer/"
"""Metrics that genlight adds to those of the class begin so."""


@dataclass
class Comparison:
    """How far a hosted training is from another loop; grows while it trains."""

    how: Circumstances = field(default_factory=Circumstances)
    """How the two run."""
    rtol: float = 0.0
    """Distances up to this are none."""
    kinds: tuple[str, ...] = KINDS
    """What is compared."""
    recording: Recording | None = None
    """What the other loop left; None on ranks that compare nothing."""
    steps: list[StepDistances] = field(default_factory=list)
    first: Difference | None = None
    """The difference beyond `rtol` that came first, and of that step the one that stands nearest to its cause."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of how the two ran."""

    @classmethod
    def of(cls, trainer: pl.Trainer, rtol: float | None = None) -> Comparison:
        """The comparison for what `trainer` runs; without `rtol`, that of its precision and the order of its sums."""
        how = Circumstances(world_size=trainer.world_size, precision=str(trainer.precision))
        # On several ranks each has the metrics of its own rows.
        kinds = KINDS if how.world_size == 1 else KINDS[1:]
        return cls(how, (0.05 if how.is_half else 1e-5) if rtol is None else rtol, kinds)

    def take(self, step: int, plain: Snapshot, hosted: Snapshot, before: Snapshot | None = None) -> None:
        """Compare what the two loops have after a step.

        Args:
            step: Its number.
            plain: Of the other loop.
            hosted: Under genlight.
            before: What the other loop had a step earlier; None where there was no step.
        """
        found = compare_snapshots(step, plain, hosted, kinds=self.kinds, exact=self.how.is_exact)
        self.steps.append(found)
        worst = found.beyond(self.rtol)
        if worst is not None and self.first is None:
            kind, name, size = worst
            there, here = described(plain[kind].get(name)), described(hosted[kind].get(name))
            cause = likely_cause(kind, name, step, plain, hosted, before, self.how)
            self.first = Difference(step, kind, name, size, there, here, cause)

    def finish(self, steps: int, against: str | None) -> Comparison:
        """Training is over: say how the two ran; a loop that made fewer steps than the other is a difference.

        Args:
            steps: How many were asked for.
            against: The old function that ran instead of the class in a plain loop.
        """
        assert self.recording is not None
        recorded = len(self.recording) - (against is None)  # of a class that before the first step, too
        if against is None:
            self.notes.append(f"plain: fp32, one process; genlight: {self.how.described}")
            if self.how.world_size > 1:
                self.notes.append(
                    "dropout layers are off in both, and metrics are not compared: each rank has those of its own rows"
                )
            short = f"the job has {recorded} steps, of {steps} that were asked for"
        else:
            self.notes.append(
                f"{against}: one process; genlight: {self.how.described}; a step is a call of optimizer.step"
            )
            short = f"{against} ended after {recorded} of {steps} updates"
        self.notes += [short] if recorded < steps else []
        made = self.steps[-1].step if self.steps else 0
        if self.first is None and made < recorded:
            what = "steps" if against is None else "updates"
            cause = "A loop met the end of its data before the other, or makes fewer updates of as many batches."
            self.first = Difference(made, "steps", what, math.inf, str(recorded), str(made), cause)
        return self

    def as_json(self) -> str:
        """The comparison as a JSON object; an infinite distance is null."""
        steps = []
        for step in self.steps:
            largest = {kind: step.largest(kind) for kind in self.kinds}
            shown = {kind: {"name": each[0], "distance": each[1]} for kind, each in largest.items() if each is not None}
            steps.append({"step": step.step, "largest": shown})
        return msgspec.json.encode(
            {
                "equal": self.first is None,
                "rtol": self.rtol,
                "notes": self.notes,
                "first_difference": self.first,
                "steps": steps,
            }
        ).decode()


def step_comparison(
    steps: int,
    comparison: Comparison,
    compared: Callable[[], None] = lambda: None,
    *,
    stops: bool = False,
    dropout: bool = True,
) -> AfterSteps:
    """A callback that compares each of the first steps of a hosted training with those of a plain loop.

    Args:
        steps: How many.
        comparison: Gets them. Ranks without a recording take part in what is collective.
        compared: Called after each step that was compared.
        stops: Whether the training ends after them.
        dropout: Whether dropout layers drop anything.
    """
    recording, how = comparison.recording, comparison.how

    def at_step(step: int, module: ContractModule) -> None:
        sharded = isinstance(module.trainer.strategy, ModelParallelStrategy)
        if step > steps or (recording is None and not sharded):
            return
        metrics = {} if step == 0 else module.metrics()
        how.overflow_steps = int(metrics.get("trainer/overflow_steps", 0))
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_THE_RUN)}
        hosted = snapshot(module.contract_state, module.plugin, metrics, kinds=KINDS, whole=sharded, host=module)
        if recording is not None and step < len(recording):
            comparison.take(step, recording[step], hosted, recording[step - 1] if step else None)
            compared()

    return AfterSteps(at_step, stop_after=steps if stops else None, dropout=dropout)


def compare_job(
    config: RunConfig, *, steps: int, against: str | None = None, rtol: float | None = None, seed: int = 0
) -> Comparison | None:
    """Train a job's class for some steps in a plain loop, then under genlight, and compare all that it has.

    Dropout layers drop nothing on several ranks, where each would draw its own numbers.

    Args:
        config: The job; of its ``lightning`` block devices, strategy, precision and plugins count.
        steps: How many, at least 1; fewer where the job has fewer steps or batches.
        against: ``module:function``, an old training function that runs instead of the class in a plain loop, and is
            compared at each ``optimizer.step``, of which `steps` are made. See `record_function`.
        rtol: Distances up to this are none; None takes 0.05 in half precision, else 1e-5.
        seed: Of the random numbers of both.

    Returns:
        What came of it; None on ranks other than the first.

    Raises:
        ContractError: There is no such function, it cannot be called so, or one of the two never steps an optimizer.
        GenlightError: The class, its data or the ``lightning`` block cannot be used.
        Exception: What the class or the function itself raises.
    """
    with ExitStack() as stack:
        stack.enter_context(on_sys_path([config.spec_dir, Path.cwd()]))
        stack.enter_context(quiet())
        function = None if against is None else named_function(against)
        target, inputs = find_trainer(config.trainer), materialize_inputs(config)
        paths, handles = [str(path) for path in inputs.parquet_paths], inputs.model_handles()
        trainer = instantiate_alone(config, [])
        comparison = Comparison.of(trainer, rtol)
        how = comparison.how
        if trainer.is_global_zero:
            brought: dict[str, Any] = {"parquet_paths": paths, "model_handles": handles}
            with seeded(seed):
                comparison.recording = (
                    recorded_plain_loop(config, target, trainer, how, steps=steps, **brought)
                    if function is None
                    else record_function(function, config, trainer, how, updates=steps, **brought)
                )
            stack.callback(comparison.recording.close)
        module = ContractModule(make_trainer(target), config.job, model_handles=handles)
        if function is None:
            watch = step_comparison(steps, comparison, stops=True, dropout=how.world_size == 1)
        else:
            watch = AfterSteps(lambda *_: None, dropout=how.world_size == 1)
            stack.enter_context(_comparing_updates(steps, comparison, trainer, module))
        callbacks_of(trainer).append(watch)
        with seeded(seed):
            trainer.fit(module, datamodule=make_data(config, paths))
        return None if comparison.recording is None else comparison.finish(steps, against)


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
        if recording is not None and count <= len(recording):
            comparison.take(count, recording[count - 1], hosted)

    seen = Updates(at_update)
    with seen.listening():
        yield
    if not count:
        raise ContractError("The class calls no optimizer.step: there is nothing to compare with the function")
    if comparison.first is not None and module.discovered is not None:
        comparison.first = replace(comparison.first, name=seen.named(comparison.first.name, module.discovered))
