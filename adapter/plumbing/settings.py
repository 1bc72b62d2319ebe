"""Declarations of settings, and the table of keys that `keys_of` derives from them.

A block of settings is a msgspec struct or a dataclass. Each field has a type, a `Rule` if the type is not precise
enough, a default, and a text below it for the reference. The settings of a job, of a feed and of uploads are declared
in one place each: `adapter.job.spec`, `adapter.feed.options`, `reporters.uploads.config`. This module has the types
that several of them use.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from typing_extensions import override

from .redaction import HIDDEN, without_secrets
from .text import is_storable
from .urls import hide_urls

LARGEST = 2**63 - 1
"""Largest integer that Arrow, torch and JSON readers in other languages can represent."""

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off", "none"})

LONGEST_VALUE = 80
_NUMBER_LIKE = re.compile(r"[-+]?(\d{1,12}(\.\d{0,12})?(e[-+]?\d{1,4})?|nan|inf(inity)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """A condition on a value beyond its type, given in the annotation of a key; msgspec ignores it."""

    expected: str
    """Description of a valid value, for messages."""
    holds: Callable[[Any], bool] = lambda _: True
    secret: bool = False
    """Whether no message may show the value."""
    code: str = "startup.invalid_job_spec"
    """The startup code of the error about an invalid value."""
    way_out: str = ""
    relative: Literal["", "path", "reference"] = ""
    """When a relative path is made absolute: ``path`` always, except URLs; ``reference`` if the text can be a path."""


def example(value: Any) -> Meta:
    """Declare an example value for the reference."""
    return Meta(examples=[value])


def variable(name: str) -> Meta:
    """Declare the environment variable that gives the setting."""
    return Meta(extra={"variable": name})


def alias(name: str) -> Meta:
    """Declare another spelling of the key in a job file."""
    return Meta(extra={"alias": name})


def is_read(read: Callable[[str], Any], text: str) -> bool:
    """Whether `read` accepts `text` without a ``ValueError``."""
    try:
        read(text)
    except ValueError:
        return False
    return True


LINE = Rule("a string without control characters", is_storable)
NONBLANK = Rule("a non-empty string", lambda text: bool(text.strip()) and is_storable(text))
_SECONDS = Rule("a number of seconds >= 0", math.isfinite, code="startup.invalid_timeout", way_out="0 means no limit.")
NonBlank: TypeAlias = Annotated[str, NONBLANK]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0), _SECONDS]


def shown(block: Any) -> str:
    """Return the ``repr`` of a block, without secrets and credentials of URLs."""
    kind: Any = type(block)
    values = without_secrets({name: getattr(block, name) for name in keys_of(kind)})
    return f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that belong together; its ``repr`` shows no secret and no credentials of URLs."""

    @override
    def __repr__(self) -> str:
        return shown(self)


@dataclass(frozen=True)
class Key:
    """One declared setting."""

    name: str
    type: Any
    """The type that msgspec converts a plain value to; the block itself for a block, ``tuple`` or ``frozenset`` for a
    list."""
    rule: Rule
    block: Any = None
    """The block of a key that holds an object with known keys."""
    is_path: bool = False
    """Whether the text becomes a ``Path``."""
    item: Key | None = None
    """The key that describes each entry of a list."""
    examples: tuple[Any, ...] = ()
    variable: str = ""
    """The environment variable that gives it."""
    alias: str = ""
    """Another spelling of its name in a job file."""
    default: Any = None
    is_required: bool = False

    def type_is(self, plain: type) -> bool:
        """Whether its values have the plain type `plain`."""
        return _plain(self.type) is plain

    def fault(self, value: Any) -> Rule | None:
        """Return the rule that a plain `value` breaks, or None if it is valid."""
        if self.item is not None:
            if not isinstance(value, (list, tuple, set, frozenset)) or not self.rule.holds(value):
                return replace(self.rule, expected=f"{self.rule.expected}, each {self.item.rule.expected}")
            broken = next((rule for entry in value if (rule := self.item.fault(entry))), None)
            return broken and replace(broken, expected=f"of each entry {broken.expected}")
        try:
            converted = msgspec.convert(value, self.type)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):  # the last for an unpaired surrogate
            converted = None
        if converted is not None and self.rule.holds(converted):
            return None
        too_large = type(value) is int and value > LARGEST and ">=" in self.rule.expected
        return replace(self.rule, expected=f"{self.rule.expected} and below 2**63") if too_large else self.rule


@cache
def keys_of(block: Any) -> Mapping[str, Key]:
    """Return the keys of a block, a struct or a dataclass, by name, in order."""
    hints = typing.get_type_hints(block, include_extras=True)
    fields: Any = dataclasses.fields(block) if dataclasses.is_dataclass(block) else msgspec.structs.fields(block)
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    keys = {}
    for each in fields:
        default = each.default if each.default_factory in missing else each.default_factory()
        given = {"is_required": True} if default in missing else {"default": default}
        keys[each.name] = replace(_key(each.name, hints[each.name]), **given)
    return keys


def value_of(key: Key | None, text: str) -> Any:
    """Parse a text for `key`: JSON, a number, a true or false word, entries separated by commas, or the text itself.

    A key whose type is a text keeps the typed text, so that ``run_id=17`` needs no quotes.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if key is None:
        return value
    if key.type_is(str):
        return value if isinstance(value, str | None) else text
    if key.type_is(bool) and text.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        return is_true(text)
    if key.item is not None and key.variable and not isinstance(value, list | None):
        return [entry for entry in re.split(r"[\s,]+", text) if entry]
    return value


def is_true(text: str) -> bool:
    """Whether `text` is one of the true words, in any case; every other text is false."""
    return text.strip().lower() in TRUE_WORDS


def faults_of(options: Any, block: Any) -> list[str]:
    """Return a sentence for each invalid value that `options` has for the keys of `block`."""
    found = []
    for name, key in keys_of(block).items():
        value = getattr(options, name)
        broken = None if value is None and key.default is None else key.fault(value)
        if broken:
            found.append(refusal(name, broken, value, may_be_secret=bool(key.variable)))
    return found


def refusal(name: str, rule: Rule, value: Any, *, may_be_secret: bool = False) -> str:
    """Return the sentence about a setting whose value breaks its rule.

    Args:
        name: The setting, or its source.
        rule: Its rule.
        value: The value.
        may_be_secret: Whether texts must not be shown.
    """
    received = render_text(value) if may_be_secret else render_value(value, secret=rule.secret)
    return f"Invalid `{name}`. Expected {rule.expected}, but received {received}. {rule.way_out}".rstrip()


def render_value(value: Any, *, secret: bool = False) -> str:
    """Render `value` for a message: on one line, without credentials of URLs; hidden if `secret`.

    Only the length of a long value is shown: its beginning might be part of a secret.
    """
    if secret:
        return HIDDEN
    try:
        text = hide_urls(json.dumps(value, ensure_ascii=True, default=repr))
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= LONGEST_VALUE else f"a value of {len(text)} characters"


def render_text(value: Any) -> str:
    """Render the value of a variable for a message: a number, or the length of any other text.

    Users mix variables up, so any of them may hold a token.
    """
    return str(value) if _NUMBER_LIKE.fullmatch(str(value)) else f"a string of length {len(str(value))}"


def _key(name: str, annotation: Any) -> Key:
    """Return the key that an annotation declares."""
    value = _without_none(annotation)
    plain, metadata = _plain(value), [*getattr(annotation, "__metadata__", ()), *getattr(value, "__metadata__", ())]
    rules = [each for each in metadata if isinstance(each, Rule)]
    metas = [each for each in metadata if isinstance(each, Meta)]
    common: dict[str, Any] = {key: text for meta in metas for key, text in (meta.extra or {}).items()}
    common["examples"] = next((tuple(meta.examples) for meta in metas if meta.examples), ())
    # The last rule is the one nearest to the key.
    rule = rules[-1] if rules else _rule_of(plain, metas)
    if isinstance(plain, type) and (issubclass(plain, msgspec.Struct) or dataclasses.is_dataclass(plain)):
        return Key(name, plain, rule, block=plain, **common)
    if typing.get_origin(plain) in (tuple, frozenset, Sequence):
        kind = frozenset if typing.get_origin(plain) is frozenset else tuple
        return Key(name, kind, rule, item=_key(name, typing.get_args(plain)[0]), **common)
    is_path = plain is Path
    return Key(name, str if is_path else value, rule, is_path=is_path, **common)


def _rule_of(plain: Any, metas: list[Meta]) -> Rule:
    """Return the rule of a type that needs no declared one."""
    if typing.get_origin(plain) is Literal:
        choices = [json.dumps(choice) for choice in typing.get_args(plain)]
        return Rule(" or ".join([", ".join(choices[:-1]), choices[-1]]))
    words: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", Any: "anything"}
    words |= dict.fromkeys((list, tuple, frozenset, Sequence), "a list")
    limits = [limit for meta in metas for limit in ((">=", meta.ge), (">", meta.gt))]
    bounds = [f" {relation} {least}" for relation, least in limits if least is not None]
    return Rule("".join([words.get(typing.get_origin(plain) or plain, "an object"), *dict.fromkeys(bounds)]))


def _without_none(annotation: Any) -> Any:
    """Return `annotation` without ``| None``; ``Any`` if several types remain."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 else Any


def _plain(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is Annotated else annotation
