"""Slurm's hostlist expressions, as ``scontrol show hostnames`` and ``scontrol show hostlist`` have them.

Order and duplicates are kept. Of three or more brackets scontrol varies the last one fastest and the last but one
slowest; ranks count nodes in that order, so it is kept as well. A suffix after the last bracket (``n[1-2]-ib``), which
releases before 23 refuse, is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["MOST_HOSTS", "compress_hostlist", "expand_hostlist"]

MOST_HOSTS = 65_536
"""Slurm's own limit on a range; here it holds for the whole list."""

_SEPARATOR = re.compile(r"[,\s]+")
_PLAIN = re.compile(r"[\w.:-]*", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>\d{1,18})", re.ASCII | re.DOTALL)
_RANGE = re.compile(r"(?P<low>\d{1,18})(-(?P<high>\d{1,18}))?", re.ASCII)


@dataclass(frozen=True)
class _Range:
    """Consecutive numbers, of at least so many digits."""

    low: int
    high: int
    width: int

    def __len__(self) -> int:
        return self.high - self.low + 1

    def numbers(self) -> Iterator[str]:
        return (f"{number:0{self.width}d}" for number in range(self.low, self.high + 1))

    def __str__(self) -> str:
        low = f"{self.low:0{self.width}d}"
        return low if self.high == self.low else f"{low}-{self.high:0{self.width}d}"


_Part = str | list[_Range]


def expand_hostlist(text: str) -> list[str]:
    """The host names that a hostlist expression stands for, such as ``n[9-10],rack[1-2]n[3-4]``.

    Raises:
        ValueError: It names no host, is malformed, or stands for more than 65,536 hosts; quotes it.
    """
    parsed = [_parsed(word, text) for word in _words(text)]
    if not parsed:
        raise ValueError(f"Invalid hostlist {text!r}. It names no host.")
    if sum(_count(parts) for parts in parsed) > MOST_HOSTS:
        raise ValueError(f"Invalid hostlist {text!r}. It stands for more than {MOST_HOSTS:,} hosts.")
    return [name for parts in parsed for name in _names(parts)]


def compress_hostlist(names: Iterable[str]) -> str:
    """The shortest expression that scontrol writes for these host names, in their order; undoes `expand_hostlist`.

    Raises:
        ValueError: A name is none that a host can have, or there are more than 65,536.
    """
    groups: list[tuple[str, list[_Range]]] = []
    for count, name in enumerate(names, start=1):
        if count > MOST_HOSTS:
            raise ValueError(f"Invalid hostlist. It has more than {MOST_HOSTS:,} hosts.")
        if not name or not _PLAIN.fullmatch(name):
            raise ValueError(f"Invalid host name {name!r}.")
        _append(groups, name)
    return ",".join(_shown(prefix, ranges) for prefix, ranges in groups)


def _words(text: str) -> Iterator[str]:
    """The comma-separated parts, of which those in brackets belong to their word."""
    word, depth = "", 0
    for piece in re.split(r"([\[\]]|[,\s]+)", text):
        depth += (piece == "[") - (piece == "]")
        if depth not in (0, 1):
            raise ValueError(f"Invalid hostlist {text!r}. Its brackets do not pair up.")
        if depth == 0 and _SEPARATOR.fullmatch(piece):
            yield from filter(None, [word])
            word = ""
        else:
            word += piece
    if depth:
        raise ValueError(f"Invalid hostlist {text!r}. A bracket is not closed.")
    yield from filter(None, [word])


def _parsed(word: str, text: str) -> list[_Part]:
    """A word as texts and, at odd places, the ranges of its brackets."""
    parts: list[_Part] = []
    for place, piece in enumerate(re.split(r"[\[\]]", word)):
        if place % 2:
            parts.append([_range(entry, text) for entry in piece.split(",")])
        elif _PLAIN.fullmatch(piece):
            parts.append(piece)
        else:
            raise ValueError(f"Invalid hostlist {text!r}. No host can be named {piece!r}.")
    return parts


def _range(entry: str, text: str) -> _Range:
    match = _RANGE.fullmatch(entry)
    if match is None:
        raise ValueError(f"Invalid hostlist {text!r}. {entry!r} is not a number or a range of numbers.")
    low, high = int(match["low"]), int(match["high"] or match["low"])
    if high < low:
        raise ValueError(f"Invalid hostlist {text!r}. The range {entry!r} ends before it begins.")
    return _Range(low, high, len(match["low"]))


def _count(parts: list[_Part]) -> int:
    count = 1
    for part in parts:
        count *= 1 if isinstance(part, str) else sum(map(len, part))
    return count


def _names(parts: list[_Part]) -> Iterator[str]:
    brackets = [place for place, part in enumerate(parts) if not isinstance(part, str)]
    # scontrol expands the last bracket within all others, and those from the right: the last but one varies slowest.
    return _filled(parts, [*reversed(brackets[:-1]), *brackets[-1:]])


def _filled(parts: list[_Part], order: list[int]) -> Iterator[str]:
    if not order:
        yield "".join(str(part) for part in parts)
        return
    place, *rest = order
    ranges = parts[place]
    assert not isinstance(ranges, str)
    for numbers in ranges:
        for number in numbers.numbers():
            yield from _filled([*parts[:place], number, *parts[place + 1 :]], rest)


def _append(groups: list[tuple[str, list[_Range]]], name: str) -> None:
    match = _NUMBERED.fullmatch(name)
    if match is None:
        groups.append((name, []))
        return
    prefix, number, width = match["prefix"], int(match["digits"]), len(match["digits"])
    if not groups or groups[-1][0] != prefix or not groups[-1][1]:
        groups.append((prefix, []))
    ranges = groups[-1][1]
    last = ranges[-1] if ranges else None
    joint = None if last is None or last.high + 1 != number else _joint_width(last, number, width)
    if last is None or joint is None:
        ranges.append(_Range(number, number, width))
    else:
        ranges[-1] = _Range(last.low, number, joint)


def _joint_width(last: _Range, number: int, width: int) -> int | None:
    """The width with which a range can go on with `number`, so that all of it is written as before; None for none."""
    if len(f"{number:0{last.width}d}") == width:
        return last.width
    as_before = all(len(f"{each:0{last.width}d}") == len(f"{each:0{width}d}") for each in (last.low, last.high))
    return width if as_before else None


def _shown(prefix: str, ranges: list[_Range]) -> str:
    if not ranges:
        return prefix
    if len(ranges) == 1 and ranges[0].low == ranges[0].high:
        return f"{prefix}{ranges[0]}"
    return f"{prefix}[{','.join(map(str, ranges))}]"
