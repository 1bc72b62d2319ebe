"""Data-parallel training of a class that calls its modules, backward and updates itself.

``averaging`` decides when gradients are averaged; ``buckets`` selects and exchanges them. ``buffers`` sends the buffers
of rank 0 to all ranks.

This package may import ``lost_ranks``, ``rank_check``, ``refused``, ``step_part``, ``torch_hooks`` and
``torch_internals`` of the folder above, discovery, and everything that discovery may import.
"""
