"""What happens to a trainer's ``backward()`` and ``step()``: routing, averaging over ranks, FSDP 2, precision.

May import discovery and what that may import.
"""
