"""Where batches come from, as far as that tells whose code runs when one is asked for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

__all__ = ["runs_no_user_code"]

_OF_TORCH = ("torch.utils.data.", "lightning.")


def runs_no_user_code(loader: Any) -> bool:
    """Whether only code that is known runs in this process when `loader` is asked for a batch.

    Code of the user may look at weights, and a generator that closes over a model often does. A data loader with
    workers, of samplers that torch brings, leaves it to other processes; a loader of genlight's own says it itself, by
    ``runs_no_user_code``.
    """
    if isinstance(loader, DataLoader):
        parts = (loader, loader.sampler, loader.batch_sampler)
        return loader.num_workers > 0 and all(_is_of_torch(part) for part in parts if part is not None)
    return bool(getattr(loader, "runs_no_user_code", False))


def _is_of_torch(part: Any) -> bool:
    return f"{type(part).__module__}.".startswith(_OF_TORCH)
