"""The lowest supported Lightning: the tests of the loop pass on it too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOOP_TESTS = (
    "module/test_fit_loop.py",
    "module/test_loop_hooks.py",
    "module/test_lightning_parts.py",
    "test_training_loop.py",
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # It is many tests.
def test_the_loop_works_on_the_lowest_supported_lightning(tmp_path: Path) -> None:
    """The release that pyproject.toml names as the lowest is installed separately and used instead."""
    dependency = re.search(r'"lightning>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert dependency is not None
    patience = ["--retries", "10", "--timeout", "60"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", *patience, "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"lightning=={dependency[1]}"], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", "import lightning; print(lightning.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == dependency[1]
    tests = [str(ROOT / "tests" / "adapter" / name) for name in LOOP_TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
