"""The data that a user's function returns, as batches of this rank with a position.

Rows of a map-style dataset come in genlight's own order. Sources without a position are read again after a resume, up
to the batch of the checkpoint. `feed_of` lists the cases.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ...callbacks.checkpoint.positioned_loader import extend_loader, is_stateful
from ...callbacks.checkpoint.rank_state import capture_rng, restore_rng
from ..contract.exceptions import InputError
from ..contract.types import StepContext
from ..plumbing.devices import isolated_random_numbers
from ..plumbing.generators import held_states, set_held_states
from ..plumbing.text import shortened
from .arrow_feed import ArrowFeed
from .batching import Spec
from .position import Position
from .workers import make_in_workers, seed_generators, seed_of_step

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ARROW_OPTIONS = ("columns", "filesystem", "readahead", "shuffle_window")
"""Options of a feed that apply only to Arrow data."""
_END = object()


def call_with_context(function: Callable[..., Any], ctx: StepContext) -> Any:
    """Call `function`, which takes ``ctx`` or nothing.

    Raises:
        InputError: It requires other arguments.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return function()
    required = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in _MANY]
    if unknown := [f"`{each}`" for each in required if each != "ctx"]:
        raise InputError(
            f"The data function `{name}` requires {', '.join(unknown)}, but genlight passes `ctx` or nothing. Write a "
            f"function that returns it: `def data(ctx): return lambda: {name}(…)`."
        )
    return function(ctx=ctx) if "ctx" in parameters else function()


def feed_of(function: Callable[..., Any], ctx: StepContext, options: Mapping[str, Any]) -> Any:
    """Return the data that `function` returns, as batches of the rank of `ctx`.

    - a map-style dataset: batches of rows in genlight's order, which depends only on seed and epoch; ranks share each
      step, and another number of ranks can continue from the position;
    - a plain ``DataLoader`` over a map-style dataset: the loader itself on one process, in the order of a plain loop;
      on several ranks its dataset as above, with its batch size, workers and collate function. A loader with a
      `DistributedSampler`, or with a sampler that is not torch's, must share its rows itself, and is returned as it is;
    - a table or a data frame: an `ArrowFeed`;
    - an object with ``state_dict`` and ``load_state_dict``: the object itself; see `_BeginsAtFirstBatch`;
    - another iterable, or a callable that returns the next batch: `RepeatedRead`.

    Args:
        function: A function of ``ctx``, or of nothing. If it returns an iterator, it is called again for each pass.
        ctx: Context of this rank.
        options: Options of `ArrowFeed`, for rows that are not yet in batches.

    Raises:
        InputError: The function returned something else, or data that several ranks cannot share.
    """
    data = call_with_context(function, ctx)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    ranks: dict[str, Any] = {"rank": ctx.rank, "world_size": ctx.world_size}
    if hasattr(data, "__arrow_c_stream__"):
        return ArrowFeed(data, **ranks, **options)
    is_batch = isinstance(data, str | bytes | tuple | Mapping | torch.Tensor | np.ndarray)
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_batch and type(data) is not list
    unused = [option for option in options if option in _ARROW_OPTIONS] if is_dataset else sorted({*options} - {"seed"})
    if unused and ctx.rank == 0:
        what = "rows that are not Arrow data" if is_dataset else "batches, not rows"
        log.warning("%s: no effect, because `%s` returns %s", ", ".join(map("`{}`".format, unused)), name, what)
    if is_dataset:
        return _dataset_feed(data, {**options, **ranks})
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        return data if ctx.world_size == 1 else _shared_loader(data, name, {"seed": options.get("seed", 0), **ranks})
    if type(data) is DataLoader and data.persistent_workers:
        # Persistent workers keep their random generators from epoch to epoch, and a resume could not restore these.
        log.info(
            "`persistent_workers` of the DataLoader of `%s` has no effect, because a resume reads its epoch again", name
        )
        vars(data).update(persistent_workers=False)
    if is_stateful(data) and hasattr(data, "__iter__"):
        is_own = not isinstance(data, DataLoader | ArrowFeed) and hasattr(data, "__dict__")
        return extend_loader(data, _BeginsAtFirstBatch) if is_own else data
    if is_batch or not (hasattr(data, "__iter__") or callable(data)):
        raise InputError(
            f"The data function `{name}` returned {shortened(repr(data), 100)}, a {type(data).__name__}. Return a "
            "source of batches: a dataset, a DataLoader, an iterable, or a function that returns the next one."
        )
    if ctx.world_size > 1 and hasattr(data, "__iter__") and "ctx" not in inspect.signature(function).parameters:
        raise InputError(
            f"Each of {ctx.world_size} ranks would train the batches that `{name}` returns. Give it a parameter `ctx` "
            "and share them by `ctx.rank` and `ctx.world_size`, or return a map-style dataset, which genlight shares."
        )
    return RepeatedRead(data, lambda: call_with_context(function, ctx), name, ctx, seed=options.get("seed", 0))


class _BeginsAtFirstBatch:
    """A loader whose pass begins when its first batch is requested, not when ``__iter__`` is called.

    `extend_loader` makes a subclass of this and of the class of a user's loader. Lightning makes one more iterator than
    it uses, so a loader that shuffles, or counts its passes, in ``__iter__`` would begin with its second pass. This
    loader's state also has the random states from the start of the pass, because most loaders draw the order of a
    resumed pass again.
    """

    _states_at_start: dict[str, Any] | None = None
    """Random states at the start of the pass; None between passes."""
    _held_at_start: list[Any]
    """States of the generators that the loader holds, at the start of the pass."""
    _resumes = False

    def __iter__(self) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, False
        with isolated_random_numbers() if resumes else nullcontext():
            if resumes and self._states_at_start:
                restore_rng(self._states_at_start)
            else:
                self._states_at_start, self._held_at_start = capture_rng(), held_states(self)
            batches = super().__iter__()  # type: ignore[misc]
        yield from batches
        self._states_at_start = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, and the random states from the start of the pass."""
        held = held_states(self) if self._states_at_start is None else self._held_at_start
        return {"begun": self._states_at_start, "held": held, "loader": super().state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self._states_at_start, self._held_at_start = state["begun"], state["held"]
        self._resumes = self._states_at_start is not None
        set_held_states(self, self._held_at_start)
        super().load_state_dict(state["loader"])  # type: ignore[misc]


def _dataset_feed(dataset: Any, options: Mapping[str, Any]) -> ArrowFeed:
    collate = options.get("collate")
    own = {**options, "collate": default_collate if collate in (None, "torch") else collate}
    return ArrowFeed(DatasetSource(dataset), **{**own, "shuffle_window": max(len(dataset), 1)})


def _shared_loader(loader: DataLoader[Any], name: str, options: Mapping[str, Any]) -> Any:
    """Return the share of one rank in `loader`, whose dataset is map-style.

    Raises:
        InputError: Its sampler is one of torch's that ranks cannot share.
    """
    sampler = loader.sampler
    is_plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    is_in_order = type(sampler) is SequentialSampler
    is_shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler)
    has_own_workers = loader.worker_init_fn is not None or loader.multiprocessing_context is not None
    if is_plain and (is_in_order or is_shuffled) and not has_own_workers:
        taken = {name: getattr(loader, name) for name in ("batch_size", "drop_last", "pin_memory")}
        taken |= {"shuffle": is_shuffled, "workers": loader.num_workers, "collate": loader.collate_fn}
        seed = options["seed"] if loader.generator is None else loader.generator.initial_seed()
        return _dataset_feed(loader.dataset, {**options, **taken, "seed": seed})
    if isinstance(sampler, DistributedSampler) or not type(sampler).__module__.startswith("torch."):
        return loader
    raise InputError(
        f"The {type(loader).__name__} of `{name}`, with a {type(sampler).__name__}, cannot be shared by "
        f"{options['world_size']} ranks. Give it `sampler=DistributedSampler(dataset, ctx.world_size, ctx.rank)`, or "
        "return the dataset."
    )


class RepeatedRead:
    """Batches of an iterable, or of a callable that returns the next batch, without a position.

    A resume reads the batches of the pass again, with the random states from the start of the pass, and logs that. If a
    callable draws random numbers, its batches are not read again, because the random states of the checkpoint determine
    its next batch. On several ranks, random numbers come from the seed, the rank and the number of the batch.

    Args:
        source: The iterable or the callable.
        make_source: Returns a new `source`, for the next pass of an iterator and after a resume.
        name: Name in messages.
        ctx: Context of this rank.
        seed: Seed of the random numbers on several ranks.
    """

    def __init__(
        self, source: Any, make_source: Callable[[], Any], name: str, ctx: StepContext, *, seed: int = 0
    ) -> None:
        self._source, self._make_source, self._name = source, make_source, name
        self._is_callable = not hasattr(source, "__iter__")
        self._built, self._objects = _pass_state(source), _object_ids(source)
        self._source_at_start: dict[str, Any] = self._built
        """The state of the source itself at the start of the pass."""
        self._rank, self._world_size, self._seed = ctx.rank, ctx.world_size, seed
        self._passes = self._taken = 0
        self._random_states: dict[str, Any] | None = None
        """Random states at the start of the pass, on one process; None between passes."""
        self._draws = False
        """Whether the callable draws random numbers."""
        self._resumes = False

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        # All of this happens when the first batch is requested, since Lightning makes one more iterator than it uses.
        taken, self._resumes = self._taken if self._resumes else 0, False
        if not taken:
            self._passes, self._source_at_start = self._passes + 1, _pass_state(self._source)
            self._random_states = capture_rng() if self._world_size == 1 else {}
        if not taken or self._draws:
            self._taken, batches = taken, self._start_pass()
        else:
            batches = self._read_again(taken)
        for batch in self._draw(batches):
            self._taken += 1
            yield batch
        self._random_states, self._taken = None, 0

    def _start_pass(self) -> Iterator[Any]:
        source = self._make_source() if self._source is None else self._source
        batches: Iterator[Any] = _call_repeatedly(source) if self._is_callable else iter(source)
        self._source = None if batches is source else source  # an iterator can be read only once
        return batches

    def _draw(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches`; on several ranks, each is made with the random numbers of this rank."""
        while True:
            with isolated_random_numbers() if self._world_size > 1 else nullcontext():
                if self._world_size > 1:
                    seed_generators((self._seed, 3, self._passes, self._taken, self._rank))
                before = _host_states() if self._is_callable and not self._taken else None
                batch = next(batches, _END)
                self._draws = self._draws or (before is not None and _host_states() != before)
            if batch is _END:
                return
            yield batch

    def _read_again(self, taken: int) -> Iterator[Any]:
        """Read and drop `taken` batches; return the following ones.

        Raises:
            InputError: The source returns fewer batches than `taken`.
        """
        self._taken = 0
        states: list[Any] = []
        with isolated_random_numbers():
            if self._random_states:
                restore_rng(self._random_states)
            batches = self._start_pass()
            for _ in islice(self._draw(batches), taken):
                self._taken += 1
                states = [*states[:1], _host_states()]
        if self._taken < taken:
            raise InputError(
                f"`{self._name}` returned {self._taken} batches, but this pass had {taken} before the checkpoint. "
                "Resume with the data of the checkpoint, or start a new run."
            )
        report = f"`{self._name}` keeps no position: {taken} batches of this pass were read again"
        if states[0] == states[-1] or self._world_size > 1:
            log.info(report)
        else:
            log.warning(
                f"{report}, and random numbers were drawn between them. If these choose later rows, as in a shuffle "
                "buffer, the run is not bit-equal to an uninterrupted one: return a map-style dataset, or give the "
                "iterable `state_dict` and `load_state_dict`"
            )
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that the pass has handed out, and the states from its start."""
        return {
            "passes": self._passes,
            "taken": self._taken,
            "begun": self._random_states,
            "draws": self._draws,
            "world_size": self._world_size,
            "source": self._source_at_start if self._taken and not self._draws else _pass_state(self._source),
            "built": self._built,
            "replaced": self._list_replaced(),
        }

    def _list_replaced(self) -> list[str]:
        """Return the names of attributes of the source that hold other objects than when it was built."""
        now = _object_ids(self._source)
        return sorted(name for name, built in self._objects.items() if now.get(name) != built)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that the pass had handed out.

        Raises:
            InputError: The state was saved within a pass on another number of ranks, or by another kind of source.
        """
        if "taken" not in state or "passes" not in state:
            raise InputError(f"The position belongs to another kind of source; it has {', '.join(sorted(state))}.")
        if state["taken"] and not state["draws"] and state["world_size"] != self._world_size:
            raise InputError(
                f"`{self._name}` shares its batches itself, so a position within a pass on {state['world_size']} ranks "
                f"does not apply to {self._world_size}. Resume with as many ranks, or return a map-style dataset."
            )
        self._passes, self._taken = state["passes"], state["taken"]
        self._random_states, self._draws = state["begun"], state["draws"]
        self._resumes = self._taken > 0
        self._source_at_start = state["source"]
        numbers = _put_pass_state(self._source, state["built"], self._source_at_start)
        if numbers and state["replaced"]:
            log.warning(
                "`%s` continues with the values that the checkpoint has of %s, but the checkpoint does not hold %s, "
                "which reading had replaced as well. If these belong together, such as a shard and its number, later "
                "rows are wrong: give the source `state_dict` and `load_state_dict`.",
                self._name,
                ", ".join(numbers),
                ", ".join(state["replaced"]),
            )


def _pass_state(source: Any) -> dict[str, Any]:
    """Return the state of `source` that may change from pass to pass: its random number generators and its counters."""
    numbers = {name: value for name, value in _attributes(source).items() if type(value) is int}
    return {"generators": held_states(source), "numbers": numbers}


def _put_pass_state(source: Any, built: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Restore a result of `_pass_state`; a counter that had not changed since `built` keeps its present value.

    Returns:
        The names of the counters that were restored.
    """
    set_held_states(source, saved["generators"])
    changed = {name: value for name, value in saved["numbers"].items() if built["numbers"].get(name) != value}
    _attributes(source).update(changed)
    return sorted(changed)


def _object_ids(source: Any) -> dict[str, int]:
    """Return the identities of the attributes of `source` that are not numbers."""
    return {name: id(value) for name, value in _attributes(source).items() if type(value) not in (int, float, bool)}


def _attributes(source: Any) -> dict[str, Any]:
    """Return the attributes of `source`, or of its dataset; an empty dictionary if it has none."""
    attributes: dict[str, Any] = getattr(getattr(source, "dataset", source), "__dict__", {})
    return attributes


def _call_repeatedly(function: Callable[[], Any]) -> Iterator[Any]:
    while True:
        try:
            batch = function()
        except StopIteration:
            return
        yield batch


def _host_states() -> tuple[bytes, str, tuple[Any, ...]]:
    state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), f"{state[1].tobytes()}{state[2:]}", random.getstate()


class DatasetSource:
    """Rows of a dataset with ``__getitem__`` and ``__len__``, shuffled over the complete dataset.

    Args:
        dataset: The dataset; it is sent to workers, if there are any. If it has a ``__getitems__``, this gets lists of
            row numbers.
    """

    fingerprint = "dataset"
    """Constant, because only the user knows the contents; the number of rows is part of each position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.group_rows = (len(dataset),)

    @property
    def schema(self) -> pa.Schema:
        """An empty schema, since the rows are not Arrow data."""
        import pyarrow as pa

        return pa.schema([])

    def batches(self, spec: Spec, position: Position, workers: int, *, opened: ExitStack) -> Iterator[Any]:
        """Return the batches of an epoch from `position` on. Workers see changes of the dataset in the next epoch."""
        steps, seed = _rows_of_steps(spec, position), spec.layout.order.seed
        make = partial(_batch, self.dataset, spec.collate, of_worker=workers > 0)
        if workers:
            return make_in_workers(make, steps, workers, ahead=2, seed=seed, opened=opened)
        return map(make, steps)


def _rows_of_steps(spec: Spec, position: Position) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield, for each step of an epoch, the seed of its random numbers in workers, and the rows of this rank."""
    share, order = spec.layout.share(position.rows), spec.layout.order
    spans = [
        (order.window_permutation(epoch, 0, 0, order.rows) if order.shuffle else np.arange(order.rows))[first:end]
        for epoch, first, end in position.spans
    ]
    rows = np.concatenate(spans)
    intervals = share.intervals(position.step, share.steps, spec.rank)
    for step, (first, end) in enumerate(intervals, position.step):
        yield seed_of_step(spec, position, step), rows[first:end].tolist()


def _batch(
    dataset: Any, collate: Callable[[Any], Any] | None, step: tuple[tuple[int, ...], list[int]], *, of_worker: bool
) -> Any:
    """Return the batch of a step; in a worker, its random numbers depend only on the step."""
    entropy, rows = step
    if of_worker:
        seed_generators(entropy)
    fetch = getattr(dataset, "__getitems__", None)
    found = fetch(rows) if callable(fetch) else [dataset[row] for row in rows]
    return found if collate is None else collate(found)
