"""Training and evaluation modes of modules that a hook of a trainer class leaves as it does not find them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator

import lightning.pytorch as pl

__all__ = ["keep_modes"]

log = logging.getLogger(__name__)

_named: weakref.WeakKeyDictionary[pl.LightningModule, set[str]] = weakref.WeakKeyDictionary()
"""Hooks of each module that were named."""
_NAMED_AT_MOST = 6


@contextlib.contextmanager
def keep_modes(pl_module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Put back the modes that the block changes, and name the modules once.

    An evaluation that leaves the model in eval mode would have all later steps train without dropout.

    Args:
        pl_module: Its modules keep their modes.
        hook: The hook of the trainer class that the block calls.
    """
    modes = [(part, part.training) for part in pl_module.modules()]
    failed = True
    try:
        yield
        failed = False
    finally:
        changed = {id(part) for part, was_training in modes if part.training != was_training}
        for part, was_training in modes:
            part.training = was_training
        named = _named.setdefault(pl_module, set())
        if changed and not failed and hook not in named and pl_module.global_rank == 0:
            named.add(hook)
            paths = _outermost(pl_module, changed)
            more = f" and {len(paths) - _NAMED_AT_MOST} more" if len(paths) > _NAMED_AT_MOST else ""
            log.warning(
                "`%s` left modules in another mode than it found them in, which genlight has put back, as training "
                "would go on with, say, no dropout: %s%s. Call `train()` on them at its end.",
                hook,
                ", ".join(paths[:_NAMED_AT_MOST]),
                more,
            )


def _outermost(pl_module: pl.LightningModule, changed: set[int]) -> list[str]:
    """The paths of the `changed` modules that are in no other one of them."""
    found = getattr(getattr(pl_module, "discovered", None), "modules", ())
    roots = [(each.path, each.value) for each in found] or [(type(pl_module).__name__, pl_module)]
    paths: list[str] = []
    for path, root in roots:
        for name, part in root.named_modules():
            where = f"{path}.{name}" if name else path
            if id(part) in changed and not any(where.startswith(f"{outer}.") for outer in paths):
                paths.append(where)
    return paths
