"""Checks of a trainer class: ``genlight check``, ``genlight compare``, ``genlight doctor --step``.

The first two compare `Snapshot`s of the class in a plain loop and under genlight, before and after a resume, and on one
process and several. May import `module`, `inputs` and everything below them.
"""
