"""How many floating point operations a step does, counted while it runs, and how many a GPU can do at most.

Peaks are dense matrix products on tensor cores with accumulation in fp32, at the clock that the maker states; figures
for sparse matrices, which data sheets like to show, are halved. ``fp32`` is the one without tensor cores.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

__all__ = ["PEAKS", "FlopCounter", "NumberType", "Peak", "StepFlops", "number_type", "peak_flops"]

log = logging.getLogger(__name__)

MOST_SHAPES = 32
"""How many shapes of batches are counted by themselves; with more the count of the last one stays."""


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch's own counter counts, by its formulas: products, convolutions and attention.

    Unlike `torch.utils.flop_counter.FlopCounterMode` it puts no hooks on modules and gradients, which others of the run
    may translate or forbid, and a formula that fails ends the count and not the step.

    Attributes:
        flops: What was counted; None once a formula has failed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None and self.flops is not None:
            self.flops = self._counted(formula, args, kwargs or {}, out)
        return out

    def _counted(
        self, formula: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> int | None:
        try:
            return (self.flops or 0) + int(formula(*args, **kwargs, out_val=out))
        except Exception as error:  # noqa: BLE001  # whatever a formula of torch does not foresee
            log.warning("the operations of a step cannot be counted: %s: %s", type(error).__name__, error)
            return None


class StepFlops:
    """The operations of a step, counted once for each shape of batch.

    Attributes:
        per_step: Operations of a step with a batch as it was looked at last; None while that is not known.
    """

    def __init__(self) -> None:
        self.per_step: int | None = None
        self._known: dict[object, int | None] = {}
        self._counter: FlopCounter | None = None
        self._shapes: object = None
        self.is_wanted = True
        """Whether the next step is to be counted."""

    def look_at(self, batch: Any) -> None:
        """Take the count for batches like this one, or ask for the next step to be counted."""
        shapes = shapes_of(batch)
        if shapes in self._known:
            self.per_step = self._known[shapes]
        elif len(self._known) < MOST_SHAPES:
            self.is_wanted = True

    def begin(self, batch: Any) -> None:
        """The step with `batch` begins, and is counted."""
        self.end(failed=True)
        self.is_wanted = False
        self._shapes = shapes_of(batch)
        self._counter = FlopCounter()
        self._counter.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, failed: bool = False) -> None:
        """The step has ended; nothing happens where none is being counted.

        Args:
            failed: Whether it was not a whole step.
        """
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not failed:
            # A trainer that does nothing that torch counts may do anything else.
            self.per_step = self._known[self._shapes] = counter.flops or None


def shapes_of(batch: Any) -> object:
    """A key for the shapes of a batch: those of its tensors and arrays, and row counts of Arrow batches."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple((str(name), shapes_of(value)) for name, value in batch.items())
    if isinstance(batch, list | tuple):
        # Of a list of samples the first one stands for all.
        return (len(batch), *(shapes_of(value) for value in batch[:8]))
    shape = getattr(batch, "shape", None)
    rows = getattr(batch, "num_rows", None)
    return tuple(shape) if isinstance(shape, tuple) else rows


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
