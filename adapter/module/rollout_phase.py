"""The batches of one rollout, the place that training has reached in them, and both in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ...callbacks.checkpoint.codec.state_tree import encode
from ...callbacks.checkpoint.codec.tensor_table import TensorTable
from ..contract.exceptions import UnstorableStateError
from ..feed.minibatches import Minibatches

__all__ = ["LOST", "ROLLOUT_CHECKPOINT_BYTES", "Phase"]

ROLLOUT_CHECKPOINT_BYTES = 256 << 20
"""How much of a rollout a checkpoint holds at most; a trainer may have an attribute ``rollout_checkpoint_bytes``."""

LOST = "lost"
"""The member of a saved phase that says why its batches are not in it."""


@dataclass
class Phase:
    """A training phase: batches, update epochs over them, and how far training has come."""

    batches: Iterable[Any]
    update_epochs: int = 1
    update_epoch: int = 0
    """The pass that is being trained, from 0."""
    minibatch_index: int = 0
    """The minibatch of that pass that comes next."""
    is_within_pass: bool = False
    """Whether the pass was begun by the attempt before."""
    _seen: list[Any] = field(default_factory=list)
    """Of an iterator that more passes follow: what it gave."""
    _nbytes: int | str | None = None
    """What a checkpoint needs for the batches, or why it cannot hold them; None until that is asked for."""

    def rest_of_pass(self) -> Iterator[Any]:
        """The batches that this pass still has."""
        first = self.minibatch_index if self.is_within_pass else 0
        self.is_within_pass = False
        if isinstance(self.batches, Minibatches):
            yield from self.batches.rest_of_pass(first) if first else self.batches
        elif isinstance(self.batches, Iterator):
            yield from self._remembered(self.batches)
        elif isinstance(self.batches, Sequence):
            yield from (self.batches[index] for index in range(first, len(self.batches)))
        else:
            yield from self.batches

    def _remembered(self, batches: Iterator[Any]) -> Iterator[Any]:
        keeps = self.update_epochs > 1
        for batch in batches:
            if keeps:
                self._seen.append(batch)
            yield batch
        if keeps:
            self.batches, self._seen = self._seen, []

    def end_pass(self) -> None:
        """Go on with the first minibatch of the next pass."""
        if self._seen:  # the pass was ended early: the next ones have what this one had
            self.batches, self._seen = self._seen, []
        self.update_epoch += 1
        self.minibatch_index = 0

    def state_dict(self, limit: int) -> dict[str, Any]:
        """The phase as plain data, or why it cannot be had again."""
        if self._nbytes is None:
            self._nbytes = self._measured()
        lost = self._nbytes if isinstance(self._nbytes, str) else None
        if lost is None and isinstance(self._nbytes, int) and self._nbytes > limit:
            lost = f"its batches take {self._nbytes} bytes, and `rollout_checkpoint_bytes` is {limit}"
        if lost is not None:
            return {LOST: lost}
        place = {
            "update_epochs": self.update_epochs,
            "update_epoch": self.update_epoch,
            "minibatch_index": self.minibatch_index,
        }
        if isinstance(self.batches, Minibatches):
            return {**place, "minibatches": self.batches.state_dict(), "on_device": _on_device(self.batches.columns)}
        # Those of the last pass that were trained are not needed any more.
        trained = self.minibatch_index if self.update_epoch + 1 >= self.update_epochs else 0
        batches = list(self.batches)[trained:]
        return {**place, "trained": trained, "batches": batches, "on_device": _on_device(batches)}

    def _measured(self) -> int | str:
        if isinstance(self.batches, Minibatches):
            return sum(column.nbytes for column in self.batches.columns.values())
        if not isinstance(self.batches, list | tuple):
            return (
                f"its batches come from a {type(self.batches).__qualname__}, whose place no checkpoint can hold; a "
                "rollout of which `rollout` returns a list or `Minibatches` goes on where it was, and so does a "
                "generator of a trainer with `rollout_state`"
            )
        table = TensorTable()
        try:
            tree = encode(list(self.batches), table, root="rollout")
        except UnstorableStateError as error:
            return str(error)
        return len(json.dumps(tree)) + sum(entry.nbytes for entry in table.entries())

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: str) -> Phase:
        """The phase that `state_dict` described, which was not lost; what was on a device goes to `device`."""
        batches: Iterable[Any]
        if "minibatches" in state:
            kept = dict(state["minibatches"])
            kept["columns"] = _to_device(kept["columns"], state["on_device"], device)
            batches = Minibatches.from_state_dict(kept)
        else:
            # In the places of those that were trained stands nothing: they are not looked at.
            batches = [None] * state["trained"] + _to_device(state["batches"], state["on_device"], device)
        place = {name: state[name] for name in ("update_epochs", "update_epoch", "minibatch_index")}
        return cls(batches, **place, is_within_pass=True)


def _on_device(batches: Any) -> list[bool]:
    """Of each tensor, in the order of a walk, whether it is elsewhere than on the CPU; empty where none is."""
    flags: list[bool] = []
    apply_to_collection(batches, torch.Tensor, lambda tensor: flags.append(tensor.device.type != "cpu"))
    return flags if any(flags) else []


def _to_device(batches: Any, on_device: list[bool], device: str) -> Any:
    if not on_device:
        return batches
    flags = iter(on_device)
    return apply_to_collection(batches, torch.Tensor, lambda tensor: tensor.to(device) if next(flags) else tensor)
