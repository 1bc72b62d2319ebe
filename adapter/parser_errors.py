"""jsonargparse's errors, shortened to the part that tells what is wrong."""

from __future__ import annotations

import re

__all__ = ["root_cause", "shortened"]

_UNION = "Does not validate against any of the Union subtypes"
_KEY = re.compile(r'^\s*Parser key "(?P<key>[^"]+)":', re.MULTILINE)
_REASON = re.compile(r"^\s*- (?P<reason>Problem with given class_path .*)\n\s+(?P<detail>.*)$", re.MULTILINE)
_EXPECTED = re.compile(r"^\s*- Expected an? (?P<type>.*)$", re.MULTILINE)
_GIVEN = re.compile(r"^\s*Given value: (?P<value>.*)$", re.MULTILINE)


def root_cause(error: Exception) -> Exception:
    """What a constructor raised, where jsonargparse wrapped it in a list of what the value could have been instead."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def shortened(message: str) -> str:
    """`message` without the types that a value could have had besides the one that was meant.

    Of a class path and its arguments, what is wrong with them; of a plain value, the types that were expected.
    """
    if _UNION not in message:
        return message
    key, given = _KEY.search(message), _GIVEN.search(message)
    prefix = f"`{key['key']}`: " if key is not None else ""
    reasons = [f"{match['reason']} {match['detail']}" for match in _REASON.finditer(message)]
    if reasons:
        return prefix + "; ".join(dict.fromkeys(reasons))
    types = dict.fromkeys(_plain(match["type"]) for match in _EXPECTED.finditer(message))
    if not types or given is None:
        return message
    return f"{prefix}Expected {' or '.join(types)}, but received {given['value']}"


def _plain(type_text: str) -> str:
    """``typing.Literal['a', 'b']`` as ``'a', 'b'``, ``<class 'int'>`` as ``int``."""
    if "import path" in type_text or type_text.startswith("path"):
        return "an importable class path"
    text = re.sub(r"typing\.|<class '([^']+)'>", r"\1", type_text).replace("NoneType", "null")
    return re.sub(r"^Literal\[(.*)\]$", r"\1", text)
