"""Computations of a trainer's step with shards: as in torch, but never with one rank's part for the whole.

Norms, averages, clamps, products of shards are right as torch computes them. Left to torch, though, a number read from
a norm is this rank's share of it, a maximum fails on a rank that holds nothing, noise is equal in every shard, and what
is assigned to ``.data`` is lost. So, while a step runs::

    float(norm), norm.item(), f"{norm:.3f}"     read from the whole value
    p.grad.abs().max() with an empty shard      of the whole tensor
    randn_like(p), p.normal_()                  refused
    p.data = x, p.grad = whole tensor           refused
    p.register_hook(…)                          refused
    p.add_(product)                             of the product as the shard is placed
    _foreach_mul_([shard, whole], …)            of shards and whole tensors apart, as optimizers have them on a device
    whole.mul_(number computed of shards)       of the number's value

All ranks have to read a value together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard

from ..refused import refusal
from ..torch_internals import TensorBase, without_torch_function_of_subclasses

__all__ = ["begin_step", "end_step", "hold", "is_in_step", "release", "whole_numbers"]

_READS = frozenset({"item", "tolist", "__format__", "__float__", "__int__", "__bool__", "__index__", "__complex__"})
_READS |= {"is_nonzero", "numpy", "__array__"}
_EXTREMES = frozenset({"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median"})
_EXTREMES |= {"norm", "vector_norm", "linalg_vector_norm"}
_RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_RANDOM |= {"random_", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal"}
_RANDOM |= {"dropout", "feature_dropout", "alpha_dropout", "native_dropout"}
_CONSTANTS = frozenset({"ones_", "zeros_", "constant_"})
"""Functions of torch.nn.init that draw no numbers and treat all rows alike."""
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_SETTERS: dict[Any, str] = {vars(TensorBase)[name].__set__: name for name in ("data", "grad")}

_agree: Callable[[str], None] | None = None
_note: Callable[[str], None] | None = None
_is_saving = False
_torchs = DTensor.__dict__["__torch_function__"]


def hold() -> None:
    """Training begins: have operations on shards come through this module."""
    DTensor.__torch_function__ = classmethod(_function)  # type: ignore[assignment]


def release() -> None:
    """Training is over: operations on shards are torch's own again."""
    end_step()
    DTensor.__torch_function__ = _torchs  # type: ignore[method-assign]


def begin_step(agree: Callable[[str], None], note: Callable[[str], None]) -> None:
    """From here on operations on shards are those of a training step.

    Args:
        agree: Called with what all ranks are about to do together.
        note: Called with what all ranks do alike, each for itself.
    """
    global _agree, _note
    _agree, _note = agree, note


def end_step() -> None:
    """End the step."""
    global _agree
    _agree = None


@contextlib.contextmanager
def whole_numbers() -> Iterator[None]:
    """While this is open, what is read of a shard is that of the whole tensor, as in a step.

    For the ``state_dict`` of a class, which all ranks call: a sum of shards has on each rank the part of that rank.
    """
    global _is_saving
    before = DTensor.__dict__["__torch_function__"]
    hold()
    _is_saving = True
    try:
        yield
    finally:
        _is_saving = False
        DTensor.__torch_function__ = before  # type: ignore[method-assign]


def is_in_step() -> bool:
    """Whether it is a training step that computes with shards now."""
    return _agree is not None


def _function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG001  # torch's
    kwargs = kwargs or {}
    name, first = getattr(func, "__name__", ""), args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    with without_torch_function_of_subclasses():
        if _agree is not None and name.startswith("_foreach_"):
            results = _by_kind(name, func, args, kwargs) if _mixes_kinds(first) else func(*args, **kwargs)
            if name.endswith("_"):  # torch counts no such write, by which a clip is found between backward calls
                increment_version([tensor for tensor in first if isinstance(tensor, DTensor)])
            return results
        if _agree is not None and isinstance(first, Tensor) and not isinstance(first, DTensor) and first.dim():
            args = _with_whole_numbers(name, args)
        if _agree is None and _is_saving and isinstance(first, DTensor) and args and name in _READS:
            return func(_gathered(name, first), *args[1:], **kwargs)
        if _agree is None or not isinstance(first, DTensor):
            return func(*args, **kwargs)
        if name in _RANDOM or (getattr(func, "__module__", "") == "torch.nn.init" and name not in _CONSTANTS):
            raise refusal("random", f"`{name}` in `train_step`")
        if name in _HOOKS and first.is_leaf and first.requires_grad:
            raise refusal("hook", f"`{name}` in `train_step`")
        if args and (name in _READS or (name in _EXTREMES and _leaves_a_rank_empty(first))):
            args = (_gathered(name, first), *args[1:])
        elif name == "__set__" and func in _SETTERS:
            args = (first, _assigned(_SETTERS[func], first, args[1]))
        elif args and _is_written(name):
            if _note is not None:
                _note(f"{name} {tuple(first.shape)}")
            args = (first, *(_placed(other, first) for other in args[1:]))
        return func(*args, **kwargs)


def _mixes_kinds(tensors: Any) -> bool:
    """Whether a list has shards and whole tensors; single numbers torch takes beside shards."""
    kinds = {isinstance(tensor, DTensor) for tensor in tensors if isinstance(tensor, DTensor) or tensor.dim()}
    return len(kinds) > 1


def _with_whole_numbers(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments beside a whole tensor: of a number computed from shards, such as the factor of a clip, its value."""
    return tuple(_gathered(name, arg) if isinstance(arg, DTensor) and not arg.dim() else arg for arg in args)


def _by_kind(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """One operation on lists, called once for the shards among the tensors of the first, and once for the others."""
    size = len(args[0])
    results: list[Any] = [None] * size
    for kind in (True, False):
        chosen = [index for index, tensor in enumerate(args[0]) if isinstance(tensor, DTensor) is kind]

        def part(value: Any, chosen: list[int] = chosen) -> Any:
            is_for_each = isinstance(value, list | tuple) and len(value) == size
            return [value[index] for index in chosen] if is_for_each else value

        given = tuple(map(part, args))
        given = given if kind else _with_whole_numbers(name, given)
        found = func(*given, **{keyword: part(value) for keyword, value in kwargs.items()})
        for index, result in zip(chosen, found or (), strict=False):
            results[index] = result
    return None if results[0] is None else results


def _is_written(name: str) -> bool:
    """Whether the operation `name` changes its first tensor in place."""
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return is_in_place and name != "requires_grad_"


def _gathered(name: str, tensor: DTensor) -> Tensor:
    if _agree is not None and not all(placement.is_replicate() for placement in tensor.placements):
        _agree(f"compute `{name}` of a sharded tensor of shape {tuple(tensor.shape)}")
    whole: Tensor = cast("DTensor", tensor.detach()).full_tensor()
    return whole


def _assigned(attribute: str, target: DTensor, value: Any) -> Any:
    if attribute == "data":
        raise refusal("data", "`train_step`")
    if value is None or not isinstance(target, torch.nn.Parameter):
        return value
    if not isinstance(value, DTensor):
        raise refusal("whole gradient", "`train_step`")
    return value.redistribute(placements=target.placements)


def _placed(value: Any, target: DTensor) -> Any:
    """The operand of an in-place operation on a shard, sharded as that is; torch would change the target."""
    fits = isinstance(value, DTensor) and value.shape == target.shape and value.placements != target.placements
    return value.redistribute(placements=target.placements) if fits else value


def _leaves_a_rank_empty(tensor: DTensor) -> bool:
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            rows = tensor.shape[placement.dim]
            if -(-rows // ranks) * (ranks - 1) >= rows:
                return True
    return False
