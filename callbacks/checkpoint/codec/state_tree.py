"""A tree of Python values as JSON plus a table of tensors, and back to equal values of equal types.

JSON types are stored as JSON: None, booleans, integers, finite floats, text, lists and dictionaries with text keys.
Every other value is an object with a single key that starts with ``$`` (so a dictionary that has such a key is itself
stored as ``{"$dict": [[key, value], …]}``). A `Kind` converts values of one type to children, and back: Python's
containers and numbers, and values of torch and NumPy. Tensors become references into safetensors files, and so do the
bytes of arrays. A configuration of OmegaConf is stored as the plain containers that it holds. Values of further types
are stored with the name of their type: enums, dataclasses, named tuples, and classes that wrap tensors. Nothing is
pickled: a value without a representation here is refused, and the error names its path.

A checkpoint may come from elsewhere, so a name in it must not make this process run code. A type is looked up only in
modules that are already imported, by plain look-ups in their dictionaries, and an object is filled without calling
its constructor. Types with a ``__del__`` are refused, because it would run on values that the file chose.

Tensors of a class that wraps others, such as the 8-bit states of an optimizer, are stored as the tensors inside. Such
classes declare them by torch's protocol: ``__tensor_flatten__`` lists the tensors, ``__tensor_unflatten__`` takes them.
Only in this case does a class's own code build the value. Torch's own wrappers, such as nested tensors, are not
supported: they need more than their tensors and plain values.

The module imports neither torch nor NumPy: a tree that holds tensors can exist only if torch is loaded.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import enum
import functools
import importlib
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ....adapter.contract.exceptions import CheckpointError, UnstorableStateError
from ....adapter.plumbing.counted_dict import CountedDict, uncounted

if TYPE_CHECKING:
    import torch


MAX_DEPTH = 100
"""Limit on containers within containers; deeper trees would exceed Python's recursion limit while loading."""

_DEEPEST_TREE = 2 * MAX_DEPTH + 10
"""Limit on stored values within stored values: a container may be stored as an object with a list in it."""

_INLINE_INT_BITS = 63
"""Integers of more bits are stored as hexadecimal text."""

Path = tuple[Any, ...]
"""A root name, followed by keys, indices and names of fields: texts and integers."""


TensorSource = Callable[[dict[str, Any]], Any]
"""Returns the tensor for a reference."""


class TensorSink(Protocol):
    """Takes the tensors of a tree while it is encoded."""

    def add_tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, Any]:
        """Add a tensor and return the JSON that refers to it."""
        ...

    def repeat(self, items: dict[Any, Any], path: Path) -> Any:
        """Return the JSON of a dictionary of tensors, known from an earlier tree, and add these; None if unknown."""
        ...


def encode(value: Any, table: TensorSink, *, root: str | Path = "state") -> Any:
    """Return `value` as JSON; add its tensors to `table`.

    Raises:
        UnstorableStateError: A value has no representation; the message names its path.
    """
    return _Encoder(table).encode(value, (root,) if isinstance(root, str) else root)


def decode(tree: Any, tensor_of: TensorSource) -> Any:
    """Return the value that `encode` stored.

    Raises:
        CheckpointError: The tree uses a type that this process does not know.
    """
    return _Decoder(tensor_of).decode(tree)


def check(tree: Any, tensor_of: TensorSource, *, knows_types: bool) -> Any:
    """Walk through a stored tree like `decode`, without building values of the user's types or of tensors.

    Returns:
        The decoded tree, with a plain ``object()`` in place of each value that was not built.

    Args:
        tree: The result of `encode`.
        tensor_of: Returns descriptions in place of tensors, with ``dtype`` and ``nbytes``.
        knows_types: Whether all modules are imported whose types the tree may name. If not, a module that is imported
            later may still provide a missing type.

    Raises:
        CheckpointError: It has an unknown tag or names a type that this process lacks.
        Exception: Any error that a constructor raises for the content of the tree.
    """
    return _Checker(tensor_of, knows_types).decode(tree)


def format_path(path: Path) -> str:
    """Return a path for people to read, such as ``state["cache"][3]["mean"]``."""
    return str(path[0]) + "".join(f"[{part!r}]".replace("'", '"') for part in path[1:])


@dataclass(frozen=True)
class Kind:
    """Conversion of one kind of value into children and back."""

    tag: str
    take_apart: Callable[[Any], Any]
    """Returns a list, dict or scalar of encodable values; a ValueError explains why a value cannot be stored."""
    put_together: Callable[[Any], Any]
    check: Callable[[Any], object] | None = None
    """Checks children in which descriptions replace tensors; None if `put_together` itself can do that safely."""
    has: Callable[[Any], bool] | None = None
    """Whether a value is of this kind, for a kind that stores the name of the type with the parts; None for others."""


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


def _torch() -> Any:
    return importlib.import_module("torch")


def _numpy() -> Any:
    return importlib.import_module("numpy")


def dtype_of(name: str) -> torch.dtype:
    """Return the element type with torch's name `name`, such as ``float32``.

    Raises:
        UnknownTypeError: This torch has no such type.
    """
    value: torch.dtype = vars(_torch()).get(name)
    if type(value) is not _torch().dtype:
        raise UnknownTypeError(f"torch.{name} is not a dtype of this torch")
    return value


def _size(sizes: list[int]) -> Any:
    if any(not 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"no tensor can have the size {sizes}")
    return _torch().Size(sizes)


def _numpy_scalar_apart(value: Any) -> list[str]:
    if value.dtype.hasobject:
        raise ValueError("it holds Python objects")
    return [value.dtype.str, value.tobytes().hex()]


def _numpy_scalar(parts: list[str]) -> Any:
    dtype, data = _numpy().dtype(parts[0]), bytes.fromhex(parts[1])
    return _numpy().frombuffer(data, dtype)[0] if dtype.itemsize else _numpy().zeros((), dtype)[()]


def _array_apart(array: Any) -> list[Any]:
    """Return type, shape and bytes of a NumPy array; the bytes as a tensor."""
    if array.dtype.hasobject or array.dtype.names is not None or not array.dtype.itemsize:
        raise ValueError("only arrays of plain numbers and texts can be stored; store others as lists, or by field")
    octets = _numpy().ascontiguousarray(array).reshape(-1).view("u1")
    # torch warns about read-only memory.
    return [
        array.dtype.str,
        list(array.shape),
        _torch().from_numpy(octets if octets.flags.writeable else octets.copy()),
    ]


def _check_array(parts: Any) -> None:
    name, shape, octets = parts
    dtype = _numpy().dtype(name)
    is_sound = octets.dtype == "U8" and not dtype.hasobject and all(type(size) is int and size >= 0 for size in shape)
    if not is_sound or dtype.itemsize * math.prod(shape) != octets.nbytes:
        raise ValueError(f"an array of {name} {shape!r:.100} cannot have {octets.nbytes} bytes")


def _array(parts: list[Any]) -> Any:
    name, shape, octets = parts
    return octets.contiguous().numpy().view(name).reshape(shape)


def _sparse_apart(tensor: Any) -> list[Any]:
    return [tensor.detach()._indices(), tensor.detach()._values(), list(tensor.shape), tensor.is_coalesced()]


def _check_sparse(parts: Any) -> None:
    indices, values, _, _ = parts
    if not (hasattr(indices, "nbytes") and hasattr(values, "nbytes")):
        raise ValueError("a sparse tensor must have indices and values")


def _sparse(parts: list[Any]) -> Any:
    indices, values, shape, is_coalesced = parts
    return _torch().sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=True)


_KINDS_BY_TYPE = {
    "builtins:tuple": Kind("$tuple", list, tuple),
    "builtins:set": Kind("$set", list, set),
    "builtins:frozenset": Kind("$frozenset", list, frozenset),
    "collections:deque": Kind("$deque", lambda d: [d.maxlen, list(d)], lambda parts: deque(parts[1], parts[0])),
    "collections:OrderedDict": Kind("$ordered", _pairs, lambda pairs: OrderedDict(_dict_of(pairs))),
    "collections:defaultdict": Kind("$default", _defaultdict_apart, _defaultdict_together),
    "collections:Counter": Kind("$counter", _pairs, lambda pairs: Counter(_dict_of(pairs))),
    "builtins:bytes": Kind(
        "$bytes", lambda data: base64.b64encode(data).decode(), lambda text: base64.b64decode(text, validate=True)
    ),
    "builtins:complex": Kind("$complex", lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "pathlib:PosixPath": Kind("$path", str, pathlib.Path),
    "argparse:Namespace": Kind("$arguments", lambda n: dict(vars(n)), lambda values: argparse.Namespace(**values)),
    "torch:dtype": Kind("$torch", lambda value: str(value).removeprefix("torch."), dtype_of),
    "torch:device": Kind("$device", str, lambda name: _torch().device(name)),
    "torch:Size": Kind("$size", list, _size),
    "numpy:generic": Kind("$npscalar", _numpy_scalar_apart, _numpy_scalar),
    "numpy:ndarray": Kind("$ndarray", _array_apart, _array, _check_array),
}
"""Kinds by ``module:name`` of their type, so that recognizing a value imports nothing."""
_SPARSE = Kind("$sparse", _sparse_apart, _sparse, _check_sparse)
_INT = Kind("$int", hex, lambda text: int(text, 16))
_FLOAT = Kind("$float", repr, float)


def _kind_of(value: Any) -> Kind | None:
    kind = type(value)
    if (exact := _KINDS_BY_TYPE.get(_name(kind))) is not None:
        return exact
    if kind.__module__.partition(".")[0] == "numpy" and any(_name(base) == "numpy:generic" for base in kind.__mro__):
        return _KINDS_BY_TYPE["numpy:generic"]
    return next((named for named in _KINDS_BY_NAME if named.has is not None and named.has(value)), None)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class UnknownTypeError(CheckpointError):
    """This process lacks a type that a state tree names, or defines it differently."""

    def __init__(self, problem: str, *, may_be_imported: bool = False) -> None:
        super().__init__(f"the checkpoint cannot be loaded here: {problem}")
        self.problem = problem
        self.may_be_imported = may_be_imported
        """Whether its module is not imported yet and could still provide it."""


def find_type(name: str) -> type:
    """Return the type with the name ``module:qualified.name``.

    Raises:
        UnknownTypeError: This process has no such type, or it has a ``__del__``.
    """
    module_name, _, qualified = name.partition(":")
    value: Any = sys.modules.get(module_name)
    if value is None:
        text = f"{name} is not imported; import {module_name} before it is loaded, at the top of your trainer's module"
        raise UnknownTypeError(text, may_be_imported=True)
    for part in qualified.split("."):
        # `vars`, not `getattr`: a module's or class's own `__getattr__` could import or run anything.
        value = vars(value).get(part) if isinstance(value, type) or value is sys.modules.get(module_name) else None
    if not isinstance(value, type):
        raise UnknownTypeError(f"{name} is not a type of this process")
    if any("__del__" in vars(base) for base in value.__mro__):
        raise UnknownTypeError(f"{name} has a __del__ and is never restored from a file")
    return value


def _can_be_found(kind: type) -> bool:
    """Whether looking up the name of `kind` returns it; false for a class defined in a function."""
    try:
        return find_type(_name(kind)) is kind
    except UnknownTypeError:
        return False


def _enum_apart(value: enum.Enum) -> str:
    if type(value)._member_map_.get(value.name or "") is not value:
        raise ValueError("a combination of flags has no name; store its value")
    return value.name


def _enum(content: Any) -> enum.Enum:
    name, member = content
    kind = find_type(name)
    if not issubclass(kind, enum.Enum) or member not in kind._member_map_:
        raise UnknownTypeError(f"{name} is not an enum with a member {member!r}")
    return kind._member_map_[member]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _dataclass_apart(value: Any) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    extra = sorted(set(getattr(value, "__dict__", ())) - fields.keys())
    if extra:
        raise ValueError(f"it has attributes that are not fields: {', '.join(extra)}")
    return fields


def _find_dataclass(content: Any) -> type:
    """Return the dataclass that `content` names, if it has the stored fields."""
    name, values = content
    kind = find_type(name)
    if not dataclasses.is_dataclass(kind):
        raise UnknownTypeError(f"{name} is not a dataclass")
    expected = {field.name for field in dataclasses.fields(kind)}
    if expected != values.keys():
        raise UnknownTypeError(
            f"{name} has the fields {sorted(expected)} in this process, but {sorted(values)} in the checkpoint"
        )
    return kind


def _dataclass(content: Any) -> Any:
    instance: Any = object.__new__(_find_dataclass(content))
    for field, value in content[1].items():
        object.__setattr__(instance, field, value)
    return instance


def _is_named_tuple(kind: type) -> bool:
    """Whether `kind` was made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _find_named_tuple(content: Any) -> Any:
    name, items = content
    kind: Any = find_type(name)
    if not _is_named_tuple(kind) or len(kind._fields) != len(items):
        raise UnknownTypeError(f"{name} is not a named tuple of {len(items)} fields")
    return kind


def _named_tuple(content: Any) -> Any:
    return tuple.__new__(_find_named_tuple(content), content[1])


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


def _find_wrapper(content: Any) -> Any:
    name, _ = content
    kind = find_type(name)
    if not _is_wrapper_class(kind):
        raise UnknownTypeError(f"{name} is not a class of tensors that wraps others")
    return kind


def _wrapper(content: Any) -> Any:
    parts = content[1]
    shape, stride = _torch().Size(parts["shape"]), tuple(parts["stride"])
    return _find_wrapper(content).__tensor_unflatten__(parts["tensors"], parts["context"], shape, stride)


def wrapped_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensor` itself or, for a wrapper, the tensors in it, with their names."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for part, value in _wrapper_apart(tensor)["tensors"].items():
        yield from wrapped_tensors(f"{part} of {name}", value)


_KINDS_BY_NAME = [
    Kind("$enum", _enum_apart, _enum, has=lambda value: isinstance(value, enum.Enum)),
    Kind("$dataclass", _dataclass_apart, _dataclass, _find_dataclass, _is_dataclass),
    Kind("$namedtuple", list, _named_tuple, _find_named_tuple, lambda value: _is_named_tuple(type(value))),
    Kind("$wrapper", _wrapper_apart, _wrapper, _find_wrapper, is_wrapper),
]
"""Kinds whose types are stored by name."""

_BY_TAG = {kind.tag: kind for kind in (*_KINDS_BY_TYPE.values(), _SPARSE, _INT, _FLOAT, *_KINDS_BY_NAME)}


def is_plain_key(key: object) -> bool:
    """Whether a key of a dictionary is stored as a key of an object."""
    return type(key) is str and key[:1] != "$"


class _Encoder:
    """One walk over a tree."""

    def __init__(self, table: TensorSink) -> None:
        self.table = table
        self.open_containers: set[int] = set()
        self.torch: Any = sys.modules.get("torch")
        self.tensors = () if self.torch is None else (self.torch.Tensor, self.torch.nn.Parameter)

    def encode(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _INLINE_INT_BITS else {_INT.tag: _INT.take_apart(value)}
        if kind is float:
            return value if math.isfinite(value) else {_FLOAT.tag: _FLOAT.take_apart(value)}
        if kind is list:
            return self._inside(value, path, self._list)
        if kind is CountedDict:  # hyperparameters of a job; a class may keep them in its state
            value, kind = uncounted(value), dict
        if kind is dict:
            known = self.table.repeat(value, path)
            return self._inside(value, path, self._dict) if known is None else known
        if kind in self.tensors or (self.torch and isinstance(value, self.torch.Tensor) and not is_wrapper(value)):
            if value.layout is self.torch.sparse_coo:
                return self._inside(value, path, functools.partial(self._by_kind, _SPARSE))
            return self.table.add_tensor(value, path)
        if (stored_as := _kind_of(value)) is not None:
            return self._inside(value, path, functools.partial(self._by_kind, stored_as))
        if (omegaconf := sys.modules.get("omegaconf")) is not None:
            kinds = omegaconf.DictConfig, omegaconf.ListConfig
            if kind in kinds:  # not resolved, so that no value of an environment variable gets into a checkpoint
                return self.encode(omegaconf.OmegaConf.to_container(value, resolve=False), path)
            if isinstance(value, type) and value in kinds:  # Lightning stores the type of the hyperparameters
                return value.__name__
        raise _refusal(value, path, _hint(value, path))

    def _inside(self, container: Any, path: Path, encode_content: Callable[[Any, Path], Any]) -> Any:
        """Encode the content of `container`; refuse cycles and too deep nesting."""
        if id(container) in self.open_containers:
            raise _refusal(container, path, "it contains itself")
        if len(self.open_containers) >= MAX_DEPTH:
            raise _refusal(container, path, f"it is nested deeper than {MAX_DEPTH} containers")
        self.open_containers.add(id(container))
        try:
            return encode_content(container, path)
        finally:
            self.open_containers.discard(id(container))

    def _list(self, items: list[Any], path: Path) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(items)]

    def _dict(self, items: dict[Any, Any], path: Path) -> dict[str, Any]:
        """Encode a dictionary as an object, or as pairs if a key needs an encoding."""
        if all(map(is_plain_key, items)):
            return {key: self.encode(item, (*path, key)) for key, item in items.items()}
        pairs = []
        for key, item in items.items():
            step = key if type(key) in (str, int) else repr(key)
            pairs.append([self.encode(key, (*path, "<key>")), self.encode(item, (*path, step))])
        return {"$dict": pairs}

    def _by_kind(self, kind: Kind, value: Any, path: Path) -> dict[str, Any]:
        """Encode a value by its `Kind`, as an object with the tag of the kind."""
        if kind.has is not None and not _can_be_found(type(value)):
            raise _refusal(value, path, "its class must be at the top level of a module and have no __del__")
        try:
            parts = kind.take_apart(value)
        except ValueError as error:
            raise _refusal(value, path, str(error)) from None
        encoded = self.encode(parts, path)
        return {kind.tag: [_name(type(value)), encoded] if kind.has is not None else encoded}


def _refusal(value: Any, path: Path, hint: str) -> UnstorableStateError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UnstorableStateError(format_path(path), name, hint)


def _hint(value: Any, path: Path) -> str:
    if isinstance(value, type):  # a type named by a file could be called by the code that loads it
        return "store its name" + (", as a string for `state_key`" if path[1:2] == ("callbacks",) else "")
    for method in ("state_dict", "get_state", "isoformat"):
        if callable(getattr(value, method, None)):
            return f"store its {method}()"
    return "store the values to build it from; if it is a hyperparameter, name it in `ignore` of save_hyperparameters"


class _Decoder:
    """One walk over stored JSON."""

    def __init__(self, tensor_of: TensorSource) -> None:
        self.tensor_of = tensor_of

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
        """Return the value of an object whose only key is `tag`."""
        if tag == "$dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag == "$tensor":
            return self.tensor_of(content)
        if tag not in _BY_TAG:
            raise CheckpointError(f"the checkpoint holds a value of kind {tag!r}; a newer genlight may have written it")
        return self._make(_BY_TAG[tag], self.decode(content))

    def _make(self, kind: Kind, parts: Any) -> Any:
        return kind.put_together(parts)


class _Checker(_Decoder):
    """Decodes plain values, and only looks up the types of all others, without building a value of them."""

    def __init__(self, tensor_of: TensorSource, knows_types: bool) -> None:
        super().__init__(tensor_of)
        self._depth = 0
        self._knows_types = knows_types

    def decode(self, tree: Any) -> Any:
        # Fail before Python's recursion limit: a load has a deeper stack than a check, and would reach it earlier.
        if self._depth > _DEEPEST_TREE:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} containers")
        self._depth += 1
        try:
            return super().decode(tree)
        finally:
            self._depth -= 1

    def _make(self, kind: Kind, parts: Any) -> Any:
        try:
            if kind.check is None:
                return kind.put_together(parts)
            kind.check(parts)
        except UnknownTypeError as error:
            if self._knows_types or not error.may_be_imported:
                raise
        return object()
