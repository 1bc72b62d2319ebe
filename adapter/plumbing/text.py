"""Functions on texts: similar names, sizes, truncation, encodability, folder names of runs, strict JSON, our pages."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote

HUB_LOGIN = "run `hf auth login`, or set `HF_TOKEN`"
"""Ways to log in to the Hugging Face hub; `hf` was called `huggingface-cli` before."""
LONGEST_FOLDER_NAME = 120
_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PAGES: Final = {"a-jobs-keys": "job_reference.md", "all-commands": "commands.md", "the-hooks": "README.md"}


def closest(name: str, known: Iterable[str], *, alike: float = 0.7) -> str | None:
    """Return the known name closest to `name`, or None if no similarity reaches `alike` (1 for equal names)."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return matches[0] if matches else None


def nearest(name: str, known: Iterable[str], *, alike: float = 0.7) -> str:
    """Return a sentence that suggests the known name closest to `name`, after a space; empty if there is none."""
    match = closest(name, known, alike=alike)
    return f" Did you mean `{match}`?" if match else ""


def key_text(key: Any) -> str:
    """Return a key of a mapping as it is written in a path; the values of a tensor are not read."""
    if isinstance(key, str):
        return f'"{key}"'
    # Only a tensor has a `layout`; this needs no import of torch.
    return f"{type(key).__name__}{tuple(key.shape)}" if hasattr(key, "layout") else repr(key)


def size_text(size_bytes: float) -> str:
    """Return a size in decimal units, such as ``512 B`` or ``1.5 MB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def shortened(text: str, most: int) -> str:
    """Truncate `text` to `most` characters, with an ellipsis. Hide secrets first: a truncated one is not recognized."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def list_first(names: Sequence[str], most: int = 12, between: str = ", ") -> str:
    """Return the first `most` names in one text, and the number of the others."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can encode `text`, and a file name can hold it: no unpaired surrogate, and no NUL."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def is_storable(text: str) -> bool:
    """Whether `text` can be a path, a header or a line of a log: UTF-8 and no control character."""
    return is_utf8(text) and all(ord(character) >= 32 and ord(character) != 127 for character in text)


def printable(value: object) -> str:
    """Return `value` as text, with control characters escaped, so that a file cannot control the terminal."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def folder_name(run_id: str) -> str:
    """Return a run's id as the name of one folder, with the special characters of paths percent-encoded."""
    name = quote(run_id, safe="")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    return f"{name[:LONGEST_FOLDER_NAME]}~{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, as an ``object_pairs_hook``; refuse duplicate keys, because either could be meant.

    Raises:
        ValueError: A key appears twice; the message names it.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def parse_json(data: bytes) -> Any:
    """Parse JSON; refuse duplicate keys, NaN and Infinity.

    Raises:
        ValueError: It is not such JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(data, object_pairs_hook=with_unique_keys, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def require(*conditions: tuple[bool, str, str, object]) -> None:
    """Refuse invalid arguments, all at once.

    Args:
        conditions: For each argument: whether it is valid, its name, the expectation, and its value.

    Raises:
        ValueError: At least one is invalid; the message lists every invalid argument.
    """
    wrong = [
        f"Invalid `{argument}`. Expected {expected}, but received {received!r}."
        for holds, argument, expected, received in conditions
        if not holds
    ]
    if wrong:
        raise ValueError(" ".join(wrong))


def as_list(value: Any) -> list[Any]:
    """Return an argument that may be a single value as a list; None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def reference(section: Literal["a-jobs-keys", "all-commands", "the-hooks"]) -> str:
    """Return the path of the page that has a section, with the section's anchor."""
    return f"{os.path.join(_FOLDER, _PAGES[section])}#{section}"
