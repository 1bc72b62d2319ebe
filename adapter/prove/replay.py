"""Replay a run to a step, and show what happened in that step: ``genlight replay``.

The replay starts from the newest checkpoint before the step. It shows the norms of the step by module, its first value
that is not finite, and the rows that cause it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import pdb  # noqa: T100  # the command has an option for it
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from ...callbacks.checkpoint.codec.tensors import is_plain
from ...callbacks.checkpoint.rank_state import capture_rng, restore_rng
from ...callbacks.finite import are_finite
from ...callbacks.optimizer_state import parameters_of
from ..check.batches import count_rows, describe_batch, take_rows
from ..check.isolation import describe_error
from ..check.snapshot import live_weights
from ..contract.exceptions import UsageError
from ..discovery.discover import Discovered, Found
from ..view.summary import summary_of
from .repetition import PastRun, Repetition, open_run, read_traces, repeat, start_before

Kind = Literal["weight before", "output", "gradient at output", "gradient", "weight after"]


@dataclass(frozen=True)
class Value:
    """A tensor at one moment of a step."""

    kind: Kind
    """A weight before or after the step, the output of a module or the gradient at it, or the gradient of a weight."""
    name: str
    """Path of the weight or of the module."""
    norm: float
    """Its L2 norm."""
    is_finite: bool


class StepView:
    """Reads the values of a step in the order in which they are made; waits for the device.

    Gradients of weights are read at the update, when they are unscaled and clipped. If no update used a weight, its
    gradient is read at the end of the step.

    Args:
        discovered: The objects of the class.
        counts_memory: Whether to count the bytes that each module keeps for its backward. A class that uses
            ``torch.func`` cannot train while they are counted, because torch refuses both together.
    """

    def __init__(self, discovered: Discovered, *, counts_memory: bool = False) -> None:
        self.values: list[Value] = []
        self.kept_bytes: dict[str, int] = {}
        """Bytes by module; those that are kept outside of every module have the name ``""``."""
        self._counts_memory = counts_memory
        self._modules = {
            f"{found.path}.{name}" if name else found.path: part
            for found in discovered.modules
            for name, part in found.value.named_modules()
        }
        self._weights = {name: tensor for name, tensor in live_weights(discovered).items() if not is_lazy(tensor)}
        self._running = [""]
        """Names of the modules that run, the innermost last; ``""`` stands for the code outside of modules."""
        weights = self._weights.values() if counts_memory else ()
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in weights}
        """Addresses of memory that does not count: weights, and what was counted before."""
        self._names = {id(tensor): name for name, tensor in self._weights.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Read the step that is trained in this block."""
        self._note_weights("weight before")
        handles = [
            part.register_forward_hook(functools.partial(self._note_output, name))
            for name, part in self._modules.items()
        ]
        handles += [
            part.register_forward_pre_hook(functools.partial(self._enter, name)) for name, part in self._modules.items()
        ]
        handles.append(register_optimizer_step_pre_hook(self._note_gradients))
        try:
            with (
                saved_tensors_hooks(self._keep, lambda tensor: tensor)
                if self._counts_memory
                else contextlib.nullcontext()
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
        updated = {value.name for value in self.values if value.kind == "gradient"}
        for name, weight in self._weights.items():
            if weight.grad is not None and name not in updated:
                self._note("gradient", name, weight.grad)
        self._note_weights("weight after")

    @property
    def first_nonfinite(self) -> Value | None:
        """The first value that is not finite."""
        return next((value for value in self.values if not value.is_finite), None)

    def has_nonfinite(self, *kinds: Kind) -> bool:
        """Whether a value of one of these kinds is not finite."""
        return any(value.kind in kinds and not value.is_finite for value in self.values)

    def by_module(self) -> dict[str, dict[str, float]]:
        """Return for each module the norms ``output`` and ``gradient``, in the order of execution, and ``kept_bytes``.

        ``output`` is the norm over all calls of the module, and ``gradient`` the norm over its own weights.
        """
        norms: dict[str, dict[str, float]] = {}
        for value in self.values:
            if value.kind in ("output", "gradient"):
                owner = value.name if value.kind == "output" else value.name.rpartition(".")[0]
                of_module = norms.setdefault(owner if owner in self._modules else value.name, {})
                of_module[value.kind] = math.hypot(of_module.get(value.kind, 0.0), value.norm)
        for name, size in self.kept_bytes.items():
            norms.setdefault(name, {})["kept_bytes"] = size
        return norms

    def _note_weights(self, kind: Kind) -> None:
        for name, weight in self._weights.items():
            self._note(kind, name, weight)

    def _enter(self, name: str, *_: Any) -> None:
        self._running.append(name)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:  # each address counts once, even if it is freed and used again
            self._seen.add(storage.data_ptr())
            self.kept_bytes[self._running[-1]] = self.kept_bytes.get(self._running[-1], 0) + storage.nbytes()
        return tensor.detach()

    def _note_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        while len(self._running) > 1 and self._running.pop() != name:  # also remove inner modules that raised an error
            pass
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note("output", name, tensor)
                if tensor.requires_grad:
                    note = functools.partial(self._note, "gradient at output", name)
                    tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        for weight in parameters_of(optimizer):
            if weight.grad is not None and id(weight) in self._names:
                self._note("gradient", self._names[id(weight)], weight.grad)

    def _note(self, kind: Kind, name: str, tensor: Tensor) -> None:
        if is_plain(tensor) and tensor.is_floating_point() and tensor.numel():
            values = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
            norm = float(torch.linalg.vector_norm(values))
            # The squares of finite values may overflow.
            self.values.append(Value(kind, name, norm, math.isfinite(norm) or bool(torch.isfinite(values).all())))


class SavedState:
    """Copies of weights, gradients, optimizers, schedulers and random states before a step, in host memory.

    Other objects of the class, such as counters, are not copied.

    Args:
        discovered: The objects of the class.
    """

    def __init__(self, discovered: Discovered) -> None:
        tensors = [*live_weights(discovered).values(), *(found.value for found in discovered.tensors)]
        self._tensors = [(each, _copy(each), _copy(each.grad)) for each in tensors if not is_lazy(each)]
        stateful: tuple[Found[Any], ...] = (*discovered.optimizers, *discovered.schedulers, *discovered.scalers)
        self._states = [(found.value, tree_map(_copy, found.value.state_dict())) for found in stateful]
        self._random = capture_rng()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value, gradient in self._tensors:
                tensor.copy_(value)
                tensor.grad = None if gradient is None else _copy(gradient).to(tensor.device)
        for part, state in self._states:
            part.load_state_dict(tree_map(_copy, state))
        restore_rng(self._random)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@dataclass(frozen=True)
class RowSearch:
    """The rows that make a step fail."""

    groups: tuple[tuple[int, int], ...] = ()
    """First and last index of rows that make it fail: single rows, or rows that the trials did not separate."""
    is_confirmed: bool = False
    """Whether the step without these rows does not fail."""
    trials: int = 0
    problem: str = ""
    """Why there is no result."""


def find_rows(count: int, fails: Callable[[Sequence[int]], bool]) -> RowSearch:
    """Search by bisection for the rows that make a step fail, with at most ``2 * log2(count) + 4`` trials.

    Args:
        count: The number of rows.
        fails: Repeats the step with some rows, and returns whether it fails.

    Raises:
        Exception: `fails` raised it.
    """
    budget, trials = 2 * math.ceil(math.log2(count)) + 3, 1
    if not fails(range(count)):
        return RowSearch(trials=trials, problem="the repeated step does not fail")
    groups, waiting = [], [range(count)]
    while waiting:
        group = waiting.pop(0)
        middle, failing = len(group) // 2, []
        if middle and trials + 2 <= budget:
            trials += 2
            failing = [half for half in (group[:middle], group[middle:]) if fails(half)]
        waiting += failing
        groups += [] if failing else [group]
    others = [row for row in range(count) if not any(row in group for group in groups)]
    bounds = tuple(sorted((group[0], group[-1]) for group in groups))
    return RowSearch(bounds, bool(others) and not fails(others), trials + bool(others))


@dataclass
class Replay:
    """The result of a replay."""

    step: int
    record: str
    """Name of the checkpoint that it started from; empty if it started at the beginning of the run."""
    is_same: bool | None = None
    """Whether the replayed steps have the same bits as in the run; None if none could be compared."""
    witness: str = ""
    """The comparison of the replayed steps with the run, in words."""
    error: str = ""
    """The exception that ended the replay, and its place."""
    rows: str = ""
    """Type and shape of the raw batch of the step, as text."""
    digest: str = ""
    """Digest of that batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    modules: Sequence[Mapping[str, Any]] = ()
    """The ``name`` of each module and the norms of its ``output`` and ``gradient``, in the order of execution.

    With ``counts_memory`` also ``kept_bytes``: the memory of tensors that the module keeps for its backward.
    """
    first_nonfinite: str = ""
    """The first value of the step that is not finite."""
    search: RowSearch | None = None
    """The search for the rows that make the step fail; None if the loss and all gradients are finite."""
    ids: Sequence[Any] = ()
    """The values of the column ``id``, if there is one, in the rows that `search` found."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object; a number that is not finite is a text."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str), parse_constant=str)
        return plain


class _Observer(Repetition):
    """Reads the values of the last step, and searches for the rows that make it fail.

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
        with contextlib.suppress(Exception):  # users' objects may raise anything, and only the search needs a copy
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
        """Repeat the step with parts of its rows, to find those that make it fail."""
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
            self.result.error = f"step {self.running_step}: {describe_error(error)}"
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
        overrides: Changes of the job, each as for ``--set``.
        with_debugger: Whether to open the debugger in ``train_step`` of the step, and after an exception.
        counts_memory: Whether to count what modules keep for their backward.

    Raises:
        UsageError: The run cannot be replayed: it has no job, it has nothing to start from before the step, it uses
            FSDP 2, or it has not trained the step.
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
