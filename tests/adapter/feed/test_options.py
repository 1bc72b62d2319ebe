"""What a feed and its data module refuse of their options."""

from __future__ import annotations

import pytest

from genlight.adapter import ArrowDataModule, ArrowFeed


@pytest.mark.parametrize("make", [ArrowDataModule, ArrowFeed])
def test_options_that_cannot_be_used_are_named_together_where_they_are_given(make):
    """A data module that complained in `setup` alone would do so after the ranks have met."""
    with pytest.raises(ValueError, match=r"`batch_size`.*received 0.*`shard`.*received \"q\".*`workers`.*received -1"):
        make("rows.parquet", batch_size=0, workers=-1, shard="q")
    with pytest.raises(ValueError, match=r'`batch_size`.*received "3"'):
        make("rows.parquet", batch_size="3")
    with pytest.raises(ValueError, match=r"`collate`.*'os:nope' cannot be imported"):
        make("rows.parquet", collate="os:nope")
    with pytest.raises(TypeError, match=r"`collate`.*received 'torhc'"):
        make("rows.parquet", collate="torhc")
