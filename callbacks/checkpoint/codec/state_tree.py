"""A tree of Python values as JSON plus a table of tensors, and back to equal values of equal types.

What JSON has is stored as JSON: None, booleans, integers, finite floats, text, lists and dictionaries with text keys.
Everything else is an object with a single key that starts with ``$`` (so a dictionary that has such a key is itself
stored as ``{"$dict": [[key, value], …]}``). Tensors and arrays become references into safetensors files. Nothing
is pickled: what has no representation here is refused with its path.

The module imports neither torch nor NumPy: a tree that holds tensors can exist only where torch is loaded.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Protocol

from ....adapter.contract.exceptions import CheckpointError, UnstorableStateError
from . import named_types as known_types
from .omegaconf_values import build_config, config_type, config_type_name, take_config_apart
from .stdlib_types import CODECS_BY_TAG, CODECS_BY_TYPE

__all__ = ["Attribute", "Path", "TensorSink", "TensorSource", "check", "decode", "encode", "format_path"]

MAX_DEPTH = 100
"""Containers within containers; deeper trees would exceed Python's recursion limit while loading."""

_DEEPEST_TREE = 2 * MAX_DEPTH + 10
"""Stored values within stored values: a container may be stored as an object with a list in it."""

_INLINE_INT_BITS = 63
_DEVICE = re.compile(r"[a-z]{1,32}(:\d{1,3})?")


@dataclasses.dataclass(frozen=True)
class Attribute:
    """A part of a path that is a field, not a key."""

    name: str


Path = tuple[Any, ...]
"""Root name, then keys, indices and `Attribute`\\ s."""


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
        if kind is dict:
            return self._inside(value, path, lambda: self._dict(value, path))
        if kind in CODECS_BY_TYPE:
            return self._inside(value, path, lambda: self._by_codec(value, path))
        return self._by_kind(value, kind, path)

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
        return {"$dict": self._pairs(items, path)}

    def _pairs(self, items: dict[Any, Any], path: Path) -> list[Any]:
        return [[self.encode(key, (*path, "<key>")), self.encode(item, (*path, key))] for key, item in items.items()]

    def _by_codec(self, value: Any, path: Path) -> dict[str, Any]:
        codec = CODECS_BY_TYPE[type(value)]
        try:
            parts = codec.take_apart(value)
        except ValueError as error:
            raise _refusal(value, path, str(error)) from None
        return {codec.tag: self.encode(parts, path)}

    def _by_kind(self, value: Any, kind: type, path: Path) -> Any:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, kind, path)
        if numpy is not None and kind is numpy.ndarray:
            return {"$ndarray": self.sink.add_array(value, path)}
        if numpy is not None and isinstance(value, numpy.generic):
            return {"$npscalar": _numpy_scalar(value, path)}
        for tag, text in _named_constants(value, kind, torch, numpy):
            return {tag: text}
        if isinstance(value, enum.Enum):
            if type(value)._member_map_.get(value.name or "") is not value:
                raise _refusal(value, path, "a combination of flags has no name; store its value")
            return {"$enum": [self._known(value, kind, path), value.name]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._inside(value, path, lambda: self._dataclass(value, kind, path))
        if known_types.is_named_tuple(kind):
            name = self._known(value, kind, path)
            return self._inside(value, path, lambda: {"$namedtuple": [name, self._list(list(value), path)]})
        if config_type_name(kind) is not None:
            return self._inside(value, path, lambda: {"$omegaconf": self.encode(take_config_apart(value), path)})
        if (config := config_type_name(value)) is not None:
            return {"$omegaconftype": config}
        raise _refusal(value, path, _hint(value, path))

    def _dataclass(self, value: Any, kind: type, path: Path) -> dict[str, Any]:
        fields = {
            field.name: self.encode(getattr(value, field.name), (*path, Attribute(field.name)))
            for field in dataclasses.fields(value)
        }
        extra = sorted(set(getattr(value, "__dict__", ())) - fields.keys())
        if extra:
            raise _refusal(value, path, f"it has attributes that are not fields: {', '.join(extra)}")
        return {"$dataclass": [self._known(value, kind, path), fields]}

    def _tensor(self, value: Any, kind: type, path: Path) -> dict[str, Any]:
        from .wrapper_tensors import is_wrapper, take_wrapper_apart

        if not is_wrapper(value):
            return {"$tensor": self.sink.add_tensor(value, path)}
        name, parts = self._known(value, kind, path), take_wrapper_apart(value)
        stored: dict[str, Any] = self._inside(value, path, lambda: {"$wrapper": [name, self._dict(parts, path)]})
        return stored

    @staticmethod
    def _known(value: Any, kind: type, path: Path) -> str:
        name = known_types.type_name(kind)
        if name is None:
            raise _refusal(value, path, "its class must be at the top level of a module and have no __del__")
        return name


def _refusal(value: Any, path: Path, hint: str) -> UnstorableStateError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UnstorableStateError(format_path(path), name, hint)


def _hint(value: Any, path: Path) -> str:
    if isinstance(value, type):  # which a file could name to have it called by the code that finds it there
        return "store its name" + (", as a string for `state_key`" if path[1:2] == ("callbacks",) else "")
    if callable(getattr(value, "state_dict", None)):
        return "store its state_dict()"
    if callable(getattr(value, "get_state", None)):
        return "store its get_state()"
    if callable(value):
        return "store what is needed to build it again (with save_hyperparameters, name it in `ignore`)"
    return "name it in `ignore` of save_hyperparameters" if "hyper_parameters" in path[:2] else ""


def _numpy_scalar(value: Any, path: Path) -> list[str]:
    if value.dtype.hasobject:
        raise _refusal(value, path, "it holds Python objects")
    return [value.dtype.str, value.tobytes().hex()]


def _named_constants(value: Any, kind: type, torch: Any, numpy: Any) -> list[tuple[str, Any]]:
    """Types, devices and sizes of torch and NumPy, which are stored by name."""
    if torch is not None:
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return [("$torch", str(value).removeprefix("torch."))]
        if kind is torch.device:
            return [("$device", str(value))]
        if kind is torch.Size:
            return [("$size", list(value))]
    if numpy is not None and isinstance(value, numpy.dtype) and value.names is None and not value.hasobject:
        return [("$npdtype", value.str)]
    return []


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
        if tag in CODECS_BY_TAG:
            return CODECS_BY_TAG[tag].put_together(self.decode(content))
        decode_tag = _DECODERS.get(tag)
        if decode_tag is None:
            raise CheckpointError(f"the checkpoint holds a value of kind {tag!r}; a newer genlight may have written it")
        try:
            return decode_tag(self, content)
        except known_types.UnknownTypeError as error:
            raise CheckpointError(f"the checkpoint cannot be loaded here: {error}") from None

    def _dict(self, pairs: list[Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in pairs}


class _Checker(_Decoder):
    """Decodes what Python's own library and torch can hold, and looks for the types that all else is made of."""

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

    def _tagged(self, tag: str, content: Any) -> Any:
        if tag in ("$dataclass", "$namedtuple", "$enum", "$wrapper"):
            name, inner = content
            if not isinstance(name, str) or isinstance(inner, str) is not (tag == "$enum"):
                raise TypeError(f"{tag} has no name and content")
            self.decode({} if tag == "$enum" else inner)
            if self._knows_types or name.partition(":")[0] in sys.modules:
                _look_for_type(tag, name, inner)
            return object()
        if tag in ("$torch", "$device", "$size"):
            return self._of_torch(tag, content)
        return super()._tagged(tag, content)

    def _of_torch(self, tag: str, content: Any) -> Any:
        if tag == "$size":
            if not isinstance(content, list) or not all(type(size) is int and 0 <= size < 2**63 for size in content):
                raise TypeError("a size is not a list of numbers")
        elif not isinstance(content, str):
            raise TypeError(f"{tag} is not a string")
        elif tag == "$device" and not _DEVICE.fullmatch(content):
            raise ValueError(f"there is no device {content!r}")
        if "torch" in sys.modules:
            return super()._tagged(tag, content)
        return object()


def _look_for_type(tag: str, name: str, inner: Any) -> None:
    """Raise where this process has no such type as a tagged value names, or one that is made of other parts."""
    try:
        if tag == "$enum":
            known_types.enum_member(name, inner)
        elif tag == "$dataclass":
            known_types.dataclass_of(name, inner)
        elif tag == "$namedtuple":
            known_types.named_tuple_of(name, inner)
        else:
            from .wrapper_tensors import wrapper_of

            wrapper_of(name)
    except known_types.UnknownTypeError as error:
        raise CheckpointError(f"the checkpoint cannot be loaded here: {error}") from None


def _decode_wrapper(name: str, parts: dict[str, Any]) -> Any:
    from .wrapper_tensors import build_wrapper

    return build_wrapper(name, parts)


def _decode_numpy_scalar(content: list[str]) -> Any:
    import numpy as np

    dtype, data = np.dtype(content[0]), bytes.fromhex(content[1])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros((), dtype)[()]


def _decode_torch_constant(name: str) -> Any:
    import torch

    value = vars(torch).get(name)
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise known_types.UnknownTypeError(f"torch.{name} is not a dtype, layout or memory format of this torch")
    return value


def _decode_device(name: str) -> Any:
    import torch

    return torch.device(name)


def _decode_size(sizes: list[int]) -> Any:
    import torch

    return torch.Size(sizes)


def _decode_numpy_dtype(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$dict": lambda self, pairs: self._dict(pairs),
    "$int": lambda _, text: int(text, 16),
    "$float": lambda _, text: float(text),
    "$tensor": lambda self, reference: self.source.tensor(reference),
    "$wrapper": lambda self, content: _decode_wrapper(content[0], self.decode(content[1])),
    "$ndarray": lambda self, reference: self.source.array(reference),
    "$npscalar": lambda _, content: _decode_numpy_scalar(content),
    "$npdtype": lambda _, name: _decode_numpy_dtype(name),
    "$torch": lambda _, name: _decode_torch_constant(name),
    "$device": lambda _, name: _decode_device(name),
    "$size": lambda _, sizes: _decode_size(sizes),
    "$omegaconf": lambda self, parts: build_config(self.decode(parts)),
    "$omegaconftype": lambda _, name: config_type(name),
    "$enum": lambda _, content: known_types.enum_member(*content),
    "$dataclass": lambda self, content: known_types.build_dataclass(
        content[0], {name: self.decode(item) for name, item in content[1].items()}
    ),
    "$namedtuple": lambda self, content: known_types.build_named_tuple(content[0], self.decode(content[1])),
}
