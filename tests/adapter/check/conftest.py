"""The two processes of a check come from the fork server, for speed."""

from __future__ import annotations

import os
import sys

import pytest

from support.forked import Forked


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    def start(folder, rank):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        log = folder / f"rank{rank}.log"
        return Forked("genlight.adapter.check.subject", folder, rank, environ=environ, folder=folder, log=log)

    monkeypatch.setattr("genlight.adapter.check.subject.start_rank", start)
