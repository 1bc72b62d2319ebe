"""A tree of Python values as JSON plus a table of tensors, and back to equal values of equal types.

What JSON has is stored as JSON: None, booleans, integers, finite floats, text, lists and dictionaries with text keys.
Everything else is an object with a single key that starts with ``$`` (so a dictionary that has such a key is itself
stored as ``{"$dict": [[key, value], …]}``). Values of Python's standard library, and of torch and NumPy where they are
no tensors, have a codec. It turns a value of exactly one type into children, and back. A configuration of OmegaConf is
stored as the plain containers that it holds. Values of other types are stored with the name of their type: enums,
dataclasses, named tuples, and classes that wrap tensors. Tensors and arrays become references into safetensors files.
Nothing is pickled: what has no representation here is refused with its path.

A checkpoint may come from elsewhere, so a name in it must not make this process run code. A type is found only among
the modules that are imported already, by plain look-ups in their dictionaries, and an object is filled without calling
its constructor. Types with a ``__del__`` are refused, because that would run on values which the file chose.

Tensors of a class that wraps others, as the 8-bit states of an optimizer, are stored as what they are made of. Such
classes say so by torch's protocol: ``__tensor_flatten__`` names the tensors, ``__tensor_unflatten__`` takes them. It is
the one case in which a class's own code builds the value. Those of torch itself, such as nested tensors, are left out:
what they need beside their tensors is not a plain value.

The module imports neither torch nor NumPy: a tree that holds tensors can exist only where torch is loaded.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import datetime as dt
import decimal
import enum
import importlib
import math
import pathlib
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ....adapter.contract.exceptions import CheckpointError, UnstorableStateError
from ....adapter.plumbing.counted_dict import CountedDict, uncounted
from ..format.tensor_files import array_type

if TYPE_CHECKING:
    import torch

__all__ = [
    "Attribute",
    "NamedKind",
    "Path",
    "UnknownTypeError",
    "check",
    "decode",
    "encode",
    "format_path",
    "is_sparse",
    "is_wrapper",
    "wrapped_tensors",
]

MAX_DEPTH = 100
"""Containers within containers; deeper trees would exceed Python's recursion limit while loading."""

_DEEPEST_TREE = 2 * MAX_DEPTH + 10
"""Stored values within stored values: a container may be stored as an object with a list in it."""

_INLINE_INT_BITS = 63


@dataclass(frozen=True)
class Attribute:
    """A part of a path that is a field, not a key."""

    name: str


Path = tuple[Any, ...]
r"""Root name, then keys, indices and `Attribute`\ s."""


class TensorSink(Protocol):
    """Takes tensors and arrays out of a tree."""

    def add_tensor(self, tensor: Any, path: Path) -> dict[str, Any]:
        """A reference to `tensor`, complete once the whole tree was seen."""
        ...

    def add_array(self, array: Any, path: Path) -> dict[str, Any]:
        """A reference to a NumPy array."""
        ...


class TensorSource(Protocol):
    """Gives tensors and arrays back."""

    def tensor(self, reference: dict[str, Any]) -> Any:
        """The tensor behind a reference."""
        ...

    def array(self, reference: dict[str, Any]) -> Any:
        """The array behind a reference."""
        ...


def encode(value: Any, sink: TensorSink, *, root: str | Path = "state") -> Any:
    """`value` as JSON; its tensors and arrays go to `sink`.

    Raises:
        UnstorableStateError: A value has no representation; names its path.
    """
    return _Encoder(sink).encode(value, (root,) if isinstance(root, str) else root)


def decode(tree: Any, source: TensorSource) -> Any:
    """The value that `encode` stored.

    Raises:
        CheckpointError: The tree uses a type that this process does not know.
    """
    return _Decoder(source).decode(tree)


def check(tree: Any, source: TensorSource, *, knows_types: bool) -> None:
    """Go through a stored tree as `decode` would, without a type of the user's being made.

    Args:
        tree: What `encode` gave.
        source: Gives tensors, or anything in their place.
        knows_types: Whether all modules are imported whose types the tree may name. If not, a type of a module that is
            not imported may still come to be known.

    Raises:
        CheckpointError: It has a tag, or names a type, that is not known here.
        Exception: Whatever the content of the tree makes a constructor raise.
    """
    _Checker(source, knows_types).decode(tree)


def format_path(path: Path) -> str:
    """``state["cache"][3].mean`` for a human."""
    text = str(path[0])
    for part in path[1:]:
        text += f".{part.name}" if isinstance(part, Attribute) else f"[{part!r}]".replace("'", '"')
    return text


@dataclass(frozen=True)
class Codec:
    """How values of one type become children and back.

    `take_apart` returns a list, dict or scalar of encodable values; it raises ValueError for a value of the type that
    cannot be stored, with what to do about it.
    """

    tag: str
    kind: str
    """``module:name`` of the type, which is not imported to look for its values."""
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]


_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, deque, OrderedDict, Counter)
}


def _defaultdict_apart(value: defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise ValueError("only a default_factory among " + ", ".join(sorted(_FACTORIES)) + " can be stored")
    return [None if factory is None else factory.__name__, _pairs(value)]


def _defaultdict_together(parts: list[Any]) -> defaultdict[Any, Any]:
    name, pairs = parts
    return defaultdict(None if name is None else _FACTORIES[name], _dict_of(pairs))


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _dict_of(pairs: list[Any]) -> dict[Any, Any]:
    return dict(tuple(pair) for pair in pairs)


def _datetime_apart(value: dt.datetime) -> str:
    if value.tzinfo is not None and type(value.tzinfo) is not dt.timezone:
        raise ValueError("only times without a zone, or with a fixed offset (datetime.timezone), can be stored")
    return value.isoformat()


def _attributes(value: object) -> dict[str, Any]:
    return dict(vars(value))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _torch() -> Any:
    return importlib.import_module("torch")


def _torch_constant(name: str) -> Any:
    torch = _torch()
    value = vars(torch).get(name)
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise UnknownTypeError(f"torch.{name} is not a dtype, layout or memory format of this torch")
    return value


def _size(sizes: list[int]) -> Any:
    if any(not 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"no tensor has the size {sizes}")
    return _torch().Size(sizes)


def _numpy_scalar_apart(value: Any) -> list[str]:
    if value.dtype.hasobject:
        raise ValueError("it holds Python objects")
    return [value.dtype.str, value.tobytes().hex()]


def _numpy_scalar(parts: list[str]) -> Any:
    import numpy as np

    dtype, data = np.dtype(parts[0]), bytes.fromhex(parts[1])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _numpy_dtype_apart(value: Any) -> str:
    if value.names is not None or value.hasobject:
        raise ValueError("only types of plain numbers and texts can be stored")
    return str(value.str)


_CODECS = [
    Codec("$tuple", "builtins:tuple", list, tuple),
    Codec("$set", "builtins:set", list, set),
    Codec("$frozenset", "builtins:frozenset", list, frozenset),
    Codec("$deque", "collections:deque", lambda d: [d.maxlen, list(d)], lambda parts: deque(parts[1], parts[0])),
    Codec("$ordered", "collections:OrderedDict", _pairs, lambda pairs: OrderedDict(_dict_of(pairs))),
    Codec("$default", "collections:defaultdict", _defaultdict_apart, _defaultdict_together),
    Codec("$counter", "collections:Counter", _pairs, lambda pairs: Counter(_dict_of(pairs))),
    Codec("$bytes", "builtins:bytes", _base64, _unbase64),
    Codec("$bytearray", "builtins:bytearray", _base64, lambda text: bytearray(_unbase64(text))),
    Codec("$complex", "builtins:complex", lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    Codec("$range", "builtins:range", lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    Codec("$path", "pathlib:PosixPath", str, pathlib.Path),
    Codec("$datetime", "datetime:datetime", _datetime_apart, dt.datetime.fromisoformat),
    Codec("$date", "datetime:date", dt.date.isoformat, dt.date.fromisoformat),
    Codec(
        "$timedelta",
        "datetime:timedelta",
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
        lambda parts: dt.timedelta(*parts),
    ),
    Codec("$decimal", "decimal:Decimal", str, decimal.Decimal),
    Codec("$uuid", "uuid:UUID", str, uuid.UUID),
    Codec("$arguments", "argparse:Namespace", _attributes, lambda found: argparse.Namespace(**found)),
    Codec("$namespace", "types:SimpleNamespace", _attributes, lambda found: types.SimpleNamespace(**found)),
    *(
        Codec("$torch", f"torch:{kind}", lambda value: str(value).removeprefix("torch."), _torch_constant)
        for kind in ("dtype", "layout", "memory_format")
    ),
    Codec("$device", "torch:device", str, lambda name: _torch().device(name)),
    Codec("$size", "torch:Size", list, _size),
    Codec("$npscalar", "numpy:generic", _numpy_scalar_apart, _numpy_scalar),
    Codec("$npdtype", "numpy:dtype", _numpy_dtype_apart, array_type),
    Codec("$int", "", hex, lambda text: int(text, 16)),
    Codec("$float", "", repr, float),
]
_BY_TAG = {codec.tag: codec for codec in _CODECS}
_BY_TYPE = {codec.kind: codec for codec in _CODECS}


def _codec_of(kind: type) -> Codec | None:
    if kind.__module__.partition(".")[0] != "numpy":
        return _BY_TYPE.get(_name(kind))
    return next((codec for codec in (_BY_TYPE.get(_name(base)) for base in kind.__mro__) if codec is not None), None)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


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


class _Encoder:
    """One walk over a tree."""

    def __init__(self, sink: TensorSink) -> None:
        self.sink = sink
        self.open_containers: set[int] = set()

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _INLINE_INT_BITS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._inside(value, path, lambda: self._list(value, path))
        if kind is CountedDict:  # a job's hyperparameters, which a class may keep in its state
            value, kind = uncounted(value), dict
        if kind is dict:
            return self._inside(value, path, lambda: self._dict(value, path))
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor) and not (is_wrapper(value) or is_sparse(value)):
            return {"$tensor": self.sink.add_tensor(value, path)}
        if numpy is not None and kind is numpy.ndarray:
            return {"$ndarray": self.sink.add_array(value, path)}
        if (codec := _codec_of(kind)) is not None:
            return self._inside(value, path, lambda: self._by_codec(codec, value, path))
        if (named := next((named for named in NAMED_KINDS.values() if named.has(value)), None)) is not None:
            return self._inside(value, path, lambda: self._named(named, value, kind, path))
        if (omegaconf := sys.modules.get("omegaconf")) is not None:
            kinds = omegaconf.DictConfig, omegaconf.ListConfig
            if kind in kinds:  # unresolved: what an interpolation reads of the environment is in no checkpoint
                return self.encode(omegaconf.OmegaConf.to_container(value, resolve=False), path)
            if isinstance(value, type) and value in kinds:  # Lightning keeps that of the hyperparameters
                return value.__name__
        raise _refusal(value, path, _hint(value, path))

    def _inside(self, container: Any, path: Path, encode_content: Callable[[], Any]) -> Any:
        if id(container) in self.open_containers:
            raise _refusal(container, path, "it contains itself")
        if len(self.open_containers) >= MAX_DEPTH:
            raise _refusal(container, path, f"it is nested deeper than {MAX_DEPTH} containers")
        self.open_containers.add(id(container))
        try:
            return encode_content()
        finally:
            self.open_containers.discard(id(container))

    def _list(self, items: list[Any], path: Path) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, items: dict[Any, Any], path: Path) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in items):
            return {key: self.encode(item, (*path, key)) for key, item in items.items()}
        pairs = [[self.encode(key, (*path, "<key>")), self.encode(item, (*path, key))] for key, item in items.items()]
        return {"$dict": pairs}

    def _by_codec(self, codec: Codec, value: Any, path: Path) -> dict[str, Any]:
        try:
            parts = codec.take_apart(value)
        except ValueError as error:
            raise _refusal(value, path, str(error)) from None
        return {codec.tag: self.encode(parts, path)}

    def _named(self, named: NamedKind, value: Any, kind: type, path: Path) -> dict[str, Any]:
        name = type_name(kind)
        if name is None:
            raise _refusal(value, path, "its class must be at the top level of a module and have no __del__")
        try:
            parts = named.take_apart(value)
        except ValueError as error:
            raise _refusal(value, path, str(error)) from None
        if dataclasses.is_dataclass(value):
            return {named.tag: [name, {key: self.encode(v, (*path, Attribute(key))) for key, v in parts.items()}]}
        return {named.tag: [name, self.encode(parts, path)]}


def _refusal(value: Any, path: Path, hint: str) -> UnstorableStateError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UnstorableStateError(format_path(path), name, hint)


def _hint(value: Any, path: Path) -> str:
    if isinstance(value, type):  # which a file could name to have it called by the code that finds it there
        return "store its name" + (", as a string for `state_key`" if path[1:2] == ("callbacks",) else "")
    for method in ("state_dict", "get_state"):
        if callable(getattr(value, method, None)):
            return f"store its {method}()"
    return "store what is needed to build it again; of hyperparameters, name it in `ignore` of save_hyperparameters"


class _Decoder:
    """One walk over stored JSON."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1:
            ((tag, content),) = tree.items()
            if tag.startswith("$"):
                return self._tagged(tag, content)
        return {key: self.decode(item) for key, item in tree.items()}

    def _tagged(self, tag: str, content: Any) -> Any:
        try:
            if tag in _BY_TAG:
                return _BY_TAG[tag].put_together(self.decode(content))
            if tag in NAMED_KINDS:
                name, parts = content
                return self._named(NAMED_KINDS[tag], name, self.decode(parts))
        except UnknownTypeError as error:
            raise CheckpointError(f"the checkpoint cannot be loaded here: {error}") from None
        if tag == "$dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag == "$tensor":
            return self.source.tensor(content)
        if tag == "$ndarray":
            return self.source.array(content)
        raise CheckpointError(f"the checkpoint holds a value of kind {tag!r}; a newer genlight may have written it")

    def _named(self, named: NamedKind, name: str, parts: Any) -> Any:
        return named.build(named.find(name, parts), parts)


class _Checker(_Decoder):
    """Decodes what has a codec, and looks for the types that all else is made of, without making one."""

    def __init__(self, source: TensorSource, knows_types: bool) -> None:
        super().__init__(source)
        self._depth = 0
        self._knows_types = knows_types

    def decode(self, tree: Any) -> Any:
        # Before Python's own limit, which depends on who calls: loading has a deeper stack below it than a check.
        if self._depth > _DEEPEST_TREE:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} containers")
        self._depth += 1
        try:
            return super().decode(tree)
        finally:
            self._depth -= 1

    def _named(self, named: NamedKind, name: str, parts: Any) -> Any:
        if self._knows_types or name.partition(":")[0] in sys.modules:
            named.find(name, parts)
        return object()
