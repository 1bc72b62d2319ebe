"""Shorten jsonargparse's errors about a configuration."""

from __future__ import annotations

import re
import textwrap

from ..plumbing.failures import modules_of

_UNION = "Does not validate against any of the Union subtypes"
_KEY = re.compile(r'^\s*Parser key "(?P<key>[^"]+)":', re.MULTILINE)
_REASON = re.compile(
    r"^(?P<indent> *)- (?P<reason>Problem with given class_path .*)\n(?P<detail>(?:(?P=indent)   *\S.*(?:\n|\Z))*)",
    re.MULTILINE,
)
"""Matches the error of the intended class, and its explanation: the lines with more indentation."""
_EXPECTED = re.compile(r"^\s*- Expected an? (?P<type>.*)$", re.MULTILINE)
_SIMPLE = re.compile(r'Parser key "(?P<key>[^"]+)":\s+Expected an? (?P<type>.*)\. Got value: (?P<value>.*)')
_GIVEN = re.compile(r"^\s*Given value: (?P<value>.*)$", re.MULTILINE)


class UnusableValueError(ValueError):
    """A value that jsonargparse refused, with the part of jsonargparse's message that is about this value."""


def root_cause(error: Exception) -> Exception:
    """Return the exception, usually of a constructor, that jsonargparse wrapped in a list of all types that it tried.

    jsonargparse chains only the error of the first type that it tried. If that is an error of jsonargparse itself,
    return an `UnusableValueError` with the part of its message about the class that the user named.
    """
    chain = [error]
    while isinstance(chain[-1].__cause__, Exception):
        chain.append(chain[-1].__cause__)
    if "".join(modules_of(chain[-1])[-1:]).startswith("jsonargparse."):
        for each in chain:
            text = str(each)
            if (short := shorten_error(text)) != text:
                return UnusableValueError(short)
    return chain[-1]


def shorten_error(message: str) -> str:
    """Return `message` without the possible types that the user did not mean.

    For a class path and its arguments, only their errors remain; for a plain value, the expected types.
    """
    if _UNION not in message:
        if (simple := _SIMPLE.search(message)) is None:
            return message
        return f"`{simple['key']}`: Expected {_plain(simple['type'])}, but received {simple['value']}"
    key, given = _KEY.search(message), _GIVEN.search(message)
    prefix = f"`{key['key']}`: " if key is not None else ""
    reasons = [
        f"{match['reason']} {shorten_error(textwrap.dedent(match['detail']).strip())}"
        for match in _REASON.finditer(message)
    ]
    if reasons:
        return prefix + "; ".join(dict.fromkeys(reasons))
    types = dict.fromkeys(_plain(match["type"]) for match in _EXPECTED.finditer(message))
    if not types or given is None:
        return message
    return f"{prefix}Expected {' or '.join(types)}, but received {given['value']}"


def _plain(type_text: str) -> str:
    """Return ``typing.Literal['a', 'b']`` as ``'a', 'b'``, and ``<class 'int'>`` as ``int``."""
    if "import path" in type_text or type_text.startswith("path"):
        return "an importable class path"
    text = re.sub(r"typing\.|<class '([^']+)'>", r"\1", type_text).replace("NoneType", "null")
    return re.sub(r"^Literal\[(.*)\]$", r"\1", text)
