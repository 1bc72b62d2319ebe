"""The examples as they lie in the repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from genlight.adapter import compat

EXAMPLES = Path(__file__).parents[2] / "examples"


def import_file(name: str, path: Path):
    """Import a file under the given name, because several examples call their module ``trainer``."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def digits():
    """The module with the digits trainer."""
    before = set(sys.modules)
    compat.install()
    yield import_file("example_digits_trainer", EXAMPLES / "digits" / "trainer.py")
    for name in set(sys.modules) - before:
        if name.startswith(("gen_worker", "example_")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def make_dataset():
    """The module that writes the digits data.

    scikit-learn is not among the packages of the tests: it brings scipy, which `import lightning` loads if it is
    installed. That made each of the hundreds of processes that the tests start a second slower.
    """
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    return import_file("example_digits_make_dataset", EXAMPLES / "digits" / "make_dataset.py")
