"""Batches on their way to an accelerator: in pinned memory, and copied while the step before trains.

A module of its own because it imports torch, which a feed of record batches does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..plumbing.devices import accelerator

__all__ = ["copied_ahead", "pinned"]


def pinned(batch: Any) -> Any:
    """`batch` with its tensors in pinned memory, from which ``.to(device, non_blocking=True)`` does not wait.

    Tensors of a device, and those that are pinned or not strided, stay as they are; so does everything else.
    """
    return apply_to_collection(batch, torch.Tensor, _pinned)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def copied_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """`batches` on the current accelerator, each copied while the step before it trains; without one, as they are.

    A stream of its own copies; the stream that trains waits for the copy of a batch before it uses it, the host never.
    One batch more than was handed out has been taken from `batches` and lies on the device.
    """
    kind = accelerator()
    if kind is None:
        yield from batches
        return
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    stream = torch.Stream(device)
    waiting: _Copy | None = None
    for batch in batches:
        source = pinned(batch)
        training = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            copy = apply_to_collection(source, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))
            arrives = torch.Event(device)
            arrives.record(stream)
        finally:
            torch.accelerator.set_stream(training)
        if waiting is not None:
            yield waiting.arrived(device)
        waiting = _Copy(copy, arrives, source)
    if waiting is not None:
        yield waiting.arrived(device)


@dataclass(frozen=True)
class _Copy:
    """A batch on its way to the device."""

    batch: Any
    arrives: torch.Event
    source: Any
    """On the host; it must live until the copy was handed out."""

    def arrived(self, device: torch.device) -> Any:
        """The batch, for what the training stream does from now on."""
        training = torch.accelerator.current_stream(device)
        training.wait_event(self.arrives)
        # Else its memory could be given to the next copy while a kernel of the training stream still reads it.
        apply_to_collection(self.batch, torch.Tensor, lambda tensor: tensor.record_stream(training))
        return self.batch
