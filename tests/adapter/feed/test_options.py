"""What a feed and its data module refuse of their options."""

from __future__ import annotations

import pytest

from genlight.adapter import ArrowDataModule, ArrowFeed
from support.messages import refusal

pytestmark = pytest.mark.promise(name="rows")


@pytest.mark.parametrize("make", [ArrowDataModule, ArrowFeed])
def test_options_that_cannot_be_used_are_named_together_where_they_are_given(make):
    """A data module that complained in `setup` alone would do so after the ranks have met."""
    with refusal(ValueError):
        make("rows.parquet", batch_size=0, workers=-1, shard="q")
    with refusal(ValueError):
        make("rows.parquet", batch_size="3")
    with refusal(ValueError):
        make("rows.parquet", collate="os:nope")
    with refusal(TypeError):
        make("rows.parquet", collate="torhc")


@pytest.mark.parametrize("collate", [None, len])
def test_batches_are_copied_ahead_only_where_that_changes_nothing(collate):
    with refusal(ValueError):
        ArrowFeed("rows.parquet", collate=collate, copy_ahead=True)
    ArrowFeed("rows.parquet", collate="torch", copy_ahead=True)
