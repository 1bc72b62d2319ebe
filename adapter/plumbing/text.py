"""Texts: the nearest name, sizes, cuts, what can be kept, a run's id as a folder, JSON without doubt about a key."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

__all__ = [
    "HUB_LOGIN",
    "as_list",
    "closest",
    "folder_name",
    "is_storable",
    "is_utf8",
    "nearest",
    "printable",
    "shortened",
    "size_text",
    "with_unique_keys",
]

HUB_LOGIN = "run `hf auth login`, or set `HF_TOKEN`"
"""How a user is known to the Hugging Face hub; `hf` was `huggingface-cli` before."""
LONGEST_FOLDER_NAME = 120


def closest(name: str, known: Iterable[str], *, alike: float = 0.7) -> str | None:
    """The known name closest to `name`; None where none is at least `alike`, from 0 to 1 for an equal one."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return matches[0] if matches else None


def nearest(name: str, known: Iterable[str], *, alike: float = 0.7) -> str:
    """A sentence that offers the known name closest to `name`, after a space; empty where none is `alike`."""
    match = closest(name, known, alike=alike)
    return f" Did you mean `{match}`?" if match else ""


def size_text(size_bytes: float) -> str:
    """A size in decimal units, such as ``512 B`` or ``1.5 MB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def shortened(text: str, most: int) -> str:
    """At most so many characters of `text`, with an ellipsis where there were more: redaction knows a cut by it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold `text`, and a file name can: no half surrogate pair, and no NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def is_storable(text: str) -> bool:
    """Whether `text` can be a path, a header or a line of a log: UTF-8 and no control character."""
    return is_utf8(text) and all(ord(character) >= 32 and ord(character) != 127 for character in text)


def printable(value: object) -> str:
    """`value` as text, without characters by which a file could command the terminal that shows it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value))


def folder_name(run_id: str) -> str:
    """A run's id as the name of one folder: what a path would interpret is percent-encoded."""
    name = quote(run_id, safe="")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    return f"{name[:LONGEST_FOLDER_NAME]}~{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as an ``object_pairs_hook``: of a key that appears twice, nobody could tell which was meant.

    Raises:
        ValueError: Names the key.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def as_list(value: Any) -> list[Any]:
    """An argument that may be a single value, as a list; None is none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
