"""The random states of a process."""

import random

import numpy as np
import torch

from genlight.callbacks.checkpoint import capture_rng, load, restore_rng, save


def draw():
    return [random.random(), random.gauss(0, 1), np.random.normal(), torch.randn(()).item(), random.getrandbits(70)]


def test_every_source_goes_on_where_it_was(tmp_path):
    random.gauss(0, 1)  # Leaves a second value behind, which is part of the state.
    np.random.normal()
    save(tmp_path / "a", {"rng": capture_rng()})
    expected = draw()
    draw()
    assert restore_rng(load(tmp_path / "a")["rng"]) == []
    assert draw() == expected


def test_devices_that_are_not_here_are_named():
    state = capture_rng() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 3}
    missing = 3 - (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    expected = [f"the random state of {missing} CUDA devices that are not here"] if missing > 0 else []
    assert restore_rng(state) == expected
