"""Data-parallel training of a class that calls its modules, backward and updates itself.

``averaging`` says when gradients are averaged, ``buckets`` how they travel, ``parameters`` which ones, ``rank_check``
what becomes of ranks that do not belong together, and ``buffers`` what rank 0 sends to all.

May import ``refused``, ``step_part``, ``torch_hooks`` and ``torch_internals`` of the folder above, discovery, and what
that may import.
"""
