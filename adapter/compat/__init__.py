"""Makes ``gen_worker.trainer`` and the modules of ``worldflux`` importable, unless the real packages are installed.

Importing anything of genlight imports this. May import contract and plumbing; other parts of genlight only when one of
their names is used.
"""

from __future__ import annotations

from .alias import MODULES, install, run_training_runtime_from_env

__all__ = ["MODULES", "install", "run_training_runtime_from_env"]

install()
