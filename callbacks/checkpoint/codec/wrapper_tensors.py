"""Tensors of a class that wraps others, as the 8-bit states of an optimizer: stored as what they are made of.

Such classes say so by torch's protocol: ``__tensor_flatten__`` names the tensors, ``__tensor_unflatten__`` takes them.
Those of torch itself, such as nested tensors, are left out: what they need beside their tensors is not a plain value.
A class is found as in `named_types`, never imported; it is the one case in which its own code builds the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .named_types import UnknownTypeError, find_type

__all__ = ["build_wrapper", "is_wrapper", "take_wrapper_apart", "wrapped_tensors", "wrapper_of"]


def is_wrapper(tensor: object) -> bool:
    """Whether `tensor` is of a class that wraps tensors, and not of torch's own."""
    return isinstance(tensor, torch.Tensor) and _is_wrapper_class(type(tensor))


def take_wrapper_apart(tensor: Any) -> dict[str, Any]:
    """The tensors in a wrapper by their names, what else it is made of, and its shape and strides."""
    names, context = tensor.__tensor_flatten__()
    tensors = {name: getattr(tensor, name) for name in names}
    return {"tensors": tensors, "context": context, "shape": list(tensor.shape), "stride": list(tensor.stride())}


def wrapper_of(kind: str) -> Any:
    """The class of wrappers of that name.

    Raises:
        UnknownTypeError: There is none in this process.
    """
    cls = find_type(kind)
    if not issubclass(cls, torch.Tensor) or not _is_wrapper_class(cls):
        raise UnknownTypeError(f"{kind} is not a class of tensors that wraps others")
    return cls


def build_wrapper(kind: str, parts: Mapping[str, Any]) -> Any:
    """The wrapper that `take_wrapper_apart` took apart.

    Raises:
        UnknownTypeError: There is no such class of wrappers in this process.
    """
    cls = wrapper_of(kind)
    shape, stride = torch.Size(parts["shape"]), tuple(parts["stride"])
    return cls.__tensor_unflatten__(parts["tensors"], parts["context"], shape, stride)


def wrapped_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor` itself, or of a wrapper the tensors in it, with their names."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for part, value in take_wrapper_apart(tensor)["tensors"].items():
        yield from wrapped_tensors(f"{part} of {name}", value)


def _is_wrapper_class(cls: type) -> bool:
    is_torchs = cls.__module__.partition(".")[0] == "torch"
    return not is_torchs and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")
