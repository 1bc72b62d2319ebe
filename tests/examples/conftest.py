"""The examples as they lie in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def examples() -> Path:
    return Path(__file__).parents[2] / "examples"
