"""Forks jobs from a process that has torch and Lightning loaded, so that a job starts in a tenth of a second.

A process that has trained, or met other ranks, must not fork: this one only imports, and runs no thread. Its clients
are processes of ``forked_job.py``, each of which stands for one job, or one rank of it.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo  # Loaded by the first optimizer, for seconds.

# Imported before the fork, so that each job starts at once.
import genlight.adapter.assembly
import genlight.adapter.feed
import genlight.adapter.module  # noqa: F401
from genlight.adapter.run import RunOptions, run_job

HANGS_AFTER_S = 240


def run_forked(argv, environ):
    """In the new process: what ``python forked_job.py …`` says of itself, and no way back into the server."""
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)  # A job that hangs says where, and fails the test.
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv  # Lightning starts the other ranks with the command line of the first.
    spec, processes = Path(argv[2]), Path(argv[3])
    (processes / f"{environ.get('LOCAL_RANK', '0')}-{os.getpid()}").touch()
    code = 1
    try:
        code = run_job(RunOptions(spec_path=spec))
    finally:
        sys.stderr.flush()
        os._exit(code)


class Server:
    """One job for each connection: a request, then the exit status as the answer. A client that dies ends its job."""

    def __init__(self, path):
        self.selector = selectors.DefaultSelector()
        self.clients = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ, self.start)

    def start(self):
        client, _ = self.listener.accept()
        request = client.makefile().readline()
        if not request:  # The client was killed before it asked.
            client.close()
            return
        pid = os.fork()
        if pid == 0:
            client.close()
            self.listener.close()
            run_forked(**json.loads(request))
        process = os.pidfd_open(pid)
        self.clients[pid] = client
        self.selector.register(process, selectors.EVENT_READ, lambda: self.end(pid, process))
        self.selector.register(client, selectors.EVENT_READ, lambda: self.kill(pid))

    def end(self, pid, process):
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(process)
        os.close(process)
        client = self.clients.pop(pid)
        self.selector.unregister(client)
        with contextlib.suppress(ConnectionError):  # The client may be gone as well.
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        client.close()

    def kill(self, pid):
        """The client is gone, which is how it says that it was killed."""
        if pid in self.clients:
            os.kill(pid, signal.SIGKILL)

    def serve(self):
        while True:
            for key, _ in self.selector.select():
                key.data()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Server(sys.argv[1]).serve()
