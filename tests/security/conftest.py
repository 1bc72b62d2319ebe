"""Fixtures of the attacks: malicious servers, a job that misbehaves, artifacts that another user has planted."""

import contextlib
import itertools
import json
import os
import socket
import threading

import pytest

from genlight.adapter.job.config import resolve_run_config
from genlight.reporters import read_events
from support.file_server import other_server as other_server, retry as retry, server as server, sha256 as sha256
from support.loopback import serving

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


@pytest.fixture
def hostile_server():
    """Starts a server that sends pieces of an answer, a few a second and without end; returns its URL."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:

        def talk(connection, pieces):
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for piece in pieces:
                    if over.wait(0.02):
                        return
                    connection.sendall(piece)

        def serve(listener, pieces):
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=talk, args=(connection, pieces()), daemon=True).start()

        def start(first, repeated):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            pieces = lambda: itertools.chain([first], itertools.repeat(repeated))  # noqa: E731
            threading.Thread(target=serve, args=(listener, pieces), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start
        over.set()


TRAINER = '''
import logging, threading, warnings
from support.trainer_class import Counts


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Trainer(Counts):
    """Counts its steps; in the second one it does what a hyperparameter says."""

    def setup(self, ctx):
        self.p = ctx.job.hyperparams

    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        if state["steps"] == 2:
            exec(self.p.get("does", ""), {**globals(), "p": self.p, "ctx": ctx, "state": state})
        return result
'''


class Job:
    """A job of four steps whose trainer runs the given code in the second one."""

    def __init__(self, folder, module):
        self.folder, self.out, self.module = folder, folder / "out", module
        self.environ = {"HOME": "/nowhere"}

    def run(self, does="", *, hyperparams=None, **fields):
        from support.jobs import run, write_job

        usual = {"max_steps": 4, "metric_every": 2, "mock_batches": [1, 2, 3, 4]}
        usual["lightning"] = {"accelerator": "cpu", "enable_progress_bar": False}
        given = {"trainer": f"{self.module}:Trainer", "hyperparams": {"does": does, **(hyperparams or {})}}
        return run(write_job(self.folder, **usual | given | fields), environ=self.environ)

    @property
    def events(self):
        return list(read_events(self.out / "metrics" / "events.jsonl"))

    @property
    def ends(self):
        return [event for event in self.events if event["event"] in ("completed", "failed")]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Make a small job that misbehaves on request."""
    monkeypatch.chdir(tmp_path)
    module = f"misbehaving_{abs(hash(str(tmp_path)))}"  # one module per test, because imports are cached
    (tmp_path / f"{module}.py").write_text(TRAINER)
    return Job(tmp_path, module)


@pytest.fixture
def receiver(tmp_path):
    """A server that accepts every message and keeps it in ``posts`` as (path, body)."""
    with serving(tmp_path) as server:
        yield server
