"""``genlight doctor``: what a job would run with, where each setting comes from, and what is wrong with it.

`command` is the command; the checks on this machine and those over the network each have a module. May import
everything.
"""

from __future__ import annotations

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
