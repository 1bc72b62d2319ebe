"""A decision of rank zero ends the training of all ranks after the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="ranks")


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """Ranks agree every 10 steps: one callback stops at step 7, the other sees no better loss for 18 steps after 5."""
    run_ranks("should_stop_ranks.py", tmp_path)

    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"six hooks": 10, "early stopping": 30}] * 2
