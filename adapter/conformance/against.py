"""``genlight compare --against``: a class under genlight, update by update, beside an old training function."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ..comparison.causes import Circumstances
from ..comparison.differences import Difference, StepDistances, compare_facts, described
from ..comparison.facts import Facts, Recording, live_weights
from ..comparison.isolation import quiet, seeded
from ..comparison.old_function import arguments_for, find_function, run_until
from ..comparison.reference_loop import circumstances_of, job_batches, plain_context
from ..comparison.updates import KINDS_OF_UPDATES, likely_cause_of_update, recorded_updates
from ..comparison.watch import default_rtol
from ..contract.exceptions import ContractError
from ..job.config import RunConfig
from ..module.module import ContractModule
from ..module.plugin_loading import on_sys_path
from ..run.ranks.this_rank import is_rank_zero
from .compare import ComparedJob, Comparison, compared_job

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
            if is_rank_zero():
                _record_function(function, against, job, trainer, old, how, updates)

        job.train([watch], at_start=at_start)
        return _comparison(watch, old, against) if is_rank_zero() else None


def _record_function(
    function: Any, against: str, job: ComparedJob, trainer: pl.Trainer, old: Recording, how: Circumstances, updates: int
) -> None:
    batches = job_batches(job.config, job.parquet_paths, how)
    ctx = plain_context(job.config, trainer, None, job.inputs.model_handles())
    offered = {
        "batches": batches,
        "ctx": replace(ctx, dataset=batches),
        "steps": ctx.job.max_steps,
        "hyperparams": dict(ctx.job.hyperparams),
        "device": ctx.device,
    }
    given = arguments_for(function, offered, named=against)

    def call(end: Any) -> None:
        def told(facts: Facts) -> None:
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

    def _told(self, hosted: Facts) -> None:
        self.count += 1
        if self.count > len(self.old):
            return
        plain = self.old[self.count - 1]
        found = compare_facts(self.count, plain, hosted, kinds=KINDS_OF_UPDATES, exact=self.how.is_exact)
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
