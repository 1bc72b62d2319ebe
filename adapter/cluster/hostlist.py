"""Slurm's hostlist expressions, as ``scontrol show hostnames`` expands them.

Order and duplicates are kept. Of three or more brackets scontrol varies the last one fastest and the last but one
slowest; ranks count nodes in that order, so it is kept as well. A suffix after the last bracket (``n[1-2]-ib``), which
releases before 23 refuse, is taken.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ["MOST_HOSTS", "expand_hostlist"]

MOST_HOSTS = 65_536
"""Slurm's own limit on a range; here it holds for the whole list."""

_SEPARATOR = re.compile(r"[,\s]+")
_PLAIN = re.compile(r"[\w.:-]*", re.ASCII)
_RANGE = re.compile(r"(?P<low>\d{1,18})(-(?P<high>\d{1,18}))?", re.ASCII)


_Range = tuple[int, int, int]
"""The first and the last of consecutive numbers, and how many digits they have at least."""
_Part = str | list[_Range]


def expand_hostlist(text: str) -> list[str]:
    """The host names that a hostlist expression stands for, such as ``n[9-10],rack[1-2]n[3-4]``.

    Raises:
        ValueError: It names no host, is malformed, or stands for more than 65,536 hosts; quotes it.
    """
    parsed = [_parsed(word, text) for word in _words(text)]
    if not parsed:
        raise ValueError(f"Invalid hostlist {text!r}. It names no host.")
    names = list(itertools.islice((name for parts in parsed for name in _names(parts)), MOST_HOSTS + 1))
    if len(names) > MOST_HOSTS:
        raise ValueError(f"Invalid hostlist {text!r}. It stands for more than {MOST_HOSTS:,} hosts.")
    return names


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
    return low, high, len(match["low"])


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
    for low, high, width in ranges:
        for number in range(low, high + 1):
            yield from _filled([*parts[:place], f"{number:0{width}d}", *parts[place + 1 :]], rest)
