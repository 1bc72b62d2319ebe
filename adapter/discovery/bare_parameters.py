"""A module for trained tensors that belong to no module: it moves and saves them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override


class BareParameters(nn.Module):
    """Holds tensors such as SAC's ``log_alpha`` for device moves, casts and state dicts.

    They are buffers, but stay the same objects: torch would replace a moved buffer by a new tensor, while the trainer
    and its optimizer would keep the old one.

    Args:
        tensors: The tensors, by their names in the state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def named_bare_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors. A checkpoint holds their gradients within an accumulation window, as for parameters."""
        yield from self.named_buffers()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with torch.no_grad():
            for tensor in self.buffers():
                tensor.data = fn(tensor.data)
                if tensor.grad is not None:
                    tensor.grad.data = fn(tensor.grad.data)
        return self
