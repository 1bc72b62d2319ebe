"""The settings of a job as a table, read from the annotations in `spec`."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .spec import LARGEST, JobSpec, Rule, Settings

__all__ = ["Key", "all_keys", "job_keys", "key_at", "keys_at", "keys_of", "settings_keys"]


@dataclass(frozen=True)
class Key:
    """One key of a job, or of a block in it."""

    name: str
    type: Any
    """The type that msgspec converts a plain value to; of a block its struct, of a list ``tuple`` or ``frozenset``."""
    rule: Rule
    block: type[msgspec.Struct] | None = None
    """The struct of a key that holds an object with known keys."""
    is_path: bool = False
    """Whether the text becomes a ``Path``."""
    item: Key | None = None
    """The key that each entry of a list is read as."""
    least_entries: int = 0
    examples: tuple[Any, ...] = ()
    variable: str = ""
    """The environment variable that gives it."""
    alias: str = ""
    """Another spelling of its name in a job file."""
    group: str = ""
    """Heading of the keys from this one on, in ``genlight run --help``."""
    default: Any = None
    is_required: bool = False
    owner: type[msgspec.Struct] | None = None
    """The struct that it is a key of."""

    @property
    def description(self) -> str:
        """Its purpose: the text below its declaration."""
        return "" if self.owner is None else _texts(self.owner)[self.name]

    @property
    def is_text(self) -> bool:
        """Whether the value is a text, so that ``--set key=17`` means the text "17"."""
        return self.type_is(str)

    def type_is(self, plain: type) -> bool:
        """Whether it is a plain value of that type."""
        return _plain(self.type) is plain

    def fault(self, value: Any) -> str:
        """The words for what was expected in place of a plain `value`; empty where it can be used."""
        try:
            converted = msgspec.convert(value, self.type)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):  # the last of half a surrogate pair
            converted = None
        if converted is not None and self.rule.holds(converted):
            return ""
        too_large = type(value) is int and value > LARGEST and ">=" in self.rule.expected
        return f"{self.rule.expected} and below 2**63" if too_large else self.rule.expected


def job_keys() -> Mapping[str, Key]:
    """The keys of the top level of a job file."""
    return keys_of(JobSpec)


def settings_keys() -> Mapping[str, Key]:
    """The same, and the settings that a job file cannot give."""
    return keys_of(Settings)


@cache
def keys_of(struct: type[msgspec.Struct]) -> Mapping[str, Key]:
    """The keys of one of the structs in `spec`, by name, in order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    keys = {}
    for each in msgspec.structs.fields(struct):
        default = None if each.required else each.default
        if each.default_factory is not msgspec.NODEFAULT:
            default = each.default_factory()
        key = _key(each.name, hints[each.name])
        keys[each.name] = replace(key, default=default, is_required=each.required, owner=struct)
    return keys


def key_at(path: tuple[str, ...]) -> Key | None:
    """The key at `path`, whose first part is a setting; None where there is none."""
    return keys_at(path[:-1]).get(path[-1]) if path else None


def keys_at(path: tuple[str, ...]) -> Mapping[str, Key]:
    """The keys of the block at `path`, of all settings at its root; none where it is not a block."""
    if not path:
        return settings_keys()
    key = key_at(path)
    return keys_of(key.block) if key is not None and key.block is not None else {}


def all_keys() -> Iterator[tuple[str, Key]]:
    """Every setting with its dotted name; those of a block follow it."""
    for name, key in settings_keys().items():
        yield name, key
        if key.block is not None:
            yield from ((f"{name}.{inner}", each) for inner, each in keys_of(key.block).items())


@cache
def _texts(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """The text below each field of a struct, from its source."""
    found = {}
    for cls in reversed([cls for cls in struct.__mro__ if cls.__module__ == JobSpec.__module__]):
        (declared,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(declared, ast.ClassDef)
        for above, below in itertools.pairwise(declared.body):
            if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
                found[above.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


def _key(name: str, annotation: Any) -> Key:
    value = _without_none(annotation)
    plain, said = _plain(value), [*getattr(annotation, "__metadata__", ()), *getattr(value, "__metadata__", ())]
    rules, metas = [each for each in said if isinstance(each, Rule)], [each for each in said if isinstance(each, Meta)]
    common: dict[str, Any] = {key: text for meta in metas for key, text in (meta.extra or {}).items()}
    common["examples"] = next((tuple(meta.examples) for meta in metas if meta.examples), ())
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return Key(name, plain, Rule("an object"), block=plain, **common)
    if typing.get_origin(plain) in (tuple, frozenset):
        least = next((meta.min_length for meta in metas if meta.min_length), 0)
        entry = _key(name, typing.get_args(plain)[0])
        return Key(name, typing.get_origin(plain), Rule("a list"), item=entry, least_entries=least, **common)
    is_path = plain is Path
    # The last rule is the one that stands nearest to the key.
    rule = rules[-1] if rules else _rule_of(plain, metas)
    return Key(name, str if is_path else value, rule, is_path=is_path, **common)


def _rule_of(plain: Any, metas: list[Meta]) -> Rule:
    """The words for a type that says by itself what it takes."""
    if typing.get_origin(plain) is Literal:
        choices = [json.dumps(choice) for choice in typing.get_args(plain)]
        return Rule(" or ".join([", ".join(choices[:-1]), choices[-1]]))
    if plain is int:
        least = next(meta.ge for meta in metas if meta.ge is not None)
        return Rule(f"an integer >= {least}")
    words = {bool: "true or false", dict: "an object", list: "a list"}
    return Rule(words[typing.get_origin(plain) or plain])


def _without_none(annotation: Any) -> Any:
    """`annotation` without ``| None``."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    (value,) = (member for member in typing.get_args(annotation) if member is not type(None))
    return value


def _plain(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation
