"""The keys of a job spec as a table, read from the types in `spec`."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from msgspec import Meta

from .spec import JobSpec, Rule

__all__ = ["ALIASES", "Key", "inner_keys", "keys_of", "spec_keys"]

ALIASES: Mapping[str, Mapping[str, str]] = {
    "": {"request_id": "run_id"},
    "inputs": {
        "base_model_url": "base_model_ref",
        "dataset_parquet_urls": "dataset_parquet_refs",
        "resume_checkpoint_url": "resume_checkpoint_ref",
    },
}
"""Other spellings of keys, by block; the block of the top level is the empty text."""


@dataclass(frozen=True)
class Key:
    """One key of a job spec or of a block in it."""

    name: str
    type: Any
    """What msgspec is to convert a value to, for a plain value; the item's or block's type otherwise."""
    rule: Rule
    block: type[Any] | None = None
    """The dataclass of a key that holds an object with known keys."""
    item: Key | None = None
    """What each entry of a list must be."""
    description: str = ""
    examples: tuple[Any, ...] = ()
    default: Any = None

    @property
    def is_text(self) -> bool:
        """Whether the value is a text, so that ``--set key=17`` means the text "17"."""
        return self.type is not None and self.item is None and _plain(self.type) is str


@cache
def keys_of(spec: Any) -> Mapping[str, Key]:
    """The keys of one of the dataclasses in `spec`, by name, in order."""
    hints = typing.get_type_hints(spec, include_extras=True)
    return {f.name: _key(f.name, hints[f.name], _default(f)) for f in dataclasses.fields(spec)}


def spec_keys() -> Mapping[str, Key]:
    """The keys of the top level."""
    return keys_of(JobSpec)


def inner_keys(name: str) -> Mapping[str, Key]:
    """The keys of the block `name`, such as ``dataset``; empty where it is not a block."""
    key = spec_keys().get(name)
    return keys_of(key.block) if key is not None and key.block is not None else {}


def _default(of: dataclasses.Field[Any]) -> Any:
    if of.default_factory is not dataclasses.MISSING:
        return of.default_factory()
    return None if of.default is dataclasses.MISSING else of.default


def _key(name: str, annotation: Any, default: Any = None) -> Key:
    metas = _metas(annotation)
    description = next((meta.description for meta in metas if meta.description), "")
    examples = next((tuple(meta.examples) for meta in metas if meta.examples), ())
    value = _required(annotation)
    plain = _plain(value)
    common = {"description": description, "examples": examples, "default": default}
    if dataclasses.is_dataclass(plain):
        assert isinstance(plain, type)
        return Key(name, None, Rule("an object"), block=plain, **{**common, "description": description or _doc(plain)})
    if typing.get_origin(plain) is tuple:
        return Key(name, None, Rule("a list"), item=_key(name, typing.get_args(plain)[0]), **common)
    rule = next(meta.extra["rule"] for meta in _metas(value) if meta.extra and "rule" in meta.extra)
    return Key(name, value, rule, **common)


def _doc(spec: type[Any]) -> str:
    return (spec.__doc__ or "").partition("\n")[0]


def _metas(annotation: Any) -> list[Meta]:
    return [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, Meta)]


def _required(annotation: Any) -> Any:
    """`annotation` without ``| None``; what ``Annotated`` says beside a union is said of the key, not of the value."""
    plain = _plain(annotation)
    if typing.get_origin(plain) not in (types.UnionType, typing.Union):
        return annotation
    (value,) = (member for member in typing.get_args(plain) if member is not type(None))
    return value


def _plain(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation
