"""The page of runs: one HTML file that contains everything it needs and loads nothing.

The page holds the data of its runs as JSON and shows it only as text. uPlot (MIT, ``uPlot.LICENSE``) draws the curves.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata, resources
from typing import Any

from ..differences import differences
from ..history import Budget, History

__all__ = ["LARGEST_PAGE", "facts_of", "page_of", "report", "stamp"]

LARGEST_PAGE = 5_000_000
"""Maximum size of a page that is written to a file, in bytes."""
_SCRIPTS = ("text.js", "charts.js", "samples.js", "run.js", "list.js", "page.js")
"""Parts of the script of a page; each uses only those before it."""
_SHARES = (1.0, 0.5, 0.2, 0.05, 0.01)
"""Shares of the default `Budget`, which `report` tries one after another until the page is small enough."""


def report(histories: Sequence[History]) -> str:
    """Return one self-contained page of less than `LARGEST_PAGE` bytes; the more runs, the fewer points of each.

    Raises:
        ValueError: There are too many runs for one page.
    """
    for share in _SHARES:
        part = share / len(histories)
        budget = Budget()
        runs = [
            each.as_json(
                Budget(
                    points=int(budget.points * part),
                    media_bytes=int(budget.media_bytes * part),
                    sample_steps=max(int(budget.sample_steps * share), 2),
                )
            )
            for each in histories
        ]
        page = page_of(facts_of(runs), title=", ".join(run["run_id"] for run in runs))
        if len(page.encode()) < LARGEST_PAGE:
            return page
    raise ValueError(f"{len(histories)} runs do not fit into a page of {LARGEST_PAGE:,} bytes; name fewer of them")


def facts_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data of a page; `runs` are results of `History.as_json`."""
    rows = [[each.name, *each.values] for each in differences(runs)]
    return {"runs": runs, "differences": rows, **stamp()}


def stamp() -> dict[str, Any]:
    """Return the current time and the version of genlight, for a page that is made now."""
    return {"made_at_ms": int(time.time() * 1000), "version": metadata.version("genlight")}


def page_of(data: Mapping[str, Any], *, title: str, sources: str = "img-src data:; media-src data:") -> str:
    """Return the HTML page that shows `data`.

    Args:
        data: A result of `facts_of`, or ``{"live": address}``: the page fetches its data from there again and again.
        title: Title of the page.
        sources: Directives of the content security policy that say what the page may load.
    """
    # Without `<`, no text in the data can end the element that holds it.
    text = json.dumps(data, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    style = _part("uPlot.min.css") + _part("page.css")
    uplot = f"/* uPlot {_part('uPlot.LICENSE').replace('*/', '')} */\n{_part('uPlot.iife.min.js')}"
    script = "\n".join(map(_part, _SCRIPTS))
    filled = {
        "policy": f"default-src 'none'; script-src {hash_of(uplot)} {hash_of(script)}; style-src {hash_of(style)}; "
        f"{sources}; base-uri 'none'; form-action 'none'",
        "title": html.escape("".join(c for c in title if c.isprintable())),
        "style": style,
        "uplot": uplot,
        "script": script,
        "data": text,
    }
    pieces = _part("page.html").split("{{ ")
    return pieces[0] + "".join(filled[name] + after for name, after in (piece.split(" }}", 1) for piece in pieces[1:]))


def hash_of(text: str) -> str:
    """Return the digest of a script or style for the content security policy: a browser refuses every other one."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
