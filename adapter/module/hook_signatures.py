"""Whether the hooks of a trainer can be called as the loop calls them."""

from __future__ import annotations

import inspect
from typing import Any

from ..contract.types import OPTIONAL_HOOKS
from ..plumbing.text import closest
from .plugin_loading import optional_hook

__all__ = ["HOOK_ARGUMENTS", "misspelled_hooks", "signature_faults"]

HOOK_ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "setup": (("ctx",), ()),
    "configure": (("ctx",), ()),
    "prepare_batch": (("raw_batch", "state", "ctx"), ()),
    "train_step": (("batch", "state", "ctx"), ()),
    "state_dict": (("state",), ()),
    "load_state_dict": (("state", "payload", "ctx"), ()),
    "save_checkpoint": ((), ("state", "step", "output_dir", "final", "ctx")),
    "load_checkpoint": ((), ("state", "checkpoint_dir", "payload", "ctx")),
    "rollout": (("state", "ctx"), ()),
    "rollout_state": (("state",), ()),
    "load_rollout_state": (("state", "payload", "ctx"), ()),
    "evaluate": (("state", "ctx"), ()),
    "trainer_hooks": (("state", "ctx"), ()),
}
"""Positional and keyword arguments with which each hook is called."""

OPTIONAL_NAMES = (*OPTIONAL_HOOKS, "generate_sample", "rank_local")
ALIKE = 0.85
"""How near a name has to be to that of a hook, from 0 to 1, to be taken for a misspelling; `evaluate_loss` is not."""


def misspelled_hooks(target: Any) -> list[str]:
    """Attributes of `target`, a trainer class or an instance, that are nearly optional hooks; a sentence each.

    Nothing else tells of one: a hook that may be left out is not missed.
    """
    found = []
    for name in dir(target):
        meant = None if name.startswith("_") else closest(name, OPTIONAL_NAMES, alike=ALIKE)
        if meant is not None and name not in OPTIONAL_NAMES and not hasattr(target, meant):
            found.append(f"`{name}` is not a hook and is never called; did you mean `{meant}`?")
    return found


def signature_faults(target: Any) -> list[str]:
    """The hooks of `target`, a class or an instance, that do not take their arguments; a sentence each."""
    faults = []
    for name, (positional, keywords) in HOOK_ARGUMENTS.items():
        hook = optional_hook(target, name)
        if hook is None:
            continue
        # Of a class, a plain function still wants its instance.
        is_unbound = inspect.isclass(target) and inspect.isfunction(inspect.getattr_static(target, name))
        given = ["self", *positional] if is_unbound else positional
        try:
            signature = inspect.signature(hook)
        except (TypeError, ValueError):  # written in C, without a signature
            continue
        try:
            signature.bind(*given, **dict.fromkeys(keywords))
        except TypeError as error:
            arguments = ", ".join([*positional, *(f"{keyword}=…" for keyword in keywords)])
            faults.append(f"{name}{signature} cannot be called as {name}({arguments}): {error}")
    return faults
