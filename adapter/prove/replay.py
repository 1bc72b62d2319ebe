"""Replay the steps of a run up to one of them, from the newest checkpoint before it, and show that step: ``replay``."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pdb  # noqa: T100  # the command has an option for it
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
from typing_extensions import override

from ...callbacks.finite import are_finite
from ..check.batches import count_rows, describe_batch, take_rows
from ..check.isolation import where_raised
from ..check.snapshot import live_weights
from ..contract.exceptions import UsageError
from ..plumbing.redaction import safe_str
from ..view.summary import summary_of
from .repetition import PastRun, Repetition, open_run, read_traces, repeat, start_before
from .step_view import RowSearch, SavedState, StepView, find_rows


@dataclass
class Replay:
    """The result of a replay."""

    step: int
    record: str
    """Name of the checkpoint that it started from; empty if it started at the beginning of the run."""
    is_same: bool | None = None
    """Whether the replayed steps have the same bits as those of the run; None if none could be compared."""
    witness: str = ""
    """The comparison in words."""
    error: str = ""
    """The exception that ended the replay, and its place."""
    rows: str = ""
    """Type and shape of the raw batch of the step."""
    digest: str = ""
    """Digest of that batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    modules: Sequence[Mapping[str, Any]] = ()
    """Of each module its ``name`` and the norms of its ``output`` and ``gradient``, in the order of execution.

    With ``counts_memory`` also ``kept_bytes``: the memory of tensors that it keeps for its backward.
    """
    first_nonfinite: str = ""
    """The first value of the step that is not finite."""
    search: RowSearch | None = None
    """The search for the rows that make the step fail; None if the loss and all gradients are finite."""
    ids: Sequence[Any] = ()
    """The values of these rows in the column ``id``, if there is one."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object; a number that is not finite is a text."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str), parse_constant=str)
        return plain


class _Observer(Repetition):
    """Reads the last step.

    Args:
        run: The run.
        result: Receives the results.
        with_debugger: Whether to open the debugger in ``train_step`` of the last step, and after an exception.
        counts_memory: Whether to count what modules keep for their backward.
    """

    def __init__(self, run: PastRun, result: Replay, *, with_debugger: bool, counts_memory: bool) -> None:
        super().__init__(run, result.step, with_debugger=with_debugger)
        self.result = result
        self._counts_memory = counts_memory
        self._broken_by = 0
        """The first step after which a weight was not finite."""

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._broken_by and not are_finite(list(live_weights(pl_module.discovered).values())):
            self._broken_by = pl_module.completed_steps
        if self.running_step != self.last:
            return
        # A class may change a raw batch in place.
        self._raw = batch if isinstance(batch, pa.RecordBatch | pa.Table) else copy.deepcopy(batch)
        self.result.rows = describe_batch(batch)
        self._before: SavedState | None = None
        with contextlib.suppress(Exception):  # objects of users may raise anything, and only the search needs it
            self._before = SavedState(pl_module.discovered)
        self._view = StepView(pl_module.discovered, counts_memory=self._counts_memory)
        self._watching = self._view.watching()
        self._watching.__enter__()
        if self.with_debugger:
            _open_debugger_in(pl_module.plugin)

    @override
    def conclude(self, module: Any) -> None:
        self._read_view()
        self.result.metrics = module.metrics()
        if (ranks := self._channel.size) > 1:
            firsts = self._channel.gather_everywhere(self.result.first_nonfinite)
            self.result.first_nonfinite = "; ".join(f"rank {r}: {text}" for r, text in enumerate(firsts) if text)
        if _is_broken(self._view, self.result.metrics) and not self._view.has_nonfinite("weight before"):
            alone = RowSearch(problem="rows are only searched on one device; add `--set lightning.devices=1`")
            search = self.result.search = self._search(module) if ranks == 1 else alone
            rows = [row for first, last in search.groups for row in range(first, last + 1)]
            self.result.ids = _ids_of(self._raw, rows)

    def _read_view(self) -> None:
        self._watching.__exit__(None, None, None)
        self.result.modules = [{"name": name, **norms} for name, norms in self._view.by_module().items()]
        if (first := self._view.first_nonfinite) is not None:
            since = f"; weights are not finite since step {self._broken_by}" if first.kind == "weight before" else ""
            self.result.first_nonfinite = f"{first.kind} of {first.name}{since}"

    def _search(self, module: Any) -> RowSearch:
        before, count = self._before, count_rows(self._raw)
        if before is None or not count:
            reason = "the rows of this batch cannot be counted" if before else "the state of the class cannot be copied"
            return RowSearch(problem=reason)

        def fails(rows: Sequence[int]) -> bool:
            before.restore()
            view = StepView(module.discovered)
            with view.watching():
                module.hosted_trainer.train_raw_batch(take_rows(copy.deepcopy(self._raw), rows))
            return _is_broken(view, module.metrics())

        try:
            return find_rows(count, fails)
        except Exception as error:  # noqa: BLE001  # a class may refuse a batch of another size
            return RowSearch(problem=f"the step cannot be repeated with some of its rows: {error!r}")

    def complete(self, error: BaseException | None) -> None:
        """Complete the result after the training has ended, by an exception of a step or as planned."""
        if error is not None:
            text = f"{type(error).__name__}: {safe_str(error)}{where_raised(error)}"
            self.result.error = f"step {self.running_step}: {text}"
            if self.running_step == self.last:
                self._read_view()
        if self.entry is not None and self.entry.step == self.last:
            self.result.digest = f"{self.entry.rows:016x}"
        self.result.is_same, self.result.witness = self.is_same, self.text


def replay(
    run: Path,
    step: int,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    with_debugger: bool = False,
    counts_memory: bool = False,
) -> Replay:
    """Replay the steps of a run to `step`, from the newest checkpoint before it or from the beginning.

    Args:
        run: The folder of a run.
        step: The step to show, from 1.
        folder: An empty folder for everything that the training writes.
        overrides: Changes of the job, as of ``--set``.
        with_debugger: Whether to open the debugger in ``train_step`` of the step, and after an exception.
        counts_memory: Whether to count what modules keep for their backward.

    Raises:
        UsageError: The run cannot be replayed: it has no job, no start before the step or FSDP 2, or it has not trained
            the step.
        StartupContractError: Its job cannot be used.
    """
    traces = read_traces(run)
    past = open_run(traces, folder, overrides)
    witnessed = [key[0] for recorded in traces.witness.values() for key in recorded.entries]
    if step > (last := max([summary_of(run, counts=False).step, *traces.records, *witnessed])):
        raise UsageError(f"{run} is not known to have trained step {step}; its last known step is {last}.")
    record = start_before(past, step)
    result = Replay(step, "" if record is None else record.name)
    observer = _Observer(past, result, with_debugger=with_debugger, counts_memory=counts_memory)
    observer.complete(repeat(past, record, observer))
    return observer.result


def _open_debugger_in(plugin: Any) -> None:
    """Have the next call of ``train_step`` stop in the debugger at its first line."""
    train_step = plugin.train_step

    def debugged(batch: Any, state: Any, ctx: Any) -> Any:
        del plugin.train_step
        return pdb.runcall(train_step, batch, state, ctx)

    plugin.train_step = debugged


def _is_broken(view: StepView, metrics: Mapping[str, float]) -> bool:
    losses = [value for name, value in metrics.items() if "loss" in name.lower()]
    return view.has_nonfinite("gradient", "weight after") or not all(map(math.isfinite, losses))


def _ids_of(batch: Any, rows: Sequence[int]) -> list[Any]:
    """Return the values of rows in the column ``id``; empty if there is none."""
    chosen = take_rows(batch, rows)
    try:
        ids = [row["id"] for row in chosen] if isinstance(chosen, list) else chosen["id"]
    except (LookupError, TypeError, ValueError):
        return []
    as_list = getattr(ids, "to_pylist", None) or getattr(ids, "tolist", None)
    return list(ids) if as_list is None else as_list()
