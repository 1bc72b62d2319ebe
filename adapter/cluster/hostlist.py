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

_BETWEEN_SEPARATORS = re.compile(r"(?:[^,\s\[\]]+|\[[^\[\]]*\]|[\[\]])+")
_WORD = re.compile(r"(?:[\w.:-]+|\[[\d,-]+\])+", re.ASCII)
_RANGE = re.compile(r"(?P<low>\d{1,18})(-(?P<high>\d{1,18}))?", re.ASCII)


def expand_hostlist(text: str) -> list[str]:
    """The host names that a hostlist expression stands for, such as ``n[9-10],rack[1-2]n[3-4]``.

    Raises:
        ValueError: It names no host, is malformed, or stands for more than 65,536 hosts; quotes it.
    """
    try:
        names = (name for word in _BETWEEN_SEPARATORS.findall(text) for name in _names(word))
        found = list(itertools.islice(names, MOST_HOSTS + 1))
    except ValueError as error:
        raise ValueError(f"Invalid hostlist {text!r}. {error}") from None
    if not found:
        raise ValueError(f"Invalid hostlist {text!r}. It names no host.")
    if len(found) > MOST_HOSTS:
        raise ValueError(f"Invalid hostlist {text!r}. It stands for more than {MOST_HOSTS:,} hosts.")
    return found


def _names(word: str) -> Iterator[str]:
    if _WORD.fullmatch(word) is None:
        raise ValueError(f"{word!r} is not the name of a host, with numbers such as [9-10,12] in brackets.")
    parts = re.split(r"[\[\]]", word)
    brackets = range(1, len(parts), 2)
    # scontrol expands the last bracket within all others, and those from the right: the last but one varies slowest.
    order = [*reversed(brackets[:-1]), *brackets[-1:]]
    # No bracket is counted out beyond what is refused anyway.
    choices = [list(itertools.islice(_numbers(parts[place]), MOST_HOSTS + 1)) for place in order]
    for numbers in itertools.product(*choices):
        filled = {**dict(enumerate(parts)), **dict(zip(order, numbers, strict=True))}
        yield "".join(filled.values())


def _numbers(entries: str) -> Iterator[str]:
    for entry in entries.split(","):
        match = _RANGE.fullmatch(entry)
        low, high = (int(match["low"]), int(match["high"] or match["low"])) if match else (1, 0)
        if match is None or high < low:
            raise ValueError(f"{entry!r} is not a number, nor a range of rising numbers.")
        yield from (f"{number:0{len(match['low'])}d}" for number in range(low, high + 1))
