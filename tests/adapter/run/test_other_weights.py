"""What torch says of weights that do not fit, in the words of a user."""

from __future__ import annotations

import pytest
from torch import nn

from genlight.adapter.run.other_weights import about_other_weights


def test_sizes_and_names_that_differ_are_told_and_many_are_cut():
    saved, built = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with pytest.raises(RuntimeError) as raised:
        built.load_state_dict(saved.state_dict())
    text = str(about_other_weights(raised.value))
    for said in (
        "1.weight is in the checkpoint alone",
        "0.weight is [3, 2] in the checkpoint and [4, 2] here",
        "`--resume never`",
    ):
        assert said in text
    deep = nn.Sequential(*(nn.Linear(1, 1) for _ in range(9)))
    with pytest.raises(RuntimeError) as raised:
        deep.load_state_dict(nn.Linear(1, 1).state_dict())
    assert " and 14 more. Build the model as it was" in str(about_other_weights(raised.value))


def test_other_errors_are_left_alone():
    assert about_other_weights(RuntimeError("CUDA out of memory")) is None
