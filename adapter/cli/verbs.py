"""One order of words for what looks at artifacts: ``genlight VERB THING PATH``.

Each means a command that is also there under the name of its thing: ``genlight verify events FILE`` is
``genlight events FILE --check``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

__all__ = ["SUMMARIES", "VERBS", "add_arguments", "as_command"]

VERBS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "list": {"checkpoints": ("checkpoint", "ls"), "uploads": ("uploads", "list")},
    "show": {"checkpoint": ("checkpoint", "show"), "events": ("events",)},
    "follow": {"events": ("events", "--follow")},
    "verify": {"checkpoints": ("checkpoint", "verify"), "events": ("events", "--check")},
    "export": {"checkpoint": ("checkpoint", "export"), "uploads": ("uploads", "export")},
    "retry": {"uploads": ("uploads", "retry")},
}
"""The words of the command that each verb and thing mean."""

SUMMARIES = {verb: f"{verb} {' or '.join(things)}" for verb, things in VERBS.items()}


def as_command(words: Sequence[str]) -> list[str]:
    """`words` with the command that a verb and its thing mean, be it in the singular or plural; else as they are."""
    things = VERBS.get(words[0], {}) if words else {}
    if len(words) > 1:
        for thing, command in things.items():
            if words[1].removesuffix("s") == thing.removesuffix("s"):
                return [*command, *words[2:]]
    return list(words)


def add_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Declare what `verb` takes, for its help and for errors; `as_command` has taken what is right."""
    parser.add_argument("thing", choices=tuple(VERBS[verb]))
    parser.add_argument("path", metavar="PATH", help="as for the command of that thing; --help after it tells more")
