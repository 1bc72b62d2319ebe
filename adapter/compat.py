"""Importing this module makes ``gen_worker.trainer`` importable, where the real package is not installed.

For plain Python and notebooks: whatever loads a trainer by its import path does it by itself.

    import genlight.adapter.compat
    from gen_worker.trainer import StepContext, StepResult
"""

from __future__ import annotations

from .module.alias import MODULES, install, run_training_runtime_from_env

__all__ = ["MODULES", "install", "run_training_runtime_from_env"]

install()
