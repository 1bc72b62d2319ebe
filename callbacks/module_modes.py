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
_MAX_NAMES = 6


@contextlib.contextmanager
def keep_modes(pl_module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Restore the modes that the block changes, and report the modules once.

    After an evaluation that leaves the model in eval mode, all later steps would train without dropout.

    Args:
        pl_module: The module whose submodules keep their modes.
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
        named = _reported.setdefault(pl_module, set())
        if changed and not failed and hook not in named and pl_module.global_rank == 0:
            named.add(hook)
            paths = _outermost(pl_module, changed)
            more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
            log.warning(
                "`%s` changed the mode of modules; genlight has restored it, because training would continue without "
                "dropout, for example: %s%s. Call `train()` on them at the end of the hook.",
                hook,
                ", ".join(paths[:_MAX_NAMES]),
                more,
            )


def _outermost(pl_module: pl.LightningModule, changed: set[int]) -> list[str]:
    """Return the paths of the `changed` modules that are not inside another changed one."""
    found = getattr(getattr(pl_module, "discovered", None), "modules", ())
    roots = [(each.path, each.value) for each in found] or [(type(pl_module).__name__, pl_module)]
    paths: list[str] = []
    for path, root in roots:
        for name, part in root.named_modules():
            where = f"{path}.{name}" if name else path
            if id(part) in changed and not any(where.startswith(f"{outer}.") for outer in paths):
                paths.append(where)
    return paths
