"""Trained tensors that belong to no module, as a module that moves and saves them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["BareParameters"]


class BareParameters(nn.Module):
    """Holds tensors such as SAC's ``log_alpha`` for device moves, casts and state dicts.

    As buffers, but torch would replace a buffer by a new tensor when it is moved, and the trainer and its optimizer
    would go on with the old one. Here the tensors stay the objects that they are.

    Args:
        tensors: By the names that they get in the state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def named_bare_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, whose gradients of an open accumulation window belong to a checkpoint as those of parameters."""
        yield from self.named_buffers()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with torch.no_grad():
            for tensor in self.buffers():
                tensor.data = fn(tensor.data)
                if tensor.grad is not None:
                    tensor.grad.data = fn(tensor.grad.data)
        return self
