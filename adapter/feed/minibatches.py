"""Minibatches of what a rollout collected, in a new order in each pass; a trainer class imports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Minibatches:
    """Columns of equal length, as dictionaries of `batch_size` rows.

    What the ``rollout`` of a trainer returns where each update epoch goes over the same rows in another order. Orders
    are drawn from torch's default generator on the CPU when a pass begins. A checkpoint holds the columns and the order
    of the pass that it interrupts.

    Args:
        columns: Tensors by name, of any dtype and device, whose first dimension is the row.
        batch_size: Rows of a minibatch.
        shuffle: Whether each pass has an order of its own; else it is the order of the rows.
        drop_last: Whether a last minibatch of fewer rows is left out.

    Raises:
        ValueError: There are no columns, they differ in length, they have no rows, or `batch_size` is below 1 or above
            what `drop_last` leaves a minibatch of.
    """

    def __init__(
        self, columns: Mapping[str, Tensor], batch_size: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.columns = dict(columns)
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.order: Tensor | None = None
        """Rows in the order of the pass that was begun last; None before the first and without `shuffle`."""
        lengths = {name: len(column) if column.ndim else 0 for name, column in self.columns.items()}
        self.rows = min(lengths.values(), default=0)
        most = self.rows if drop_last else batch_size
        if not self.rows or len(set(lengths.values())) > 1 or not 1 <= batch_size <= most:
            raise ValueError(
                "Minibatches: expected columns of one length >= 1 and a `batch_size` >= 1, at most that length with "
                f"`drop_last`, but received the lengths {lengths} and a `batch_size` of {batch_size}"
            )

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.order = torch.randperm(self.rows) if self.shuffle else None
        yield from self.rest_of_pass(0)

    def rest_of_pass(self, first: int) -> Iterator[dict[str, Tensor]]:
        """The minibatches from number `first` of the pass whose `order` was drawn last."""
        order, devices = self.order, {column.device for column in self.columns.values()}
        for index in range(first, len(self)):
            rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
            picked = {device: rows if order is None else order[rows].to(device) for device in devices}
            yield {name: column[picked[column.device]] for name, column in self.columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Columns, order of the pass and arguments, for `from_state_dict`."""
        arguments = {"batch_size": self.batch_size, "shuffle": self.shuffle, "drop_last": self.drop_last}
        return {"columns": self.columns, "order": self.order, **arguments}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Minibatches:
        """The minibatches that `state_dict` described, in the middle of the same pass."""
        minibatches = cls(**{name: value for name, value in state.items() if name != "order"})
        minibatches.order = state["order"]
        return minibatches
