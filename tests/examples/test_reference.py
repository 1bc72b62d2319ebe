"""What the package READMEs say of arguments, events and keys is what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "make_reference.py"


def test_the_references_are_up_to_date():
    """A reader of a README would be told of arguments that no longer exist."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run `make reference`"
