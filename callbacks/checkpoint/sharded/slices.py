"""Sharded tensors: find the part that a rank holds, and read any part from the slices that ranks saved.

While a checkpoint is saved or loaded, most code passes tensors on without using their values: a trainer's
``state_dict`` returns its modules' state, and its ``load_state_dict`` passes it back. In a save, these are the sharded
tensors themselves, and each rank saves its slice. In a load, each is a `WholeTensor` with the shape of the complete
tensor. If code combines a `WholeTensor` with a sharded tensor of that shape, only this rank's slice is read. Any other
use reads all slices, once. Only the slices that are read are proven.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_map

from ..format.slice_index import Box, SlicedTensor


def view_of_part(part: Box, tensor: torch.Tensor, of: Box) -> torch.Tensor:
    """Return the view of `part` in `tensor`, which fills the box `of`; both boxes are within the complete tensor."""
    for dimension, (begin, size) in enumerate(zip(part.offset, part.shape, strict=True)):
        tensor = tensor.narrow(dimension, begin - of.offset[dimension], size)
    return tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the ranks hold parts of `tensor`, so that each rank can save its own part."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return any(type(place) is Shard for place in placements) and all(
        type(place) in (Shard, Replicate) for place in placements
    )


def is_saved_by_this_rank(sharded: DTensor) -> bool:
    """Whether this rank has a non-empty part of `sharded` that is not a copy of another rank's."""
    coordinate = sharded.device_mesh.get_coordinate()
    is_first_copy = coordinate is not None and all(
        at == 0 for at, place in zip(coordinate, sharded.placements, strict=True) if type(place) is Replicate
    )
    return is_first_copy and sharded.to_local().numel() > 0


def slice_of(sharded: DTensor) -> Box:
    """Return the position of this rank's part of `sharded`."""
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return Box(tuple(offset), tuple(shape))


def sharded_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return `value` sharded like `parameter`, a tensor of the same shape; each rank takes its own slice.

    If the values are still in a file, only that slice is read, if possible.
    """
    return shard_over(value, parameter.device_mesh, parameter.placements, parameter.device, parameter.stride())


def shard_over(
    value: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    device: torch.device,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """Shard `value` over `mesh`; the result has `stride`, by default that of a contiguous tensor."""
    if any(type(place) not in (Shard, Replicate) for place in placements):
        return distribute_tensor(unsharded(value).to(device), mesh, placements)
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    part = Box(tuple(offset), tuple(shape))
    if isinstance(value, WholeTensor) and value.plain is None and value.sharded is None:
        local = value.slices.read(part)
    else:
        value = unsharded(value)
        local = view_of_part(part, value, of=Box((0,) * value.dim(), tuple(value.shape))).clone()
    return DTensor.from_local(
        local.to(device),
        mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=stride or torch.empty(value.shape, device="meta").stride(),
    )


class SavedSlices(Protocol):
    """The slices of a sharded tensor in the files of a checkpoint."""

    @property
    def tensor(self) -> SlicedTensor:
        """Description of the complete tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...

    def whole(self) -> torch.Tensor:
        """Return the complete tensor."""
        ...

    def read(self, part: Box) -> torch.Tensor:
        """Return the values of one part."""
        ...


class WholeTensor(torch.Tensor):
    """A tensor whose slices stay in the files of a checkpoint until its values are used."""

    slices: SavedSlices
    plain: torch.Tensor | None
    """All values, after their first use."""
    sharded: DTensor | None
    """The values after an operation on shards has written to this tensor; `plain` is None from then on."""

    @staticmethod
    def __new__(cls: type[WholeTensor], slices: SavedSlices) -> WholeTensor:
        """Return a tensor with the shape, type and device of the complete one, and no memory."""
        made: WholeTensor = torch.Tensor._make_wrapper_subclass(
            cls, slices.tensor.shape, dtype=slices.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, slices: SavedSlices) -> None:
        self.slices = slices
        self.plain = self.sharded = None

    def put_together(self) -> torch.Tensor:
        """Return the values as a plain tensor; the same one each time, so that a change in place is not lost."""
        if self.sharded is not None:
            return self.sharded.full_tensor()
        if self.plain is None:
            self.plain = self.slices.whole()
        return self.plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WholeTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with plain tensors, or with slices if an argument is a sharded tensor of the same shape."""
    sharded = {tuple(item.shape): item for item in tree_flatten((args, kwargs))[0] if isinstance(item, DTensor)}
    writes = getattr(func, "__name__", "").removesuffix(".default").endswith("_")
    targets = {id(item) for item in tree_flatten(args[:1])[0]} if writes else set()

    def usable(item: Any) -> Any:
        if not isinstance(item, WholeTensor):
            return item
        if item.sharded is not None:
            return item.sharded
        partner = sharded.get(tuple(item.shape))
        if partner is None:
            return item.put_together()
        value = sharded_like(item, partner)
        if id(item) in targets:  # a later use must see the written values
            item.sharded, item.plain = value, None
        return value

    args, kwargs = tree_map(usable, (args, kwargs))
    return func(*args, **kwargs)


_T = torch.Tensor
_FACTS = ["shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf"]
_FACTS += ["is_cuda", "is_cpu", "is_meta", "is_nested", "is_sparse", "is_quantized"]
_ASKS_NO_VALUE = {
    *(getattr(_T, name).__get__ for name in _FACTS),
    *(_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.__hash__, _T.__len__),
    *(_T.is_floating_point, _T.is_complex, torch.is_floating_point, torch.is_complex),
}

_keeps_sharded: contextvars.ContextVar[bool] = contextvars.ContextVar("genlight_keeps_sharded", default=False)


@contextlib.contextmanager
def keep_sharded() -> Iterator[None]:
    """Keep `whole` from gathering tensors inside this context."""
    token = _keeps_sharded.set(True)
    try:
        yield
    finally:
        _keeps_sharded.reset(token)


def whole(value: Any) -> Any:
    """Return the complete tensor if `value` is sharded, otherwise `value`; within `keep_sharded` always `value`."""
    if isinstance(value, WholeTensor) and value.sharded is not None:
        value = value.sharded
    return value.full_tensor() if isinstance(value, DTensor) and not _keeps_sharded.get() else value


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as a plain one, gathered if necessary."""
    if isinstance(tensor, WholeTensor):
        return tensor.put_together()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
