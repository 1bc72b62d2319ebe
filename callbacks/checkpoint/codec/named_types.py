"""Enums, dataclasses and named tuples in a state tree, by the name of their type.

A checkpoint may come from elsewhere, so a name in it must not make this process run code. A type is found only among
the modules that are imported already, by plain look-ups in their dictionaries, and an object is filled without calling
its constructor. Types with a ``__del__`` are refused, because that would run on values which the file chose.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "UnknownTypeError",
    "build_dataclass",
    "build_named_tuple",
    "dataclass_of",
    "enum_member",
    "find_type",
    "is_named_tuple",
    "named_tuple_of",
    "type_name",
]


class UnknownTypeError(LookupError):
    """A type that a state tree names is not imported in this process, or is not of the kind it is used as."""


def type_name(kind: type) -> str | None:
    """``module:qualified.name`` where that leads back to `kind`, else None, as for a class local to a function."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        return name if find_type(name) is kind else None
    except UnknownTypeError:
        return None


def is_named_tuple(kind: type) -> bool:
    """Whether `kind` was made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def enum_member(name: str, member: str) -> enum.Enum:
    """The member of an enum by its name.

    Raises:
        UnknownTypeError: There is no such enum or member.
    """
    kind = find_type(name)
    if not issubclass(kind, enum.Enum):
        raise UnknownTypeError(f"{name} is not an enum")
    if member not in kind._member_map_:
        raise UnknownTypeError(f"{name} has no member {member!r}")
    return kind._member_map_[member]


def dataclass_of(name: str, values: Mapping[str, Any]) -> type:
    """The dataclass of that name, whose fields are exactly those of `values`.

    Raises:
        UnknownTypeError: There is none, or its fields have other names.
    """
    kind = find_type(name)
    if not dataclasses.is_dataclass(kind):
        raise UnknownTypeError(f"{name} is not a dataclass")
    expected = {field.name for field in dataclasses.fields(kind)}
    if expected != values.keys():
        raise UnknownTypeError(
            f"{name} has the fields {sorted(expected)} in this process, but {sorted(values)} in the checkpoint"
        )
    return kind


def build_dataclass(name: str, values: dict[str, Any]) -> Any:
    """An instance of a dataclass with exactly these fields, made without its constructor.

    Raises:
        UnknownTypeError: As of `dataclass_of`.
    """
    instance: Any = object.__new__(dataclass_of(name, values))
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


def named_tuple_of(name: str, items: Sequence[Any]) -> type[tuple[Any, ...]]:
    """The named tuple of that name, which has as many fields as there are `items`.

    Raises:
        UnknownTypeError: There is none, or it has another number of fields.
    """
    kind = find_type(name)
    if not is_named_tuple(kind):
        raise UnknownTypeError(f"{name} is not a named tuple")
    if len(kind._fields) != len(items):  # type: ignore[attr-defined]
        raise UnknownTypeError(f"{name} has different fields in this process and in the checkpoint")
    return kind


def build_named_tuple(name: str, items: list[Any]) -> Any:
    """An instance of a named tuple.

    Raises:
        UnknownTypeError: As of `named_tuple_of`.
    """
    return tuple.__new__(named_tuple_of(name, items), items)


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
