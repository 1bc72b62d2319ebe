"""The arguments, events and keys in the package READMEs match the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "make_reference.py"


def test_the_references_are_up_to_date():
    """Otherwise a README would describe arguments that no longer exist."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `make reference`"
