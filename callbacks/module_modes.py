"""Restore the training and evaluation modes of modules after a hook of a trainer class."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator

import lightning.pytorch as pl

log = logging.getLogger(__name__)

_reported: weakref.WeakKeyDictionary[pl.LightningModule, set[str]] = weakref.WeakKeyDictionary()
"""Hooks already reported, by module."""


@contextlib.contextmanager
def keep_modes(pl_module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Restore the modes that the block changes, and report the modules once.

    After an evaluation that leaves the model in eval mode, all later steps would train without dropout.

    Args:
        pl_module: The module whose submodules keep their modes.
        hook: The hook of the trainer class that the block calls.
    """
    modes = [(name, part, part.training) for name, part in pl_module.named_modules()]
    try:
        yield
    finally:
        changed = [name for name, part, was_training in modes if part.training != was_training]
        for _, part, was_training in modes:
            part.training = was_training
    named = _reported.setdefault(pl_module, set())
    if changed and hook not in named and pl_module.global_rank == 0:
        named.add(hook)
        log.warning(
            "`%s` changed the mode of %d modules, the first of them %s; genlight has restored it, because training "
            "would continue without dropout, for example. Call `train()` on them at the end of the hook.",
            *(hook, len(changed), changed[0]),
        )
