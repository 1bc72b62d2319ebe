"""What a device can do at most, by its name and the type of the numbers."""

from __future__ import annotations

import pytest

from genlight.callbacks.telemetry.flops import PEAKS, number_type, peak_flops


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA GH200 480GB", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2e12),
        ("NVIDIA A10G", "bf16", None),
        ("Some future device", "bf16", None),
    ],
)
def test_the_peak_is_found_by_the_name_of_the_device(name, numbers, expected) -> None:
    assert peak_flops(name, numbers) == expected


def test_every_peak_has_a_source_and_is_in_order() -> None:
    for peak in PEAKS:
        assert peak.source
        assert peak.fp32 <= (peak.tf32 or peak.fp32) <= peak.fp16


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16-mixed", "bf16"), ("16-true", "fp16"), ("32-true", "fp32"), ("64-true", None)],
)
def test_the_precision_of_the_trainer_says_what_products_are_computed_in(precision, expected) -> None:
    assert number_type(precision) == expected
