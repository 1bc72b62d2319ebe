"""The random states that training draws from: Python's, NumPy's, torch's on the host and on every device."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["capture_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The random state of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    # The 625 words as one tensor, which is stored far faster than as many numbers.
    python = {"version": version, "words": torch.tensor(words), "gauss": gauss}
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> list[str]:
    """Take over a captured state.

    Returns:
        What could not be restored here, in words: a device that this process does not have, say.
    """
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    return [*_restore_cuda(state.get("cuda", [])), *_restore_mps(state.get("mps"))]


def _restore_cuda(states: list[Any]) -> list[str]:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states[:available]):
        torch.cuda.set_rng_state(state.cpu(), device)
    lost = len(states) - available
    return [f"the random state of {lost} CUDA devices that are not here"] if lost > 0 else []


def _restore_mps(state: Any) -> list[str]:
    if state is None:
        return []
    if not torch.backends.mps.is_available():
        return ["the random state of an MPS device that is not here"]
    torch.mps.set_rng_state(state.cpu())
    return []
