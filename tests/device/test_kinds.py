"""A class of each kind of the zoo agrees on the simulated accelerator with the table, including its resume."""

import json

import pytest
from zoo.harness import PRECISIONS, STRATEGIES, run_cells, zoo
from zoo.table import CELLS, status

from support.device import reason_to_skip

KINDS = {
    "accumulation": "LooseOverTwoSteps",
    "diffusion": "Ddpm",
    "distillation": "FeatureDistilled",
    "ema": "EmaModule",
    "gan": "WganGp",
    "language": "LmWithDropout",
    "meta_learning": "FirstOrderMaml",
    "moe": "StochasticDepth",
    "optimizers": "RowwiseAdagrad",
    "recipes": "ReversibleBlocks",
    "rl": "DeepQ",
    "self_supervised": "MomentumContrast",
    "updates": "ClippedByHand",
    "vision": "ResNetBatchNorm",
}
"""Classes by theme; each leaves modules on the host, draws numbers on the device, or saves tensors itself."""
IN_ALL_PRECISIONS = ("WganGp", "LmWithDropout")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fp32", "others"])
def test_a_class_of_each_kind_agrees_with_the_table(tmp_path, few):
    if reason := reason_to_skip():
        pytest.skip(reason)
    jobs = [
        (name, strategy, precision)
        for strategy in STRATEGIES
        for precision in PRECISIONS
        for name in KINDS.values()
        if strategy == "one" or precision == "fp32" or name in IN_ALL_PRECISIONS
        if few == (strategy != "fsdp" and precision == "fp32")
    ]
    expected = json.loads(CELLS.read_text())

    cells = run_cells(tmp_path, jobs, device="sim")

    assert len(cells) == len(jobs)
    assert all(zoo()[name].__module__ == f"zoo.{theme}" for theme, name in KINDS.items())
    untrue = [
        f"{cell.name}, {cell.mode}: the table says {expected[cell.name][cell.mode]!r}, "
        f"but it is {status(cell)!r} ({cell.verdict} {cell.detail} | {cell.resume})"
        for cell in cells
        if status(cell) != expected[cell.name][cell.mode]
    ]
    assert not untrue, "\n".join(untrue)
