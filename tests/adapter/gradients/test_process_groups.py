"""Buckets use process groups with the settings of `DDPStrategy`."""

from __future__ import annotations

import json

import pytest

from support.process_group_ranks import TIMEOUT_S
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="ranks")


@pytest.mark.slow
def test_the_bucket_group_has_the_backend_and_timeout_of_the_strategy(tmp_path):
    run_ranks("process_group_ranks.py", tmp_path)

    as_told = ["gloo", TIMEOUT_S]
    for rank in range(2):
        groups = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert groups == {"all": as_told, "buckets": as_told, "is its own": True}
