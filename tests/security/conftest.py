"""What the attacks share: a job whose artifacts a neighbour has prepared, and a user who is somebody else."""

from __future__ import annotations

import json
import os

import pytest

from genlight.adapter.job.config import resolve_run_config

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
