"""How many floating point operations a second a GPU can do at most, by its name and the type of the numbers.

Dense matrix products on tensor cores with accumulation in fp32, at the clock that the maker states; figures for sparse
matrices, which data sheets like to show, are halved. ``fp32`` is the one without tensor cores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import torch

__all__ = ["PEAKS", "NumberType", "Peak", "number_type", "peak_flops"]

NumberType = Literal["fp16", "bf16", "tf32", "fp32"]


@dataclass(frozen=True)
class Peak:
    """One kind of GPU; operations a second, None where it does not have the type."""

    name: str
    """A regular expression that its name, as ``torch.cuda.get_device_name`` gives it, contains."""
    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float
    source: str


_HOPPER = "NVIDIA H100 and H200 Tensor Core GPU data sheets"
_AMPERE = "NVIDIA A100, A30, A40 and A10 Tensor Core GPU data sheets"
_ADA = "NVIDIA L4, L40 and L40S data sheets; NVIDIA Ada GPU architecture white paper, appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, tables 2 and 9"
_VOLTA = "NVIDIA V100 data sheet"

PEAKS: Final = (
    # The first that matches counts, so a longer name stands before one that it contains.
    Peak(r"\bB200\b", 2.25e15, 2.25e15, 1.1e15, 75e12, "NVIDIA HGX B200 data sheet"),
    Peak(r"\bH200 NVL\b", 835.5e12, 835.5e12, 417.5e12, 60e12, _HOPPER),
    Peak(r"\bG?H200\b", 989.4e12, 989.4e12, 494.7e12, 66.9e12, _HOPPER),
    Peak(r"\bH100 NVL\b", 835.5e12, 835.5e12, 417.5e12, 60e12, _HOPPER),
    Peak(r"\bH100 PCIe\b", 756e12, 756e12, 378e12, 51.2e12, _HOPPER),
    Peak(r"\bH[18]00\b", 989.4e12, 989.4e12, 494.7e12, 66.9e12, _HOPPER),
    Peak(r"\bA[18]00\b", 312e12, 312e12, 156e12, 19.5e12, _AMPERE),
    Peak(r"\bA30\b", 165e12, 165e12, 82e12, 10.3e12, _AMPERE),
    Peak(r"\bA40\b", 149.7e12, 149.7e12, 74.8e12, 37.4e12, _AMPERE),
    Peak(r"\bA10\b", 125e12, 125e12, 62.5e12, 31.2e12, _AMPERE),
    Peak(r"\bL40S\b", 362e12, 362e12, 183e12, 91.6e12, _ADA),
    Peak(r"\bL40\b", 181e12, 181e12, 90.5e12, 90.5e12, _ADA),
    Peak(r"\bL4\b", 121e12, 121e12, 60e12, 30.3e12, _ADA),
    Peak(r"\bRTX 4090\b", 165.2e12, 165.2e12, 82.6e12, 82.6e12, _ADA),
    Peak(r"\bRTX 3090\b(?! Ti)", 71e12, 71e12, 35.6e12, 35.6e12, _GA102),
    Peak(r"\bRTX A6000\b", 154.8e12, 154.8e12, 77.4e12, 38.7e12, _GA102),
    Peak(r"\bV100-SXM2\b", 125e12, None, None, 15.7e12, _VOLTA),
    Peak(r"\bV100-PCIE\b", 112e12, None, None, 14e12, _VOLTA),
    Peak(r"\bT4\b", 65e12, None, None, 8.1e12, "NVIDIA T4 data sheet"),
)


def peak_flops(device_name: str, numbers: NumberType) -> float | None:
    """Operations a second that a GPU of that name can do; None where it is not known.

    A GPU without the tensor cores for tf32 computes such products in fp32.
    """
    peak = next((peak for peak in PEAKS if re.search(peak.name, device_name)), None)
    if peak is None:
        return None
    found: float | None = getattr(peak, numbers)
    return peak.fp32 if found is None and numbers == "tf32" else found


def number_type(precision: str) -> NumberType | None:
    """In what the matrix products of a Lightning trainer with that `precision` are computed; None for another."""
    if precision.startswith("bf16"):
        return "bf16"
    if precision.startswith("16"):
        return "fp16"
    if precision.startswith("32"):
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return None
