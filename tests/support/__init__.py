"""Code that tests share: trainer classes, servers, programs of ranks. Imported as ``support``; it asserts nothing."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Folder of the programs that tests start as separate processes."""
