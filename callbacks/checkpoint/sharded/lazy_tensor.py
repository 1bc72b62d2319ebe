"""Sharded tensors that read like whole ones and are put together only when their values are used.

While a checkpoint is saved or loaded, most code hands tensors on without looking at them: a trainer's ``state_dict``
returns what its modules gave it, its ``load_state_dict`` passes it back. A `WholeTensor` has the shape of the whole
tensor and lets each rank save, or read, its own slice of it. Any other use puts the values together, once: from the
other ranks while saving (so all ranks must use it alike), from the files while loading.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["HeldSlices", "Slices", "WholeTensor", "keep_sharded", "unsharded", "whole"]

Change = Callable[[torch.Tensor], torch.Tensor]
"""What is done to each element alone, so that it can be done to a slice: a copy, another device or type."""
Meet = Callable[[str], None]
"""Waits until all ranks are about to gather the same tensor, which it names."""


class Slices(Protocol):
    """Where the values of a `WholeTensor` are: with the ranks of a run that saves, or in the files of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the whole tensor will be."""
        ...

    def whole(self) -> torch.Tensor:
        """The whole tensor, as a plain one."""
        ...

    def like(self, parameter: DTensor) -> DTensor:
        """The same values sharded as `parameter` is, which has the same shape."""
        ...

    def changed(self, change: Change) -> Slices:
        """The same slices after `change`."""
        ...


class WholeTensor(torch.Tensor):
    """A tensor whose slices are elsewhere until its values are used."""

    slices: Slices
    _plain: torch.Tensor | None
    _plain_version: int

    @staticmethod
    def __new__(cls: type[WholeTensor], slices: Slices) -> WholeTensor:
        """A tensor with the shape, type and device of the whole, and no memory."""
        made: WholeTensor = torch.Tensor._make_wrapper_subclass(
            cls, slices.shape, dtype=slices.dtype, device=slices.device
        )
        return made

    def __init__(self, slices: Slices) -> None:
        self.slices = slices
        self._plain = None
        self._plain_version = 0

    @property
    def is_as_saved(self) -> bool:
        """Whether the slices still have the values: they were not changed after they were put together."""
        return self._plain is None or self._plain._version == self._plain_version

    def put_together(self) -> torch.Tensor:
        """The values as a plain tensor; the same one each time, so that a change in place is not lost."""
        if self._plain is None:
            self._plain = self.slices.whole().detach()
            self._plain_version = self._plain._version
        return self._plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WholeTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func in _ELEMENT_BY_ELEMENT and isinstance(first, WholeTensor) and first._plain is None:
            rest = [item for item in tree_flatten((args[1:], kwargs))[0] if isinstance(item, torch.Tensor)]
            if not rest:
                return WholeTensor(first.slices.changed(lambda tensor: func(tensor, *args[1:], **kwargs)))
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with plain tensors, or, beside a sharded tensor of the same shape, with slices like its."""
    sharded = {tuple(item.shape): item for item in tree_flatten((args, kwargs))[0] if isinstance(item, DTensor)}

    def usable(item: Any) -> Any:
        if not isinstance(item, WholeTensor):
            return item
        partner = sharded.get(tuple(item.shape)) if item.is_as_saved else None
        return item.put_together() if partner is None else item.slices.like(partner)

    args, kwargs = tree_map(usable, (args, kwargs))
    return func(*args, **kwargs)


_T = torch.Tensor
_ASKS_NO_VALUE = {
    *(
        getattr(_T, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf")
    ),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse", "is_quantized")),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.__hash__, _T.__len__),
    *(_T.is_floating_point, _T.is_complex, torch.is_floating_point, torch.is_complex),
}
_ELEMENT_BY_ELEMENT = {
    *(_T.detach, _T.clone, _T.contiguous, _T.cpu, _T.cuda, _T.to, _T.__deepcopy__, torch.clone, torch.detach),
    *(_T.float, _T.double, _T.half, _T.bfloat16),
    _T.data.__get__,  # type: ignore[attr-defined]
}


_meet: contextvars.ContextVar[Meet | None] = contextvars.ContextVar("genlight_meet", default=None)


@contextlib.contextmanager
def keep_sharded(meet: Meet) -> Iterator[None]:
    """While this is open, `whole` gives a `WholeTensor` and gathers nothing.

    Args:
        meet: Called before values are gathered after all; raises where the other ranks do not come to gather them.
    """
    token = _meet.set(meet)
    try:
        yield
    finally:
        _meet.reset(token)


def whole(value: Any) -> Any:
    """The whole tensor where `value` is sharded, else `value` itself; gathered at once unless within `keep_sharded`."""
    if not isinstance(value, DTensor):
        return value
    meet = _meet.get()
    return value.full_tensor() if meet is None else WholeTensor(HeldSlices(value, meet=meet))


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain one; gathered where it has to be."""
    if isinstance(tensor, WholeTensor):
        return tensor.put_together()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class HeldSlices:
    """Slices that the ranks of this run hold in memory."""

    def __init__(self, tensor: DTensor, local: torch.Tensor | None = None, meet: Meet = lambda _: None) -> None:
        self.tensor = cast("DTensor", tensor.detach())
        """How it is sharded."""
        self.local = self.tensor.to_local() if local is None else local
        """The slice of this rank."""
        self._meet = meet

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's slice is."""
        return self.local.device

    def whole(self) -> torch.Tensor:
        """Gathered from all ranks, which all must ask."""
        self._meet(f"a sharded tensor of shape {self.shape} and type {self.dtype}")
        gathered = self._as_sharded().full_tensor().to(self.local.device)
        # One rank alone would get its own slice, whose values belong to the training.
        return gathered.clone() if gathered.data_ptr() == self.local.data_ptr() else gathered

    def like(self, parameter: DTensor) -> DTensor:
        """The same values, sharded as `parameter` is."""
        return self._as_sharded().redistribute(parameter.device_mesh, parameter.placements)

    def changed(self, change: Change) -> HeldSlices:
        """The same slices after `change` of this rank's."""
        return HeldSlices(self.tensor, change(self.local), self._meet)

    def _as_sharded(self) -> DTensor:
        tensor = self.tensor
        return DTensor.from_local(
            self.local.to(tensor.device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
