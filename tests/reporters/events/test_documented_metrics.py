"""The page about events lists every metric that genlight adds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(name="events")

ROOT = Path(__file__).parents[3]


def test_each_metric_that_genlight_adds_is_on_the_page_about_events():
    page = (ROOT / "reporters/README.md").read_text()
    sources = [path for folder in ("adapter", "callbacks", "reporters") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in sources for name in re.findall(r'"((?:trainer|data)/[a-z_]+)"', path.read_text())}
    assert "data/wait_fraction" in names
    assert sorted(name for name in names if f"`{name}`" not in page) == []
