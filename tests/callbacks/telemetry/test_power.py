"""Power from the counters of energy that Linux shows, and the peaks of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genlight.callbacks.telemetry import power
from genlight.callbacks.telemetry.device_peaks import PEAKS, number_type, peak_flops
from genlight.callbacks.telemetry.power import PowerMeter

CPU = torch.device("cpu")


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch):
    """Two packages, one with a part, and a clock that the test sets; returns how to set both."""
    now = [100.0]
    monkeypatch.setattr(power.time, "monotonic", lambda: now[0])

    def set_to(seconds: float, **energies_uj: int) -> None:
        now[0] = 100.0 + seconds
        for name, energy in energies_uj.items():
            folder = tmp_path / name.replace("_", ":").replace("intel:", "intel-")
            folder.mkdir(exist_ok=True)
            (folder / "energy_uj").write_text(f"{energy}\n")
            (folder / "max_energy_range_uj").write_text("999\n" if name.endswith("_1") else "262143328850\n")

    set_to(0, intel_rapl_0=5_000_000, intel_rapl_1=900, intel_rapl_0_0=1)
    return tmp_path, set_to


def test_rapl_gives_the_mean_since_the_last_reading_over_all_packages(rapl) -> None:
    folder, set_to = rapl
    meter = PowerMeter(CPU, rapl=folder)
    set_to(2, intel_rapl_0=205_000_000, intel_rapl_0_0=10**9)

    assert meter.watts() == pytest.approx(100.0)


def test_a_counter_that_began_anew_is_no_negative_power(rapl) -> None:
    folder, set_to = rapl
    meter = PowerMeter(CPU, rapl=folder)
    set_to(1, intel_rapl_1=100)

    assert meter.watts() == pytest.approx(200 / 1e6)


def test_counters_that_cannot_be_read_mean_that_it_is_not_known(rapl) -> None:
    folder, _ = rapl
    (folder / "intel-rapl:1" / "energy_uj").unlink()
    assert PowerMeter(CPU, rapl=folder).watts() is None
    assert PowerMeter(CPU, rapl=folder / "absent").watts() is None


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
