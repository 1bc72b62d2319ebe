"""Importing this module makes ``gen_worker.trainer`` importable, where the real package is not installed.

For plain Python and notebooks: whatever loads a trainer by its import path does it by itself, and imports this package
only then. May import contract and plumbing; nothing of a run before a name of it is asked for.

    import genlight.adapter.compat
    from gen_worker.trainer import StepContext, StepResult
"""

from __future__ import annotations

from .alias import MODULES, install, run_training_runtime_from_env

__all__ = ["MODULES", "install", "run_training_runtime_from_env"]

install()
