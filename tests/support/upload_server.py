"""The client side of `chaos_server`: a real HTTP server on loopback, as a process, that misbehaves on request.

The top conftest imports the fixtures.
"""

import json
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

TOKEN = "t0ken-that-must-not-leak"


@dataclass
class Chaos:
    port: int
    directory: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def control(self, **options):
        self._ask("/__control", json.dumps(options).encode())

    def _ask(self, path, data=None):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(self.url + path, data=data), timeout=60) as answer:
            return json.loads(answer.read())

    @property
    def state(self):
        return self._ask("/__state")

    @property
    def count(self):
        return self._ask("/__count")["applied"]

    def messages(self, path):
        """Bodies that were accepted at `path`, in order."""
        return [item["body"] for item in self.state["applied"] if item.get("path") == path]

    def requests(self, path_part=""):
        return [item for item in self.state["requests"] if path_part in item["path"]]

    def files(self):
        return {path.name: path.read_bytes() for path in sorted((self.directory / "files").iterdir())}


def start_server(directory):
    script = Path(__file__).with_name("chaos_server.py")
    process = subprocess.Popen(
        [sys.executable, "-I", str(script), str(directory)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    return process, Chaos(int(process.stdout.readline()), directory)


def stop_server(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="session")
def chaos_servers():
    """Servers are kept for the next test: starting one takes longer than most tests."""
    servers = []
    yield servers
    for process, _ in servers:
        stop_server(process)


@pytest.fixture
def start_chaos(tmp_path, chaos_servers):
    """A server that knows nothing yet; the function returns another one at each call."""
    used = 0

    def start(name):
        nonlocal used
        if used == len(chaos_servers):
            chaos_servers.append(start_server(tmp_path / name))
        _, chaos = chaos_servers[used]
        used += 1
        chaos.control(directory=str(tmp_path / name))
        return Chaos(chaos.port, tmp_path / name)

    return start


@pytest.fixture
def chaos(start_chaos):
    """A real HTTP server on loopback that takes uploads, and misbehaves on request."""
    return start_chaos("server")
