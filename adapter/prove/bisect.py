"""Find the first step, rank and value in which two runs differ: ``genlight bisect``.

The witnesses of both runs (files with digests of their steps) and their checkpoints bound the steps in question. Both
runs are then trained again from their last equal checkpoint, with digests of their complete state after up to 64 of
these steps, until a single step is left. That step is trained once more, to know whether the difference repeats.
"""

from __future__ import annotations

import bisect as binary_search
import dataclasses
import logging
import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ...callbacks.checkpoint import load
from ...callbacks.witness.entry import OF_MODEL, RANDOM_STATES, describe_steps, limit_between
from ...callbacks.witness.state import differing_values, values_of_state
from ...reporters.events.run_metadata import source_digest
from ..check.compare import CAUSES
from ..check.snapshot import EVERYTHING, KINDS, Snapshot, describe, differing_paths, distance, is_real, snapshot
from ..contract.exceptions import CheckpointError, GenlightError, UsageError
from ..plumbing.text import list_first
from ..view.differences import ChangedFact, differences, facts_of_run
from ..view.summary import RunSummary, summary_of
from .evidence import compare_witnesses
from .repetition import Done, PastRun, Repetition, Traces, open_run, read_traces, repeat, start_before

log = logging.getLogger(__name__)

MOST_DIGESTS = 64
"""Maximum number of steps whose digests one repetition takes. A longer interval needs several repetitions."""
NAMES = ("RUN_A", "RUN_B")
_KINDS = ("rows", "random numbers", *KINDS, "value")
"""Kinds of values in the order in which a step makes them, so that a cause precedes its effects."""


@dataclass
class Bisection:
    """The first difference of two runs, and notes about the comparison."""

    facts: Sequence[ChangedFact] = ()
    """Differences that exist before a step is trained: configuration, data, code, versions, machine."""
    notes: list[str] = field(default_factory=list)
    """Phrases about each comparison and its result, and about values that could not be compared."""
    after: int = 0
    """The last step after which the runs are known to be equal."""
    step: int | None = None
    """The first step that differs, or only the first that is known to differ (see `is_exact`); 0 is before the first
    step. None if the runs are equal."""
    rank: int = 0
    kind: str = ""
    """The kind of difference, as in a snapshot or a witness, or ``checkpoint``."""
    name: str = ""
    """Path of the value that differs first, or the difference in words."""
    values: Sequence[str] = ()
    """The value in each run, in words, if it was found."""
    distance: float | None = None
    """Relative distance of these values, if they are finite."""
    cause: str = ""
    """The probable cause."""
    replays: int = 0
    """How often one of the runs was trained again."""

    @property
    def is_exact(self) -> bool:
        """Whether the step was found, and not only bounded."""
        return self.step is not None and self.step <= self.after + 1

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {"equal": self.step is None, "exact": self.is_exact, **dataclasses.asdict(self)}


def bisect(folders: Sequence[Path], scratch: Path) -> Bisection:
    """Find the first difference of two runs.

    Args:
        folders: The folders of both runs; they are only read.
        scratch: An empty folder for everything that repetitions write.

    Raises:
        UsageError: The runs have nothing in common that can be compared.
    """
    traces, summaries = (
        [read_traces(folder) for folder in folders],
        [summary_of(each, counts=False) for each in folders],
    )
    changes = differences([facts_of_run(summary) for summary in summaries])
    result = Bisection([change for change in changes if change.about != "results"])
    if len(last := {summary.step for summary in summaries}) > 1:
        ends = " and ".join(f"{name} {summary.step}" for name, summary in zip(NAMES, summaries, strict=True))
        result.notes.append(f"{ends} steps: those up to {min(last)} are compared")
    differing = _compare_traces(traces, result)
    if result.step is None:
        return result
    try:
        if any((summary.ranks or 1) > 1 for summary in summaries):
            raise UsageError("the runs have several ranks; `genlight replay RUN --step N` shows a step of one run")
        runs = [open_run(each, scratch / name) for each, name in zip(traces, NAMES, strict=True)]
        _Search(runs, summaries, result).run()
    except GenlightError as error:
        result.notes.append(f"no step is trained again: {error}")
    if not result.kind:
        result.kind, result.name = "checkpoint", differing[0]
    return result


def _compare_traces(traces: Sequence[Traces], result: Bisection) -> list[str]:
    """Bound the first difference by witnesses and checkpoints.

    Returns:
        The values that differ in the first unequal checkpoints of a common step.
    """
    first, second = traces
    note, named = result.notes.append, list(zip(NAMES, traces, strict=True))
    result.notes += [f"{name}: {each.limits}" for name, each in named if each.limits]
    proof = None
    if lost := [name for name, each in named if not each.witness]:
        note(f"{' and '.join(lost)} kept no witness that can be read, so only checkpoints are compared")
    else:
        can_compare, limit = limit_between(first.facts, second.facts)
        result.notes += [limit] if limit else []
        if can_compare:
            proof = compare_witnesses(first.witness, second.witness, with_values=not limit)
            result.notes += [] if proof else ["the witnesses of the runs have no step in common"]
    if proof is not None:
        if proof.steps:
            named_steps, have, compared = describe_steps(proof.steps)
            note(f"{named_steps}{compared} {have} equal witnesses")
        if (found := proof.difference) is not None:
            note(f"the witnesses differ in step {found.step}")
            result.step, result.rank, result.kind, result.name = found.step, found.rank, found.kind, found.text
    steps, differing = _compare_records(first, second, result)
    if proof is None and not steps:
        raise UsageError("; ".join(["the runs have nothing in common that can be compared", *result.notes]))
    return differing


def _compare_records(first: Traces, second: Traces, result: Bisection) -> tuple[list[int], list[str]]:
    """Narrow the interval of `result` by the checkpoints of common steps.

    Returns:
        The common steps, and the values that differ in the first unequal checkpoints.
    """
    steps = sorted(step for step in first.records.keys() & second.records.keys() if step < (result.step or step + 1))
    names: dict[int, list[str]] = {}
    probed = 0

    def differ(step: int) -> bool:
        nonlocal probed
        probed = step
        if step not in names:
            states = (values_of_state(load(each.records[step].path)) for each in (first, second))
            names[step] = differing_values(*states)
        return bool(names[step])

    at = None
    while at is None:
        try:
            at = binary_search.bisect_left(steps, True, key=differ)
        except CheckpointError as error:
            result.notes.append(f"the checkpoints of step {probed} are not compared: {error}")
            steps.remove(probed)
    if at:
        result.after = steps[at - 1]
        result.notes.append(f"the checkpoints of step {result.after} are equal")
    if at == len(steps):
        return steps, []
    differing = names[steps[at]]
    result.notes.append(f"the checkpoints of step {steps[at]} differ in {len(differing)} values")
    result.step, result.rank, result.kind, result.name = steps[at], 0, "", ""
    return steps, differing


class _States(Repetition):
    """Takes digests of the complete state after some steps.

    Args:
        run: The run.
        steps: These steps, in order. The first is the one from which the run is trained again.
        keeps: Whether to keep the state after the last step, in host memory.
    """

    hints: Mapping[str, str] = {}

    def __init__(self, run: PastRun, steps: Sequence[int], *, keeps: bool) -> None:
        super().__init__(run, steps[-1])
        self.steps, self.keeps = steps, keeps
        self.digests: dict[int, Mapping[str, str]] = {}
        """The digest of each value by path, by step."""
        self.others: set[str] = set()
        """Paths of values that are neither weights nor states or settings of an optimizer."""
        self.state = Snapshot()

    @override
    def is_read(self, step: int) -> bool:
        return step in self.steps

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._take(pl_module)
        if self.last == pl_module.completed_steps:  # only the state before the first step is in question
            raise Done

    @override
    def on_mb_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._take(pl_module)
        super().on_mb_end(trainer, pl_module)

    def _take(self, module: Any) -> None:
        """Take the digests of the complete state, if the completed step is one of `steps`."""
        if (step := module.completed_steps) not in self.steps:
            return
        values = dict(snapshot(module.contract_state, module.plugin, kinds=EVERYTHING, host=module).values)
        if (entry := self.entry) is not None and entry.step == step:
            # Only the states of global generators: generators that the model holds are among the values.
            states = zip(RANDOM_STATES[:OF_MODEL], entry.random, strict=False)
            losses = {name: value for name, value in module.metrics().items() if "loss" in name.lower()}
            values["rows"] = {f"batch {entry.batch} of epoch {entry.epoch}": f"{entry.rows:016x}"}
            values |= {"random numbers": {name: f"{digest:016x}" for name, digest in states}, "metric": losses}
        state = Snapshot({kind: values.get(kind, {}) for kind in (*_KINDS, *values)})
        self.digests[step] = state.digests
        self.others |= state["value"].keys()
        self.state = state if self.keeps else self.state


class _Search:
    """Trains both runs again to find the first step and the first value that differ.

    Args:
        runs: The runs.
        summaries: Their summaries.
        result: Bounds the step, and receives the result.

    Raises:
        UsageError: A run cannot be trained again from the last step after which they are equal.
    """

    def __init__(self, runs: Sequence[PastRun], summaries: Sequence[RunSummary], result: Bisection) -> None:
        self._runs, self._summaries, self._result = runs, summaries, result
        self._starts = [start_before(run, result.after + 1) for run in runs]
        self._known: dict[tuple[int, tuple[int, ...]], _States] = {}
        """The states so far, by index of the run and steps."""

    def run(self) -> None:
        """Search, and complete the result."""
        result = self._result
        assert result.step is not None
        start, low, high, unstable = result.after, result.after, result.step, set[str]()
        while True:
            steps = (start, *_spaced(low, high))
            pair = [self._states(side, steps) for side in (0, 1)]
            at_start = self._differing_at_start(pair)
            if (found := _first_difference(pair, unstable | at_start)) is None:
                break
            step, path = found
            before = max((each for each in steps if each < step), default=start)
            if step - before > 1:  # search the steps between these two
                low, high = before, step
                continue
            # A value that differs between two replays of one run does not count.
            again = [self._train(side, steps[: steps.index(step) + 1], keeps=True) for side in (0, 1)]
            changed = set().union(*map(_unstable, pair, again))
            if path not in changed:
                self._report(step, path, [each.state for each in again])
                break
            unstable |= changed
            low, high = start, result.step
        if at_start:
            text = f"not compared, because they differ from the start on: {list_first(sorted(at_start), 3)}"
            result.notes.append(text)
        if unstable:
            result.notes.append(f"not repeated by two replays of one run: {list_first(sorted(unstable), 3)}")
        verdicts = [self._judge(side, each) for side, each in enumerate(pair)]
        result.cause = " ".join(text for text in (result.cause, *verdicts) if text)

    def _differing_at_start(self, pair: Sequence[_States]) -> set[str]:
        """Return the paths of values that differ at the start and are no result of a step, such as hyperparameters."""
        paths = set(differing_paths(*(each.digests[each.steps[0]] for each in pair)))
        # After a common checkpoint, whatever differs is not part of that checkpoint. Before the first step, different
        # weights or optimizers may be the result of the search, so only other values are returned.
        return paths if self._result.after else paths & (pair[0].others | pair[1].others)

    def _states(self, side: int, steps: tuple[int, ...]) -> _States:
        if (side, steps) not in self._known:
            self._known[side, steps] = self._train(side, steps)
        return self._known[side, steps]

    def _train(self, side: int, steps: tuple[int, ...], *, keeps: bool = False) -> _States:
        """Train a run again, and return its digests after `steps`."""
        run, states = self._runs[side], _States(self._runs[side], steps, keeps=keeps)
        shutil.rmtree(run.config.artifacts_dir, ignore_errors=True)  # left by the previous repetition
        self._result.replays += 1
        log.info("training %s again, from step %d to step %d", NAMES[side], steps[0], steps[-1])
        if (error := repeat(run, self._starts[side], states)) is not None:
            self._result.notes.append(f"{NAMES[side]}, trained again, fails in step {states.running_step}: {error!r}")
        return states

    def _report(self, step: int, path: str, states: Sequence[Snapshot]) -> None:
        """Complete the result with the first difference and the value in each run."""
        result = self._result
        kind = next(kind for each in states for kind, values in each.values.items() if path in values)
        first, second = (each[kind].get(path) for each in states)
        result.after, result.step, result.rank, result.kind, result.name = max(step - 1, 0), step, 0, kind, path
        result.values = [describe(first), describe(second)]
        size = distance(first, second) if is_real(first) and is_real(second) else math.inf
        result.distance = size if math.isfinite(size) else None
        result.cause = CAUSES.get("start" if step == 0 else kind, "")

    def _judge(self, side: int, states: _States) -> str:
        """Return why the replay of a run differs from the run; empty if it does not."""
        name, summary, result = NAMES[side], self._summaries[side], self._result
        result.notes.append(f"{name}, trained again: {states.text}")
        if (found := states.difference) is None:
            return ""
        if not result.cause and found.step <= (result.step or 0):
            result.step, result.kind, result.name = found.step, found.kind, found.text
        source = summary.metadata.get("source")
        if source is not None and source != source_digest(self._runs[side].target.__module__):
            return f"The file of the class has changed since {name} trained, so its replay is another training."
        if _unstable(states, self._train(side, tuple(states.steps))) - states.others:
            return (
                f"Two replays of {name} differ as well: kernels that are not deterministic, or code that depends on "
                "something outside of the job."
            )
        return (
            f"Step {found.step} of {name}, replayed twice, has the same bits both times, but not those of the run. "
            f"That points at the machine on which it ran ({summary.host}), or at state that no checkpoint holds."
        )


def _spaced(low: int, high: int) -> Iterator[int]:
    """Yield up to `MOST_DIGESTS` steps after `low`, evenly spaced; the last is `high`."""
    count = min(high - low, MOST_DIGESTS)
    return (low + math.ceil((high - low) * part / count) for part in range(1, count + 1))


def _first_difference(pair: Sequence[_States], unstable: Collection[str]) -> tuple[int, str] | None:
    """Return the first step and path at which two repetitions differ, without those that are `unstable`."""
    first, second = pair
    for step in first.steps:
        paths = differing_paths(first.digests.get(step, {}), second.digests.get(step, {}))
        if (path := next((each for each in paths if each not in unstable), None)) is not None:
            return step, path
    return None


def _unstable(first: _States, second: _States) -> set[str]:
    """Return the paths at which two repetitions of one run differ."""
    common = first.digests.keys() & second.digests.keys()
    return {path for step in common for path in differing_paths(first.digests[step], second.digests[step])}
