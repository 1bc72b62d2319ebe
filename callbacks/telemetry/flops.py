"""How many floating point operations a step does, counted while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

__all__ = ["FlopCounter", "StepFlops"]

log = logging.getLogger(__name__)

MOST_SHAPES = 32
"""How many shapes of batches are counted by themselves; with more the count of the last one stays."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch's own counter counts, by its formulas: products, convolutions and attention.

    Unlike `torch.utils.flop_counter.FlopCounterMode` it puts no hooks on modules and gradients, which others of the run
    may translate or forbid, and a formula that fails ends the count and not the step.

    Attributes:
        flops: What was counted; None once a formula has failed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None and self.flops is not None:
            self.flops = self._counted(formula, args, kwargs or {}, out)
        return out

    def _counted(
        self, formula: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> int | None:
        try:
            return (self.flops or 0) + int(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # noqa: BLE001  # whatever a formula of torch does not foresee
            log.warning("the operations of a step cannot be counted: %s: %s", type(error).__name__, error)
            return None


class StepFlops:
    """The operations of a step, counted once for each shape of batch.

    Attributes:
        per_step: Operations of a step with a batch as it was looked at last; None while that is not known.
    """

    def __init__(self) -> None:
        self.per_step: int | None = None
        self._known: dict[object, int | None] = {}
        self._counter: FlopCounter | None = None
        self._shapes: object = None
        self.is_wanted = True
        """Whether the next step is to be counted."""

    def look_at(self, batch: Any) -> None:
        """Take the count for batches like this one, or ask for the next step to be counted."""
        shapes = shapes_of(batch)
        if shapes in self._known:
            self.per_step = self._known[shapes]
        elif len(self._known) < MOST_SHAPES:
            self.is_wanted = True

    def begin(self, batch: Any) -> None:
        """The step with `batch` begins, and is counted."""
        self.end(failed=True)
        self.is_wanted = False
        self._shapes = shapes_of(batch)
        self._counter = FlopCounter()
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, failed: bool = False) -> None:
        """The step has ended; nothing happens where none is being counted.

        Args:
            failed: Whether it was not a whole step.
        """
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not failed:
            # A trainer that does nothing that torch counts may do anything else.
            self.per_step = self._known[self._shapes] = counter.flops or None


def shapes_of(batch: Any) -> object:
    """A key for the shapes of a batch: those of its tensors and arrays, and row counts of Arrow batches."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple((str(name), shapes_of(value)) for name, value in batch.items())
    if isinstance(batch, list | tuple):
        # Of a list of samples the first one stands for all.
        return (len(batch), *(shapes_of(value) for value in batch[:8]))
    shape = getattr(batch, "shape", None)
    rows = getattr(batch, "num_rows", None)
    return tuple(shape) if isinstance(shape, tuple) else rows
