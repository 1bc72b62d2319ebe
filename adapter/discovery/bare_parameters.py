"""Trained tensors that belong to no module, as a module that moves and saves them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["BareParameters"]


class BareParameters(nn.Module):
    """Holds tensors such as SAC's ``log_alpha`` for device moves, casts and state dicts.

    A buffer would be replaced by a new tensor when it is moved, and the trainer and its optimizer would go on with the
    old one. Here the tensors stay the objects that they are.

    Args:
        tensors: By the names that they get in the state dict.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def named_bare_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, whose gradients of an open accumulation window belong to a checkpoint as those of parameters."""
        yield from self._tensors.items()

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.data = fn(tensor.data)
                if tensor.grad is not None:
                    tensor.grad.data = fn(tensor.grad.data)
        return self

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self._tensors.items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    @override
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, tensor in self._tensors.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.append(prefix + name)
            elif value.shape != tensor.shape:
                error_msgs.append(f"{prefix}{name}: shape {tuple(value.shape)}, expected {tuple(tensor.shape)}")
            else:
                with torch.no_grad():
                    tensor.copy_(value)
        known = {prefix + name for name in self._tensors}
        unexpected_keys += [key for key in state_dict if strict and key.startswith(prefix) and key not in known]
