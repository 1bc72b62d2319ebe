"""Kubernetes objects as YAML that people read and every parser takes alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

__all__ = ["yaml_of"]

_PLAIN = re.compile(r"[A-Za-z/][\w./:-]*[\w/]|[A-Za-z]", re.ASCII)
_NOT_TEXTS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))


class _Dumper(yaml.SafeDumper):
    """Indents lists, shares no parts, and quotes what a parser of another YAML version may take for a number."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _NOT_TEXTS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_of(documents: Sequence[dict[str, Any]], *, comment: Sequence[str] = ()) -> str:
    """Several documents, the same text for the same objects; keys stay in their order.

    Args:
        documents: What JSON can hold.
        comment: Lines above the first document.
    """
    texts = [yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000) for each in documents]
    return "".join([*(f"# {line}".rstrip() + "\n" for line in comment), "---\n".join(texts)])
