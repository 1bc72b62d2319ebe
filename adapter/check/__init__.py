"""A trainer class, judged: ``genlight check``, ``genlight compare``, ``genlight doctor --step``.

All of them take `Snapshot`s: of the class in a plain loop and under genlight, before and after a resume, on one process
and on several. May import `module`, `inputs` and everything below them.
"""
