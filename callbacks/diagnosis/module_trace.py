"""Which module was the first to give a value that is not finite, in a forward or in a backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .contained import contained

__all__ = ["ModuleTrace"]


class ModuleTrace:
    """Watches the outputs of all modules without children, and the gradients that come back to these outputs.

    Each is one reduction on its device, which nothing waits for. The gradient at an output comes out of the backward
    of what follows: where it is the first that is not finite, the module that was passed just before is named.

    Args:
        module: Whose modules are watched, by their names in it.
        failures: Takes what goes wrong within a step.
    """

    def __init__(self, module: torch.nn.Module, failures: list[Exception]) -> None:
        self.failures = failures
        self.names = [name for name, part in module.named_modules() if name and not any(part.children())]
        self._modules = dict(module.named_modules())
        self._handles: list[RemovableHandle] = []
        self._forward: list[tuple[int, torch.Tensor]] = []
        self._backward: list[tuple[int, torch.Tensor]] = []

    def attach(self) -> None:
        """Watch from now on."""
        if not self._handles:
            for index, name in enumerate(self.names):
                hook = _ForwardHook(index, self._forward, self._backward, self.failures)
                self._handles.append(self._modules[name].register_forward_hook(hook))

    def detach(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def origins(self, device: torch.device) -> torch.Tensor:
        """Two numbers for what was seen since the last call, on `device`; nothing waits for it.

        The index in `names` of the first module whose output, and of that whose backward, was not finite; -1 for a
        backward before that of any module; ``inf`` where all was finite.
        """
        forward, backward = _first_bad(self._forward, device), _first_bad(self._backward, device, before=True)
        self._forward.clear()
        self._backward.clear()
        return torch.stack([forward, backward])

    def name_of(self, index: int) -> str:
        """The module that an index of `origins` stands for."""
        return "the loss" if index < 0 else self.names[index]


class _ForwardHook:
    def __init__(
        self,
        index: int,
        forward: list[tuple[int, torch.Tensor]],
        backward: list[tuple[int, torch.Tensor]],
        failures: list[Exception],
    ) -> None:
        self._index, self._forward, self._backward, self.failures = index, forward, backward, failures

    @contained
    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():  # an evaluation, or the first pass of a checkpointed one
            return
        for tensor in _floating(output):
            self._forward.append((self._index, _largest(tensor)))
            if tensor.requires_grad:
                tensor.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    @contained
    def _note_gradient(self, gradient: torch.Tensor) -> None:
        self._backward.append((self._index, _largest(gradient)))


def _floating(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.numel() and output.layout == torch.strided:
            yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _floating(part)
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _floating(part)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, nan where there is one; a sum of squares could overflow."""
    largest: torch.Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf")).float()
    return largest


def _first_bad(seen: list[tuple[int, torch.Tensor]], device: torch.device, *, before: bool = False) -> torch.Tensor:
    """Index of the first that is not finite, or of the one `before` it."""
    if not seen:
        return torch.tensor(float("inf"), dtype=torch.float64, device=device)
    bad = ~torch.isfinite(torch.stack([value.to(device, non_blocking=True) for _, value in seen]))
    indices = [index for index, _ in seen]
    named = torch.tensor([-1, *indices[:-1]] if before else indices, dtype=torch.float64, device=device)
    return torch.where(bad.any(), named[bad.to(torch.int8).argmax()], float("inf"))
