"""Types in a state tree that are found by their name: enums, dataclasses, named tuples, and classes that wrap tensors.

A checkpoint may come from elsewhere, so a name in it must not make this process run code. A type is found only among
the modules that are imported already, by plain look-ups in their dictionaries, and an object is filled without calling
its constructor. Types with a ``__del__`` are refused, because that would run on values which the file chose.

Tensors of a class that wraps others, as the 8-bit states of an optimizer, are stored as what they are made of. Such
classes say so by torch's protocol: ``__tensor_flatten__`` names the tensors, ``__tensor_unflatten__`` takes them. It is
the one case in which a class's own code builds the value. Those of torch itself, such as nested tensors, are left out:
what they need beside their tensors is not a plain value.

The module imports neither torch nor NumPy.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["NAMED_KINDS", "NamedKind", "UnknownTypeError", "is_sparse", "is_wrapper", "type_name", "wrapped_tensors"]


class UnknownTypeError(LookupError):
    """A type that a state tree names is not imported in this process, or is not of the kind it is used as."""


def type_name(kind: type) -> str | None:
    """``module:qualified.name`` where that leads back to `kind`, else None, as for a class local to a function."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        return name if find_type(name) is kind else None
    except UnknownTypeError:
        return None


def find_type(name: str) -> type:
    """The type that `type_name` named.

    Raises:
        UnknownTypeError: There is none in this process, or it has a ``__del__``.
    """
    module_name, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module_name)
    if found is None:
        raise UnknownTypeError(f"{name} is not imported; import {module_name} before loading this checkpoint")
    for part in qualified.split("."):
        # `vars`, not `getattr`: a module's or class's own `__getattr__` could import or run anything.
        found = vars(found).get(part) if isinstance(found, type) or found is sys.modules.get(module_name) else None
    if not isinstance(found, type):
        raise UnknownTypeError(f"{name} is not a type of this process")
    if any("__del__" in vars(base) for base in found.__mro__):
        raise UnknownTypeError(f"{name} has a __del__ and is never restored from a file")
    return found


@dataclass(frozen=True)
class NamedKind:
    """How values of a kind of types are stored: the name of the type, and what its values are made of."""

    tag: str
    has: Callable[[Any], bool]
    """Whether a value is of the kind."""
    take_apart: Callable[[Any], Any]
    """Encodable values that a value is made of; raises ValueError where it cannot be stored."""
    find: Callable[[str, Any], Any]
    """The type of that name, for a value of those parts; raises `UnknownTypeError`."""
    build: Callable[[Any, Any], Any]
    """The value of a type that has these parts."""


def _enum_apart(value: enum.Enum) -> str:
    if type(value)._member_map_.get(value.name or "") is not value:
        raise ValueError("a combination of flags has no name; store its value")
    return value.name


def _find_enum(name: str, member: str) -> type[enum.Enum]:
    kind = find_type(name)
    if not issubclass(kind, enum.Enum):
        raise UnknownTypeError(f"{name} is not an enum")
    if member not in kind._member_map_:
        raise UnknownTypeError(f"{name} has no member {member!r}")
    return kind


def _dataclass_apart(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    extra = sorted(set(getattr(value, "__dict__", ())) - fields.keys())
    if extra:
        raise ValueError(f"it has attributes that are not fields: {', '.join(extra)}")
    return fields


def _find_dataclass(name: str, values: dict[str, Any]) -> type:
    kind = find_type(name)
    if not dataclasses.is_dataclass(kind):
        raise UnknownTypeError(f"{name} is not a dataclass")
    expected = {field.name for field in dataclasses.fields(kind)}
    if expected != values.keys():
        raise UnknownTypeError(
            f"{name} has the fields {sorted(expected)} in this process, but {sorted(values)} in the checkpoint"
        )
    return kind


def _build_dataclass(kind: type, values: dict[str, Any]) -> Any:
    instance: Any = object.__new__(kind)
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


def _is_named_tuple(kind: type) -> bool:
    """Whether `kind` was made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _find_named_tuple(name: str, items: list[Any]) -> Any:
    kind: Any = find_type(name)
    if not _is_named_tuple(kind):
        raise UnknownTypeError(f"{name} is not a named tuple")
    if len(kind._fields) != len(items):
        raise UnknownTypeError(f"{name} has different fields in this process and in the checkpoint")
    return kind


def is_wrapper(tensor: object) -> bool:
    """Whether `tensor` is of a class that wraps tensors, and not of torch's own."""
    return _is_wrapper_class(type(tensor))


def _is_wrapper_class(cls: type) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not issubclass(cls, torch.Tensor) or cls.__module__.partition(".")[0] == "torch":
        return False
    return hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def _wrapper_apart(tensor: Any) -> dict[str, Any]:
    names, context = tensor.__tensor_flatten__()
    tensors = {name: getattr(tensor, name) for name in names}
    return {"tensors": tensors, "context": context, "shape": list(tensor.shape), "stride": list(tensor.stride())}


def _find_wrapper(name: str, _: Any) -> Any:
    kind = find_type(name)
    if not _is_wrapper_class(kind):
        raise UnknownTypeError(f"{name} is not a class of tensors that wraps others")
    return kind


def _build_wrapper(kind: Any, parts: dict[str, Any]) -> Any:
    shape, stride = sys.modules["torch"].Size(parts["shape"]), tuple(parts["stride"])
    return kind.__tensor_unflatten__(parts["tensors"], parts["context"], shape, stride)


def is_sparse(value: object) -> bool:
    """Whether `value` is a sparse tensor in coordinate format."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def _sparse_apart(tensor: Any) -> dict[str, Any]:
    indices, values = tensor.detach()._indices(), tensor.detach()._values()
    return {"indices": indices, "values": values, "shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}


def _find_sparse(_: str, parts: Any) -> None:
    if parts.keys() != {"indices", "values", "shape", "coalesced"}:
        raise ValueError("a sparse tensor is made of indices and values, and has a shape")


def _build_sparse(_: None, parts: dict[str, Any]) -> Any:
    make = sys.modules["torch"].sparse_coo_tensor
    indices, values, shape = parts["indices"], parts["values"], parts["shape"]
    return make(indices, values, shape, is_coalesced=parts["coalesced"], check_invariants=True)


def wrapped_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor` itself, or of a wrapper the tensors in it, with their names."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for part, value in _wrapper_apart(tensor)["tensors"].items():
        yield from wrapped_tensors(f"{part} of {name}", value)


NAMED_KINDS = {
    kind.tag: kind
    for kind in (
        NamedKind(
            "$enum",
            lambda value: isinstance(value, enum.Enum),
            _enum_apart,
            _find_enum,
            lambda kind, member: kind._member_map_[member],
        ),
        NamedKind(
            "$dataclass",
            lambda value: dataclasses.is_dataclass(value) and not isinstance(value, type),
            _dataclass_apart,
            _find_dataclass,
            _build_dataclass,
        ),
        NamedKind("$namedtuple", lambda value: _is_named_tuple(type(value)), list, _find_named_tuple, tuple.__new__),
        NamedKind("$wrapper", is_wrapper, _wrapper_apart, _find_wrapper, _build_wrapper),
        NamedKind("$sparse", is_sparse, _sparse_apart, _find_sparse, _build_sparse),
    )
}
"""By tag."""
