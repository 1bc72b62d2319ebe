"""What the attacks share: a job whose artifacts a neighbour has prepared, and a user who is somebody else."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from genlight.adapter.job.config import resolve_run_config


def _load(*parts):
    path = Path(__file__).parents[1].joinpath(*parts)
    name = "_".join(("security", *path.parent.parts[-2:], path.stem))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


_inputs = _load("adapter", "inputs", "conftest.py")
server, other_server, retry, sha256 = _inputs.server, _inputs.other_server, _inputs.retry, _inputs.sha256

STRANGER = 54_321
"""A user of this machine who is neither root nor runs the tests."""


@pytest.fixture
def stranger():
    """The number of another user, for tests that give files away; only root can."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    return STRANGER


@pytest.fixture
def config_of(tmp_path):
    """The configuration of a small job whose artifacts lie in ``out``."""

    def resolve(*overrides, environ=None, **fields):
        path = tmp_path / "job.json"
        path.write_text(json.dumps({"run_id": "r", "trainer": "t:T", "max_steps": 1, **fields}))
        given = [f"artifacts_dir={tmp_path / 'out'}", *overrides]
        return resolve_run_config(spec_path=path, overrides=given, environ=environ or {})

    return resolve
