"""``genlight doctor``: what a job would run with, where each setting comes from, and what is wrong with it.

`command` is the command; the checks on this machine and those over the network each have a module. May import
everything.
"""

from __future__ import annotations

from . import command
from .command import add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]

HELP = command.__doc__
"""What the command line shows; the text above is about the folder."""
