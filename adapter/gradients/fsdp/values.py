"""What a trainer computes with sharded parameters and gradients themselves, so that it is what whole ones would give.

Left to torch, a norm reads as this rank's share of it, noise from equal seeds is equal in every shard, a maximum over
an empty shard fails, and a plain tensor of the same shape is refused. While this is held::

    float(norm), norm.item(), f"{norm:.3f}"    of the whole value
    p.normal_(), torch.randn_like(p.grad)      drawn for the whole tensor, of which each rank keeps its slice
    p.grad.abs().max() with an empty shard     of the whole tensor
    p.grad += noise, p.copy_(kept)             the plain tensor counts as whole: each rank takes its slice
    hidden @ p.T, linear(hidden, p)            with the whole weights, likewise
    kept.copy_(p), kept.lerp_(p, 0.1)          of the whole value
    loss + penalty, hidden * p + q             of the whole value; gradients are the mean of those of the ranks

All ranks have to do it, as they do all that talks to the others.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from ....callbacks.checkpoint.sharded.boxes import sharded_like
from ...contract.exceptions import ContractError
from ..torch_internals import TensorBase, without_torch_function_of_subclasses
from . import hooks as shard_hooks, writes as shard_writes

__all__ = ["announce", "hold", "number", "release"]

_READS = frozenset({"item", "tolist", "numpy", "__array__", "__format__"})
_READS |= {"__float__", "__int__", "__bool__", "__index__", "__complex__", "is_nonzero"}
_RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_RANDOM |= {"random_"}
_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like", "bernoulli"})
_EXTREMES = frozenset({"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "norm", "vector_norm"})
_EXTREMES |= {"linalg_vector_norm", "quantile"}
_ELEMENTWISE = frozenset({"add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "pow", "copy", "lerp", "where"})
_ELEMENTWISE |= {
    "addcmul",
    "addcdiv",
    "maximum",
    "minimum",
    "clamp",
    "clip",
    "masked_fill",
    "fmod",
    "remainder",
    "sign",
}
_ELEMENTWISE |= {"eq", "ne", "lt", "gt", "le", "ge", "multiply", "subtract", "divide", "fmax", "fmin", "mse_loss"}
_ELEMENTWISE |= {"allclose", "isclose", "equal", "logical_and", "logical_or", "floor_divide", "copysign", "hypot"}
_ELEMENTWISE |= {"dot", "dist"}

_OF_GRAPHS = frozenset({"grad", "backward"})
_SCALES = frozenset(
    {"mul", "__mul__", "__rmul__", "multiply", "div", "divide", "true_divide", "truediv", "__truediv__"}
)
"""What takes a factor, which may be a number of this rank's rows alone."""

_NOT_IN_PLACE = "in-place operations that require placement changes"
"""torch's words, on every rank alike and before anything is changed."""

_PRODUCTS = frozenset(
    {"linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv"}
)
_PRODUCTS |= {"baddbmm", "einsum", "tensordot", "inner", "outer", "embedding", "conv1d", "conv2d", "conv3d", "cdist"}
"""What makes new memory of plain and sharded tensors, in which nobody could want to write to a shard."""

_SETTERS: dict[Any, str] = {vars(TensorBase)[name].__set__: name for name in ("data", "grad")}
_TOGETHER = _READS | _EXTREMES | _PRODUCTS | {"full_tensor", "svd"}
_GET_GRAD, _GET_DATA = (vars(TensorBase)[name].__get__ for name in ("grad", "data"))
_HOOKED = {"register_hook": shard_hooks.add, "register_post_accumulate_grad_hook": shard_hooks.add_after}
_TORCHS = DTensor.__dict__["__torch_function__"]
_to_local = DTensor.to_local

_lock = threading.Lock()
_holders: list[tuple[object, Callable[[str], None]]] = []
_last_parameter = ""
"""Of which parameter a gradient was read last: two of one shape are nothing that ranks could share."""


def hold(holder: object, agree: Callable[[str], None] = lambda _: None) -> None:
    """Have operations on sharded tensors behave as this module's text says, until `release`.

    Args:
        holder: Who asks for it.
        agree: Called with what all ranks are about to do.
    """
    with _lock:
        _holders.append((holder, agree))
        if len(_holders) == 1:
            DTensor.__torch_function__ = classmethod(_function)  # type: ignore[assignment]
            DTensor.to_local = _watched_to_local  # type: ignore[method-assign]
            shard_writes.count(True)


def release(holder: object) -> None:
    """Undo one `hold`; after the last, sharded tensors are torch's own."""
    with _lock:
        _holders[:] = [held for held in _holders if held[0] is not holder]
        if not _holders:
            DTensor.__torch_function__ = _TORCHS  # type: ignore[method-assign]
            DTensor.to_local = _to_local  # type: ignore[method-assign]
            shard_writes.count(False)


_numbers: Any = WeakIdKeyDictionary()
_given_data: Any = WeakIdKeyDictionary()
"""By parameter, what was given out as its ``.data``, which keeps its values when that becomes another tensor."""


def number(parameters: Iterable[Tensor]) -> None:
    """Tell `parameters` apart by their order, which is equal on all ranks."""
    for index, parameter in enumerate(parameters):
        _numbers[parameter] = f", for parameter {index} of the sharded ones"


def announce(name: str, tensor: Any) -> None:
    """Say that this rank is about to compute `name` of `tensor`, as all ranks have to; to nobody outside of a step."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
    for _, agree in _holders[-1:]:
        agree(f"compute `{name}` of a sharded tensor of shape {shape}{_last_parameter}")


@functools.wraps(_to_local)
def _watched_to_local(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    shard_writes.changed()
    return _to_local(self, *args, **kwargs)


def _function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG001  # torch's
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs
    writes |= name in ("__set__", "__setitem__")
    shard_writes.settle()
    if writes:
        shard_writes.changed()
    with without_torch_function_of_subclasses():
        return _call(func, name, args, kwargs)


def _call(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    first = args[0] if args else None
    if name == "__set__":
        return _set(func, args)
    if isinstance(first, DTensor) and first.is_leaf and first.requires_grad and name in _HOOKED:
        return _HOOKED[name](first, *args[1:])
    if name == "__get__":
        return _got(func, first)
    if name in _TOGETHER:
        announce(name, first)
    if name in _READS:
        return func(*_whole(args), **kwargs)
    if name in _RANDOM and isinstance(first, DTensor):
        return _written(first, lambda whole: getattr(whole, name)(*args[1:], **kwargs))
    if getattr(func, "__module__", None) == "torch.nn.init":
        named = {key: value for key, value in kwargs.items() if key != "tensor"}
        target = kwargs.get("tensor", first)
        if isinstance(target, DTensor):
            return _written(target, lambda whole: func(whole, *args[1:], **named))
    if name in _RANDOM_LIKE and isinstance(first, DTensor):
        like = (
            _whole(args)[0] if name == "bernoulli" else torch.empty(first.shape, dtype=first.dtype, device=first.device)
        )
        return sharded_like(func(like, *args[1:], **kwargs), first)
    sharded, plain = _tensors(args, kwargs)
    if name in _EXTREMES and any(_leaves_a_rank_empty(t) for t in sharded):
        return func(*(_gathered(a) for a in args), **{k: _gathered(v) for k, v in kwargs.items()})
    if name.endswith("_") and len(sharded) > 1 and isinstance(first, DTensor):
        args = [first, *(_placed(a, first) for a in args[1:])]
    if name in _SCALES and torch.is_grad_enabled() and any(t.requires_grad for t in sharded):
        return func(*map(_gathered, args), **kwargs)
    try:
        return _mixed(func, name, args, kwargs, sharded) if plain else func(*args, **kwargs)
    except RuntimeError as error:
        is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (*sharded, *plain))
        if _NOT_IN_PLACE not in str(error) or not isinstance(first, DTensor) or is_recorded:
            raise
    return _written_in_place(func, first, args, kwargs)


def _written_in_place(func: Any, first: DTensor, args: Any, kwargs: Mapping[str, Any]) -> DTensor:
    """`first` after `func` changed the whole of it: for example with a factor for each row, where a rank has no row."""
    whole = _whole(args)
    func(*whole, **{k: _whole((v,))[0] for k, v in kwargs.items()})
    first.copy_(sharded_like(whole[0], first))
    return first


def _mixed(func: Any, name: str, args: Any, kwargs: Mapping[str, Any], sharded: list[DTensor]) -> Any:
    if _is_written_whole(name, args, kwargs):
        announce(name, sharded[0])
        return func(*_whole(args), **{k: _whole((v,))[0] for k, v in kwargs.items()})
    needs_the_shards = _is_in_place(name) or "out" in kwargs or name in _OF_GRAPHS
    # A plain tensor may be of this rank's rows alone, so what is differentiated takes the mean over the ranks.
    is_recorded = not needs_the_shards and torch.is_grad_enabled() and any(t.requires_grad for t in sharded)
    if is_recorded or name in _PRODUCTS:
        return func(*(_gathered(a) for a in args), **{k: _gathered(v) for k, v in kwargs.items()})
    if all(t.dim() == 0 for t in sharded):
        return func(*_whole(args), **{k: _whole((v,))[0] for k, v in kwargs.items()})
    base = name.removeprefix("_foreach_").strip("_")
    if base not in _ELEMENTWISE and base[:1] in ("i", "r"):
        base = base[1:]
    if base not in _ELEMENTWISE:
        return func(*args, **kwargs)

    def place(value: Any, like: Any) -> Any:
        if isinstance(value, list | tuple):
            others = like if isinstance(like, list | tuple) and len(like) == len(value) else [like] * len(value)
            return type(value)(place(v, o) for v, o in zip(value, others, strict=True))
        is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0
        return _as_sharded(value, like) if is_plain and isinstance(like, DTensor) else value

    like: Any = next((a for a in args if isinstance(a, DTensor) and a.dim() > 0), None)
    if like is None:
        like = next(
            (a for a in args if isinstance(a, list | tuple) and any(isinstance(t, DTensor) for t in a)), sharded[0]
        )
    return func(*(place(a, like) for a in args), **{k: place(v, like) for k, v in kwargs.items()})


class _MeanOfRanks(torch.autograd.Function):
    """Nothing, but that the sum over the ranks which follows in backward is their mean."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None


def _gathered(value: Any) -> Any:
    """The whole of what is sharded in `value`, also in a graph: the gradients of all ranks go to its parts."""
    if isinstance(value, list | tuple):
        return type(value)(_gathered(v) for v in value)
    if not isinstance(value, DTensor):
        return value
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value.full_tensor()
    whole = value.full_tensor(grad_placements=[Partial()] * value.device_mesh.ndim)
    return _MeanOfRanks.apply(whole, value.device_mesh.size())  # type: ignore[no-untyped-call]


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _is_written_whole(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the result goes into a plain tensor, where a slice of it would be lost."""
    target = kwargs.get("out", args[0] if _is_in_place(name) and args else None)
    targets = target if isinstance(target, list | tuple) else [target]
    return all(isinstance(t, Tensor) and not isinstance(t, DTensor) for t in targets)


def _placed(value: Any, like: DTensor) -> Any:
    """What goes into a shard in place, such as the result of a product, sharded as that is."""
    fits = isinstance(value, DTensor) and value.shape == like.shape and value.placements != like.placements
    return value.redistribute(placements=like.placements) if fits else value


def _as_sharded(value: Tensor, like: DTensor) -> Tensor:
    """A tensor that every rank holds whole, as one that goes with `like`."""
    if value.requires_grad and torch.is_grad_enabled():
        return value
    if value.shape == like.shape:
        return sharded_like(value, like)
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _got(func: Any, tensor: Any) -> Any:
    """An attribute of a sharded tensor."""
    global _last_parameter
    if func == _GET_GRAD and isinstance(tensor, DTensor):
        _last_parameter = _numbers.get(tensor, "")
    found = func(tensor)
    if func == _GET_DATA and isinstance(found, DTensor) and tensor in _numbers:
        _given_data[tensor] = [*filter(_is_alive, _given_data.get(tensor, ())), weakref.ref(found)]
    return found


def _is_alive(reference: weakref.ref[Any]) -> bool:
    return reference() is not None


def _set(func: Any, args: Any) -> Any:
    """``p.data = whole`` and ``p.grad = whole``; a gradient of this rank is averaged with those of the others."""
    target, value = args
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or func not in _SETTERS:
        return func(*args)
    if value.shape != target.shape:
        raise ContractError(
            f"A tensor of shape {tuple(value.shape)} is written to `.{_SETTERS[func]}` of a sharded parameter of shape "
            f"{tuple(target.shape)}. Assign one of the parameter's full shape, or use ddp."
        )
    with torch.no_grad():
        if _SETTERS[func] == "data":  # torch would take over all but the shard
            for given in _given_data.pop(target, ()):
                if (kept := given()) is not None and kept is not value:  # two that are swapped, say
                    kept._local_tensor = kept._local_tensor.clone()
            return target.detach().copy_(value if isinstance(value, DTensor) else sharded_like(value, target))
        if isinstance(value, DTensor):
            return func(target, value.redistribute(placements=target.placements))
        group = target.device_mesh.get_group()
        mean = value.detach().clone().div_(dist.get_world_size(group))
        dist.all_reduce(mean, group=group)
        return func(target, sharded_like(mean, target))


def _written(target: DTensor, write: Callable[[Tensor], Any]) -> DTensor:
    """`target` after `write` changed the whole of it, which each rank does alike."""
    with torch.no_grad():
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        write(whole)
        target.detach().copy_(sharded_like(whole, target))
    return target


def _whole(values: Iterable[Any]) -> list[Any]:
    return [
        v.full_tensor()
        if isinstance(v, DTensor)
        else type(v)(_whole(v))
        if type(v) in (list, tuple) and any(isinstance(t, DTensor) for t in v)
        else v
        for v in values
    ]


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> tuple[list[DTensor], list[Tensor]]:
    """Sharded and plain tensors among arguments, and in the lists among them."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value) if isinstance(value, list | tuple) else flat.append(value)
    sharded = [v for v in flat if isinstance(v, DTensor)]
    return sharded, [v for v in flat if isinstance(v, Tensor) and not isinstance(v, DTensor)]


def _leaves_a_rank_empty(tensor: DTensor) -> bool:
    for place, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(place, Shard):
            rows = tensor.shape[place.dim]
            if -(-rows // ranks) * (ranks - 1) >= rows:
                return True
    return False
