"""Routes a trainer's ``backward()`` and ``step()`` calls through averaging over ranks, FSDP 2, precision and hooks.

This package may import discovery, and everything that discovery may import.
"""
