"""The options of a feed are one list, whoever spells it out."""

from __future__ import annotations

import inspect

import pytest

from genlight.adapter.feed import ArrowDataModule, ArrowFeed
from genlight.adapter.job.keys import keys_of
from genlight.adapter.job.spec import DatasetSpec

OF_A_JOB_ALONE = {"parquet_paths", "epochs"}
"""`ArrowDataModule` leaves the number of epochs to the Trainer."""


def defaults_of(made):
    return {name: parameter.default for name, parameter in inspect.signature(made).parameters.items()}


def test_a_job_may_set_the_options_of_the_feed_with_the_same_defaults():
    """A feed option that a job cannot name would be lost to users of job files."""
    options = {key.name: key.default for key in keys_of(DatasetSpec).values() if key.name not in OF_A_JOB_ALONE}
    of_feed = defaults_of(ArrowFeed)
    assert options == {name: of_feed[name] for name in options}


@pytest.mark.parametrize("make", [ArrowDataModule, ArrowFeed])
def test_options_that_cannot_be_used_are_named_together_where_they_are_given(make):
    """A data module that complained in `setup` alone would do so after the ranks have met."""
    with pytest.raises(ValueError, match=r"`batch_size`.*received 0.*`workers`.*received -1.*`shard`.*received 'q'"):
        make("rows.parquet", batch_size=0, workers=-1, shard="q")
    with pytest.raises(TypeError, match=r"`batch_size`.*received '3'"):
        make("rows.parquet", batch_size="3")
    with pytest.raises(ValueError, match=r"`collate`.*'os:nope' cannot be imported"):
        make("rows.parquet", collate="os:nope")
    with pytest.raises(TypeError, match=r"`collate`.*received 'torhc'"):
        make("rows.parquet", collate="torhc")
    with pytest.raises(ValueError, match=r"`filters`.*not a valid operator"):
        make("rows.parquet", filters=[["a", ">>", 1]])


@pytest.mark.parametrize("collate", [None, len])
def test_batches_are_copied_ahead_only_where_that_changes_nothing(collate):
    with pytest.raises(ValueError, match=r"`copy_ahead`.*`collate` 'torch', or any `collate` with `workers`"):
        ArrowFeed("rows.parquet", collate=collate, copy_ahead=True)
    ArrowFeed("rows.parquet", collate="torch", copy_ahead=True)
