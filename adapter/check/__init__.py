"""Checks of a trainer class: ``genlight check``, ``genlight compare``, ``genlight doctor --step``.

The first two compare snapshots of a class: in a plain loop and under genlight, before and after a resume, on one
process and on several. May import `module`, `inputs` and everything below them.
"""
