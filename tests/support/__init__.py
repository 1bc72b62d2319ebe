"""What tests share: trainer classes, servers, programs of one rank. Imported as ``support``; it asserts nothing."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Where the programs lie that tests start as processes of their own."""
