"""From a decoded JSON object to the values of its keys, with every error in one go.

A key that is unknown and nearly a known one is an error, at every depth; any other unknown key is a warning, because a
newer orchestrator may write one. A key that is null or a blank text counts as absent.

Apart from `config`, which knows how settings depend on each other: here each is judged by its own declaration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..plumbing.settings import Key, Rule, keys_of, refusal
from ..plumbing.text import closest
from ..plumbing.urls import has_scheme, looks_like_path
from .errors import ConfigErrors
from .sources import VARIABLES, Sources
from .spec import SampleRequest

__all__ = ["Parser"]


class Parser:
    """Reads objects as blocks of a job.

    Args:
        errors: Where errors and warnings go. A faulty key is left out of the result.
        sources: Where each setting comes from; None for what no source gave.
    """

    def __init__(self, errors: ConfigErrors, sources: Sources | None = None) -> None:
        self.errors = errors
        self.sources = Sources(None) if sources is None else sources

    def block(self, struct: Any, raw: Mapping[str, Any], prefix: str = "", *, complete: bool = True) -> dict[str, Any]:
        """The sound values of an object, as keywords of `struct`; a required key that has none gets an empty one.

        Args:
            struct: The block.
            raw: The decoded object.
            prefix: What stands before its keys in messages, ``"dataset."``.
            complete: Whether a required key that is missing is an error.
        """
        keys = keys_of(struct)
        values, misspelled = {}, set[str | None]()
        for name, value in raw.items():
            if name not in keys:
                misspelled.add(self._unknown(prefix, name, keys))
            elif value is not None and not _is_blank(value):
                converted = self._convert(f"{prefix}{name}", value, keys[name])
                if converted is not None:
                    values[name] = converted
        for name, key in keys.items():
            if key.is_required and name not in values:
                if complete and name not in misspelled and not self.errors.concern(f"{prefix}{name}"):
                    self._missing(prefix, key)
                values[name] = "" if key.is_text else 0
        return values

    def _unknown(self, prefix: str, name: str, keys: Mapping[str, Key]) -> str | None:
        """Note a key that is not known; the one that was probably meant."""
        shown = f"{prefix}{name.encode('ascii', 'backslashreplace').decode()[:60]}"
        meant = closest(name, keys)
        if meant is None:
            self.errors.warn(f"Unknown key `{shown}` is ignored.")
        else:
            self.errors.add(f"Unknown key `{shown}`. Did you mean `{meant}`?", name=shown)
        return meant

    def _missing(self, prefix: str, key: Key) -> None:
        addition = f'"{key.name}": {json.dumps(key.examples[0])}'
        if prefix:
            way_out = f"Add {addition}, or leave out `{prefix.rstrip('.')}`."
        else:
            or_set = f", or set `{key.variable}`" if key.variable else ""
            way_out = f"Add {addition} to the job file{or_set}."
        name = f"{prefix}{key.name}"
        self.errors.add(f"`{name}` is missing. {way_out}", name=name, code=key.rule.code)

    def _convert(self, name: str, value: Any, key: Key) -> Any:
        """`value` as the key's type, or None when it is an error."""
        rule = key.rule
        if key.block is not None:
            given = {"prompt": value} if key.block is SampleRequest and isinstance(value, str) else value
            if not isinstance(given, dict):
                return self._refuse(name, rule, value)
            return key.block(**self.block(key.block, given, f"{name}."))
        if key.item is not None:
            if not isinstance(value, list) or not rule.holds(value):
                return self._refuse(name, rule, value)
            entries = [self._convert(f"{name}[{index}]", entry, key.item) for index, entry in enumerate(value)]
            return key.type(entry for entry in entries if entry is not None)
        value = value.strip() if isinstance(value, str) and rule.expected.endswith(" URL") else value
        if broken := key.fault(value):
            return self._refuse(name, broken, value)
        if rule.relative:
            text = self._absolute(name, value, is_reference=rule.relative == "reference")
            return Path(text) if key.is_path else text
        return msgspec.convert(value, key.type)

    def _refuse(self, name: str, rule: Rule, value: Any) -> Any:
        """Note a value that does not keep to `rule`, by the variable that gives it or its own name; None."""
        source = self.sources.source_of(name)
        shown = source if source in VARIABLES else name
        self.errors.add(refusal(shown, rule, value, may_be_secret=shown != name), name=name, code=rule.code)

    def _absolute(self, name: str, text: str, *, is_reference: bool) -> str:
        """`text` as an absolute path; a URL, and a reference that is no path, stays as it is."""
        if has_scheme(text):
            return text
        path = os.path.abspath(os.path.join(self.sources.folder_of(name), os.path.expanduser(text)))
        return path if not is_reference or os.path.exists(path) or looks_like_path(text) else text


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()
