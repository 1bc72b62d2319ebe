"""Computes with shards in a trainer's step as in torch, except that a rank's part never stands in for the full tensor.

Torch computes norms, averages, clamps and products of shards correctly. But a number read from a norm is only this
rank's share, a maximum fails on a rank with an empty shard, noise is equal in every shard, and a value assigned to
``.data`` is lost. Operations cannot mix shards and full tensors. So, during a training::

    float(norm), norm.item(), f"{norm:.3f}"     read the complete value
    shard.abs().max(), shard.norm()             gather the shard first, with gradients
    rows + penalty, x @ shard.T, full - shard   gather the shard first, with gradients
    full.lerp_(shard), torch.cat([...])         gather the shard first
    shard.add_(full), shard.copy_(full)         use this rank's slice; ranks must pass equal tensors
    _foreach_mul_([shard, full], ...)           run once for the shards and once for the full tensors
    p.data = x                                  give FSDP 2 the new shard
    p.grad = full                               average it over the ranks, as DDP does
    p.add_(product)                             give the product the placement of the shard
    randn_like(p), p.normal_()                  refused
    p.register_hook(...)                        refused

The gradient of a gathered tensor is the mean of the ranks' gradients, as for the parameters of a module in FSDP 2. All
ranks must read or gather a value together. Outside of a step, one rank may act without the others, so only the rules
for ``add_``, ``copy_``, ``p.data`` and ``p.grad`` hold there; ``p.grad = full`` needs all ranks there, too.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ....callbacks.checkpoint.codec.tensors import digest_of_all
from ....callbacks.checkpoint.format.slice_index import Box
from ....callbacks.checkpoint.sharded.slices import WholeTensor, sharded_like, slice_of, view_of_part
from ..rank_agreement import RankAgreement
from ..refused import refusal
from ..torch_internals import TensorBase, without_torch_function_of_subclasses

log = logging.getLogger(__name__)

_READS = frozenset({"item", "tolist", "__format__", "__float__", "__int__", "__bool__", "__index__", "__complex__"})
_READS |= {"is_nonzero", "numpy", "__array__"}
_EXTREMES = frozenset({"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median"})
_EXTREMES |= {"norm", "vector_norm", "linalg_vector_norm"}
_RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_RANDOM |= {"random_", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal"}
_RANDOM |= {"dropout", "feature_dropout", "alpha_dropout", "native_dropout"}
_CONSTANTS = frozenset({"ones_", "zeros_", "constant_"})
"""Functions of torch.nn.init that draw no random numbers and treat all rows alike."""
_ELEMENTWISE = frozenset({"copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_"})
_ELEMENTWISE |= {"clamp_", "clamp_min_", "clamp_max_", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
"""Writes to a shard that need only a slice of each operand."""
_NATIVE = frozenset({"add", "sub", "mul", "div", "neg", "pow", "square", "abs", "sqrt", "sum", "mean", "exp", "log"})
_NATIVE |= {"clone", "to", "__rsub__", "__rdiv__"}
"""Operations on shards whose gradients torch computes correctly."""
_ENGINE = frozenset({"backward", "grad"})
"""Calls of autograd; they need the shards themselves, not gathered tensors."""
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_SETTERS: dict[Any, str] = {vars(TensorBase)[name].__set__: name for name in ("data", "grad")}

_agree: RankAgreement | None = None
"""The agreement of the running step; None outside of one."""
_take_data: Callable[[DTensor], None] | None = None
_is_saving = False
_original = DTensor.__dict__["__torch_function__"]
_stand_ins: dict[int, tuple[DTensor, weakref.ref[Tensor]]] = {}
"""Shards whose ``.data`` was set to a full tensor, and that tensor, by the shard's id.

A write to one of the two does not reach the other.
"""


def hold(take_data: Callable[[DTensor], None] | None = None) -> None:
    """Begin a training: route operations on shards through this module.

    Args:
        take_data: Called with a shard whose local tensor was replaced, so that FSDP 2 gathers the new one.
    """
    global _take_data
    _take_data = take_data
    DTensor.__torch_function__ = classmethod(_dispatch)  # type: ignore[assignment]


def release() -> None:
    """End the training: restore torch's operations on shards."""
    global _take_data
    end_step()
    _take_data = None
    _Gather.count = 0
    _stand_ins.clear()
    DTensor.__torch_function__ = _original  # type: ignore[method-assign]


def begin_step(agree: RankAgreement) -> None:
    """Treat operations on shards as part of a training step from now on; ranks compare them through `agree`."""
    global _agree
    _agree = agree


def end_step() -> None:
    """End the step.

    Raises:
        ContractError: The ``.data`` of a shard is a full tensor, and the step has written to only one of the two.
    """
    global _agree
    was_in_step, _agree = _agree is not None, None
    for shard, _ in list(_stand_ins.values()) if was_in_step else ():
        _check_stand_in(shard)


@contextlib.contextmanager
def whole_numbers() -> Iterator[None]:
    """Within this context, read numbers from full tensors instead of shards, as in a step. Collective.

    The ``state_dict`` of a class needs this: otherwise the sum of a shard would be only this rank's part.
    """
    global _is_saving
    before = DTensor.__dict__["__torch_function__"]
    DTensor.__torch_function__ = classmethod(_dispatch)  # type: ignore[assignment]
    _is_saving = True
    try:
        yield
    finally:
        _is_saving = False
        DTensor.__torch_function__ = before  # type: ignore[method-assign]


def gathers_behind(outputs: Iterable[Tensor]) -> list[str]:
    """Return the operations in the graph of `outputs` that gathered shards; backward sends gradients for each."""
    if not _Gather.count:
        return []
    names: list[str] = []
    nodes = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := getattr(node, "gathers_for", None)) is not None:
            names.append(name)
        nodes += [following for following, _ in node.next_functions]
    return names


def is_in_step() -> bool:
    """Whether a training step is running."""
    return _agree is not None


def _dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG001  # torch's
    """Replace ``DTensor.__torch_function__``; the docstring of the module has the rules."""
    if WholeTensor in types:  # the handler of `WholeTensor` calls this function again with the complete tensor
        return NotImplemented
    kwargs = kwargs or {}
    name, first = getattr(func, "__name__", ""), args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    with without_torch_function_of_subclasses():
        if _agree is not None and name.startswith("_foreach_"):
            return _run_by_kind(name, func, args, kwargs) if _mixes_in_lists(args) else func(*args, **kwargs)
        if isinstance(first, DTensor):
            if _agree is not None:
                _refuse(func, name, first)
            if name == "__set__" and func in _SETTERS:
                return _assign(func, first, args[1])
            if args and name in _READS and (_agree is not None or _is_saving):
                return func(_gather_shard(name, first), *args[1:], **kwargs)
            if args and _is_in_place_write(name):
                if _agree is not None:
                    _agree.note(f"{name} {tuple(first.shape)}")
                takes_whole = name in _ELEMENTWISE
                args = (first, *(_place_like(other, first, takes_whole=takes_whole) for other in args[1:]))
            if args and _agree is not None and name in _EXTREMES and _leaves_a_rank_empty(first):
                args = (_gather_shard(name, first), *args[1:])
        is_write = (
            name == "__setitem__" or _is_in_place_write(name) or kwargs.get("out") is not None or kwargs.get("inplace")
        )
        if (_agree is None and not _is_saving) or name in _ENGINE or (is_write and isinstance(first, DTensor)):
            return func(*args, **kwargs)  # a write must reach the shard itself: a gathered copy would be dropped
        tensors = list(_leaves((*args, *kwargs.values())))
        if not _mixes(tensors):
            if is_write or not _has_gradient(tensors) or name in _NATIVE:
                return func(*args, **kwargs)
            # For many other operations on shards torch computes no gradients, or wrong ones (``mse_loss``). So torch's
            # result is used only if it is not part of autograd's graph; otherwise the shards are gathered first.
            with contextlib.suppress(Exception):
                result = func(*args, **kwargs)
                if not any(tensor.grad_fn is not None for tensor in _leaves((result,))):
                    return result
        args = tuple(_gather_all(name, arg) for arg in args)
        kwargs = {keyword: _gather_all(name, value) for keyword, value in kwargs.items()}
        return func(*args, **kwargs)


def _refuse(func: Any, name: str, first: DTensor) -> None:
    """Refuse random numbers and hooks of shards."""
    if name in _RANDOM or (getattr(func, "__module__", "") == "torch.nn.init" and name not in _CONSTANTS):
        raise refusal("random", f"`{name}` in `train_step`")
    if name in _HOOKS and first.is_leaf and first.requires_grad:
        raise refusal("hook", f"`{name}` in `train_step`")


def _leaves(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))
        elif isinstance(value, Tensor):
            yield value


def _has_gradient(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _mixes(tensors: Sequence[Tensor]) -> bool:
    """Whether an operation mixes shards with full tensors in a way that torch does not support.

    Torch supports scalars together with shards, but they may differ by rank. So they count as full tensors if one of
    `tensors` requires a gradient.
    """
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    if len(whole) in (0, len(tensors)):
        return False
    return _has_gradient(tensors) or any(tensor.dim() for tensor in whole)


def _gather_all(name: str, value: Any) -> Any:
    """Return `value`, an argument of the operation `name`, with full tensors in place of its shards."""
    if isinstance(value, list | tuple):
        return type(value)(_gather_all(name, each) for each in value) if type(value) in (list, tuple) else value
    return _gather_shard(name, value) if isinstance(value, DTensor) else value


def _mixes_in_lists(args: Iterable[Any]) -> bool:
    kinds = {type(tensor) for value in args if isinstance(value, list | tuple) for tensor in value}
    return DTensor in kinds and len(kinds) > 1 and _mixes(list(_leaves(args)))


def _run_by_kind(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Run one operation on lists twice: for the shards in the first list, and for its other tensors."""
    targets = args[0]
    results: list[Any] = [None] * len(targets)
    for is_shard in (True, False):
        chosen = [index for index, tensor in enumerate(targets) if isinstance(tensor, DTensor) is is_shard]
        if not chosen:
            continue

        def operand(value: Any, target: Tensor) -> Any:
            return _place_like(value, target) if isinstance(target, DTensor) else _gather_all(name, value)

        def part(value: Any, chosen: list[int] = chosen, is_shard: bool = is_shard) -> Any:
            if isinstance(value, list | tuple) and len(value) == len(targets):
                return [operand(value[index], targets[index]) for index in chosen]
            return value if is_shard else _gather_all(name, value)

        partial = func(*map(part, args), **{keyword: part(value) for keyword, value in kwargs.items()})
        for index, result in zip(chosen, partial or (), strict=False):
            results[index] = result
    return None if results[0] is None else results


def _is_in_place_write(name: str) -> bool:
    """Whether the operation `name` changes its first tensor in place."""
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return is_in_place and name != "requires_grad_"


class _Gather(torch.autograd.Function):
    """Gathers a sharded tensor. Its gradient is the mean of the ranks' gradients, as FSDP 2 reduces them."""

    count = 0
    """Number of calls since training began."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, name: str) -> Tensor:
        _Gather.count += 1
        ctx.like, ctx.gathers_for = tensor.detach(), name
        whole: Tensor = tensor.full_tensor()
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        if _agree is not None:
            _agree(f"send gradients of `{ctx.gathers_for}` of a sharded tensor of shape {tuple(ctx.like.shape)}")
        return mean_over_ranks(gradient, ctx.like), None


@torch.no_grad()
def mean_over_ranks(value: Tensor, like: DTensor) -> DTensor:
    """Return the mean of the ranks' tensors, sharded as `like` is."""
    mesh = like.device_mesh
    value = value.to(like.dtype) / mesh.size()
    parts = DTensor.from_local(value, mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=[p if isinstance(p, Shard) else Replicate() for p in like.placements])


def _gather_shard(name: str, tensor: DTensor) -> Tensor:
    """Return the full tensor for the operation `name`, in the graph if it needs a gradient. Collective."""
    if _agree is not None and not all(placement.is_replicate() for placement in tensor.placements):
        _agree(f"compute `{name}` of a sharded tensor of shape {tuple(tensor.shape)}")
    if torch.is_grad_enabled() and tensor.requires_grad and name not in _READS:
        if tensor.is_leaf and not _Gather.count:
            log.warning(
                "`train_step` gathers a sharded parameter of shape %s for `%s`, outside of calls of its module, and "
                "keeps it in memory until backward; if the step calls a part of a module, name it in `units` of "
                "FSDP2Strategy",
                tuple(tensor.shape),
                name,
            )
        return cast("Tensor", _Gather.apply(tensor, name))  # type: ignore[no-untyped-call]
    whole: Tensor = cast("DTensor", tensor.detach()).full_tensor()
    return whole


def _assign(setter: Any, target: DTensor, value: Any) -> None:
    """Set ``target.data`` or ``target.grad``, according to `setter`; a full gradient is averaged over the ranks."""
    if _SETTERS[setter] == "data":
        _assign_data(target, value)
        return
    if isinstance(value, DTensor) and isinstance(target, torch.nn.Parameter):
        value = value.redistribute(placements=target.placements)
    elif value is not None and not isinstance(value, DTensor):
        if _agree is not None:
            _agree(f"write a gradient of a sharded tensor of shape {tuple(target.shape)}")
        value = mean_over_ranks(value, target)
    setter(target, value)


@torch.no_grad()
def _check_stand_in(shard: DTensor) -> None:
    """Refuse a shard whose values differ from the full tensor that was assigned to its ``.data``."""
    whole = _stand_ins[id(shard)][1]()
    if whole is None:
        del _stand_ins[id(shard)]
    elif not torch.equal(shard.to_local(), _slice(whole, shard)):
        raise refusal("data", f"a tensor of shape {tuple(whole.shape)} in `train_step`")


@torch.no_grad()
def _assign_data(target: DTensor, value: Tensor) -> None:
    """Make `target` share the memory of `value`, as ``target.data = value`` does in torch.

    A full tensor cannot share memory with a shard, so a write to only one of the two is refused, at the next
    assignment or when a step ends.
    """
    if value.shape != target.shape or value.dtype != target.dtype:
        raise refusal(
            "other data", f"{tuple(value.shape)} and {value.dtype} to {tuple(target.shape)} and {target.dtype}"
        )
    if _agree is not None:
        _agree.note(f"assign data {tuple(target.shape)}")
    if id(target) in _stand_ins:
        _check_stand_in(target)
    shard = _place_like(value, target)
    target._local_tensor = shard.to_local().contiguous()
    if _take_data is not None:
        _take_data(target)
    _stand_ins.pop(id(target), None)
    if isinstance(value, DTensor):
        shard._local_tensor = target._local_tensor  # FSDP 2 may have replaced it by a padded copy
    else:
        _stand_ins[id(target)] = target, weakref.ref(value)


def _place_like(value: Any, target: DTensor, *, takes_whole: bool = True) -> Any:
    """Return the operand `value` of a write to `target` with the placement of `target`.

    Otherwise torch would change the placement of `target`. A full tensor is sliced only if `takes_whole`, which means
    that the operation works element by element.

    Raises:
        ContractError: `value` is a full tensor that differs between ranks.
    """
    if isinstance(value, DTensor):
        fits = value.shape == target.shape and value.placements != target.placements
        return value.redistribute(placements=target.placements) if fits else value
    is_constant = isinstance(value, Tensor) and not _has_gradient([value])
    if not takes_whole or not is_constant or not value.dim():
        return value
    if _agree is not None and _agree.compares_each:
        digest = int(digest_of_all([value.detach()], value.device))
        _agree(f"write a full tensor to a sharded one of shape {tuple(target.shape)} (digest {digest:x})")
    return sharded_like(value.detach().expand(target.shape), target)


def _slice(whole: Tensor, shard: DTensor) -> Tensor:
    """Return the part of a full tensor that `shard` has on this rank."""
    return view_of_part(slice_of(shard), whole, of=Box((0,) * whole.dim(), tuple(whole.shape))).to(shard.device)


def _leaves_a_rank_empty(tensor: DTensor) -> bool:
    """Whether a rank has no values of `tensor`."""
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            rows = tensor.shape[placement.dim]
            if -(-rows // ranks) * (ranks - 1) >= rows:
                return True
    return False
