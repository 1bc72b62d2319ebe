"""Data-parallel training of a class that calls its modules, backward and updates itself.

``averaging`` says when gradients are averaged, ``buckets`` how they travel, ``parameters`` which ones, and ``buffers``
what rank 0 sends to all.

May import ``rank_check``, ``refused``, ``step_part``, ``torch_hooks`` and ``torch_internals`` of the folder above,
discovery, and what that may import.
"""
