"""Values of Python's standard library that JSON does not know, as tagged JSON.

Each codec turns a value of exactly one type into children (which the state tree encodes in turn) and back.
"""

from __future__ import annotations

import argparse
import base64
import datetime as dt
import decimal
import fractions
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CODECS_BY_TAG", "CODECS_BY_TYPE", "Codec"]


@dataclass(frozen=True)
class Codec:
    """How values of one type become children and back.

    `take_apart` returns a list, dict or scalar of encodable values; it raises ValueError for a value of the type that
    cannot be stored, with what to do about it.
    """

    tag: str
    kind: type
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
    return defaultdict(None if name is None else _FACTORIES[name], [tuple(pair) for pair in pairs])


def _pairs(value: dict[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _counter_together(pairs: list[Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, count in pairs:
        counter[key] = count
    return counter


def _offset_seconds(zone: dt.tzinfo | None) -> Any:
    """None for no zone, else its fixed offset as ``timedelta``."""
    if zone is None:
        return None
    if type(zone) is not dt.timezone:
        raise ValueError("only times without a zone, or with a fixed offset (datetime.timezone), can be stored")
    return zone.utcoffset(None)


def _datetime_apart(value: dt.datetime) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _offset_seconds(value.tzinfo)]


def _datetime_together(parts: list[Any]) -> dt.datetime:
    text, fold, offset = parts
    zone = None if offset is None else dt.timezone(offset)
    return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _time_apart(value: dt.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _offset_seconds(value.tzinfo)]


def _time_together(parts: list[Any]) -> dt.time:
    text, fold, offset = parts
    zone = None if offset is None else dt.timezone(offset)
    return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _attributes(value: object) -> dict[str, Any]:
    return dict(vars(value))


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


_CODECS = [
    Codec("$tuple", tuple, list, tuple),
    Codec("$set", set, list, set),
    Codec("$frozenset", frozenset, list, frozenset),
    Codec("$deque", deque, lambda d: [d.maxlen, list(d)], lambda parts: deque(parts[1], parts[0])),
    Codec("$ordered", OrderedDict, _pairs, lambda pairs: OrderedDict(tuple(pair) for pair in pairs)),
    Codec("$default", defaultdict, _defaultdict_apart, _defaultdict_together),
    Codec("$counter", Counter, _pairs, _counter_together),
    Codec("$bytes", bytes, _base64, _unbase64),
    Codec("$bytearray", bytearray, _base64, lambda text: bytearray(_unbase64(text))),
    Codec("$complex", complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    Codec("$range", range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    Codec("$slice", slice, lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    Codec("$path", type(pathlib.Path()), str, pathlib.Path),
    Codec("$purepath", pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    Codec("$datetime", dt.datetime, _datetime_apart, _datetime_together),
    Codec("$date", dt.date, dt.date.isoformat, dt.date.fromisoformat),
    Codec("$time", dt.time, _time_apart, _time_together),
    Codec("$timedelta", dt.timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda p: dt.timedelta(*p)),
    Codec("$decimal", decimal.Decimal, str, decimal.Decimal),
    Codec("$fraction", fractions.Fraction, lambda f: [f.numerator, f.denominator], lambda p: fractions.Fraction(*p)),
    Codec("$uuid", uuid.UUID, str, uuid.UUID),
    Codec("$arguments", argparse.Namespace, _attributes, lambda found: argparse.Namespace(**found)),
    Codec("$namespace", types.SimpleNamespace, _attributes, lambda found: types.SimpleNamespace(**found)),
]

CODECS_BY_TYPE = {codec.kind: codec for codec in _CODECS}
CODECS_BY_TAG = {codec.tag: codec for codec in _CODECS}
