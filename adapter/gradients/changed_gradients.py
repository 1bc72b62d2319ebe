"""Warns of a trainer that clips gradients between two backward calls of one update, if they are means over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from .call_site import users_line
from .step_part import BackwardCall, StepPart
from .torch_hooks import read_gradient
from .torch_internals import without_torch_function_of_subclasses

log = logging.getLogger(__name__)

_CHANGED = (
    "Gradients are changed between two backward calls of one update, before %s. They are means over the ranks there, "
    "so a bound (clip_grad_norm_ of each row or microbatch, as in DP-SGD) holds for that mean, and not for the "
    "gradients of each rank's rows. To bound those, use `strategy: ddp`, compute the gradients of rows by "
    "torch.autograd.grad or torch.func, which average nothing, and write the sum of the bounded gradients to `.grad` "
    "before the update; or use one device. A factor that does not depend on the gradients is correct."
)
WATCHED_UPDATES = 3
"""Number of first updates in which changes are detected; each check goes through all parameters."""

_Identity = tuple[Tensor, tuple[int, float]]
"""A gradient, its version, and the norm of this rank's part if it is sharded, otherwise 0.

Torch does not count as a write what a backward call adds to a shard, so its version is not enough."""


class ChangedGradients(StepPart):
    """Warns if a trainer changes a gradient and another backward call of the same update adds to it.

    Scaling and clipping cannot be told apart; setting a gradient to zero can.

    Args:
        parameters: Returns the parameters that optimizers hold.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._updates = 0
        self._left: dict[int, tuple[Tensor, _Identity]] = {}
        """Parameters and their gradients after genlight or torch last wrote them, by id of the parameter."""
        self._changed: dict[int, tuple[Tensor, _Identity | None]] = {}
        """Parameters whose gradient the trainer has changed, and that gradient before the running backward call."""

    @override
    def begin(self, step: int) -> None:
        self.look()

    def look(self) -> None:
        """Remember all gradients, at a point before the trainer can change them."""
        pairs = ((p, _identity(p)) for p in (self._parameters() if self._updates < WATCHED_UPDATES else ()))
        self._left = {id(p): (p, identity) for p, identity in pairs if identity is not None}

    @override
    def before_backward(self, call: BackwardCall) -> None:
        for key, (parameter, (gradient, version)) in self._left.items():
            now, version_now = _identity(parameter), _version(gradient)
            was_replaced = now is not None and now[0] is not gradient and bool(_local(now[0]).any())
            was_zeroed = version_now[0] == version[0] + 1 and not _local(gradient).any()
            if was_replaced or (version_now != version and not was_zeroed):
                self._changed[key] = (parameter, None)
        self._left.clear()
        self._changed = {key: (p, _identity(p)) for key, (p, _) in self._changed.items()}

    @override
    def after_backward(self) -> None:
        if any(not _is_same(_identity(p), before) for p, before in self._changed.values()):
            self._updates = WATCHED_UPDATES
            self._changed.clear()
            log.warning(_CHANGED, users_line())
        self.look()

    @override
    def before_update(self, optimizer: Optimizer) -> bool:
        self._updates += 1
        self._left.clear()
        self._changed.clear()
        return True


def _identity(parameter: Tensor) -> _Identity | None:
    with without_torch_function_of_subclasses():
        gradient = read_gradient(parameter)
    return None if gradient is None else (gradient, _version(gradient))


def _version(gradient: Tensor) -> tuple[int, float]:
    norm = float(torch.linalg.vector_norm(_local(gradient))) if isinstance(gradient, DTensor) else 0.0
    return gradient._version, norm if math.isfinite(norm) else -1.0  # nan, after an overflow, would differ from itself


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient."""
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _is_same(one: _Identity | None, other: _Identity | None) -> bool:
    return one is other if one is None or other is None else one[0] is other[0] and one[1] == other[1]
