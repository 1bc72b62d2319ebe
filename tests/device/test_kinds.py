"""A class of each kind of the zoo does on the simulated accelerator what it does on the host, its resume included."""

from __future__ import annotations

import json

import pytest
from zoo.harness import PRECISIONS, STRATEGIES, run_cells, zoo
from zoo.table import CELLS, status

from support.device import reason_to_skip

KINDS = {
    "accumulation": "MicroBatches",
    "diffusion": "NoiseDrawnInTheStep",
    "distillation": "MeanTeacher",
    "ema": "EmaModule",
    "gan": "WganGp",
    "language": "LmWithDropout",
    "meta_learning": "AdversarialTraining",
    "moe": "StochasticDepth",
    "optimizers": "Lookahead",
    "recipes": "ReversibleBlocks",
    "rl": "ClippedPolicy",
    "self_supervised": "Autoencoder",
    "updates": "ClippedByHand",
    "vision": "ResNetBatchNorm",
}
"""By theme; each leaves its modules on the host or draws numbers on the device, or both."""
RANKS_IN_ALL_PRECISIONS = ("WganGp", "LmWithDropout")


@pytest.mark.timeout(600)
def test_a_class_of_each_kind_does_on_the_device_what_it_does_on_the_host(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    jobs = [
        (name, strategy, precision)
        for strategy in STRATEGIES
        for precision in PRECISIONS
        for name in KINDS.values()
        if strategy == "one" or precision == "fp32" or name in RANKS_IN_ALL_PRECISIONS
    ]
    expected = json.loads(CELLS.read_text())

    cells = run_cells(tmp_path, jobs, device="sim")

    assert len(cells) == len(jobs)
    assert all(zoo()[name].__module__ == f"zoo.{theme}" for theme, name in KINDS.items())
    untrue = [
        f"{cell.name}, {cell.mode}: {expected[cell.name][cell.mode]!r} on the host, but {status(cell)!r} on the device "
        f"({cell.verdict} {cell.detail} | {cell.resume})"
        for cell in cells
        if status(cell) != expected[cell.name][cell.mode]
    ]
    assert not untrue, "\n".join(untrue)
