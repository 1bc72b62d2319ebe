"""The run with planted faults says and does what its page shows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


def told(text: str) -> list[tuple[str, ...]]:
    """Step, kind and first words of each line; how slow a rank seems depends on the machine."""
    lines = re.findall(r"^ *(\d+)  (diagnostic|recovery) +(\w+(?: begins| ends| \d(?:  \w+)?)?)", text, re.MULTILINE)
    return [line for line in lines if not line[2].startswith("straggler")]


@pytest.mark.slow
def test_faults_are_reported_and_recovered_from_as_the_page_shows(examples, tmp_path):
    run = [sys.executable, "-W", "ignore", examples / "diagnosis" / "faults.py", tmp_path / "run"]
    result = subprocess.run(run, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page = told((examples / "diagnosis" / "README.md").read_text(encoding="utf-8"))
    assert len(page) == 20
    assert told(result.stdout) == page
    assert "the first output that is not finite is that of 'model.body.2' in step 137" in result.stdout
