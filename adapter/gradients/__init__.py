"""A trainer's own ``backward()`` and ``step()``: routing, averaging over ranks, FSDP 2, precision.

May import discovery and what that may import.
"""
