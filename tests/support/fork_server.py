"""Starts processes from one that has torch and Lightning loaded: a copy costs milliseconds, a start seconds.

    python fork_server.py SOCKET

The client is `support.forked`. It connects for each process, and sends one line of JSON: ``program`` (a file, or a
module), ``arguments``, ``environ``, ``folder``, ``log``, ``output``. It is sent two lines: the process's id, and the
exit status once it has ended. When a client goes away its process is killed. The server ends when its standard input
does.

It has one thread when it copies itself, so that a copy is as good as a new process.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading

LOADED = (
    "lightning.pytorch",
    "torch._dynamo",  # by the first optimizer, for seconds
    "torch._functorch.aot_autograd",  # by the first compilation
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "genlight.adapter.job.lightning_objects",
    "genlight.adapter.cli.command_line",
    "genlight.adapter.compat",
    "genlight.adapter.feed",
    "genlight.adapter.inputs.transfer",
    "genlight.adapter.module.module",
    "genlight.adapter.run.run",
    "genlight.callbacks.checkpoint",
    "genlight.callbacks.evaluation.evaluate",
    "genlight.callbacks.job_progress",
    "genlight.callbacks.log_metrics",
    "genlight.reporters.events.event_logger",
    "genlight.callbacks.stop.stop_requests",
    "genlight.callbacks.upload_artifacts",
    "genlight.callbacks.watch_hangs",
    "genlight.callbacks.write_samples",
)

HANGS_AFTER_S = 140
"""Seconds after which a process that has not ended prints the stacks of its threads."""


class Server:
    """Serves in the process that makes it, and returns from `serve` in each process that it starts."""

    def __init__(self, path):
        self.selector = selectors.DefaultSelector()
        self.clients = {}
        self.wanted = None
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(100)
        self.selector.register(self.listener, selectors.EVENT_READ, self.start)
        self.selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)

    def serve(self):
        """Answer requests; returns what a process that was started is to be."""
        while True:
            for key, _ in self.selector.select():
                key.data()
                if self.wanted is not None:
                    return self.wanted

    def start(self):
        client, _ = self.listener.accept()
        request = client.makefile().readline()
        if not request:  # the client was killed before it asked
            client.close()
            return
        assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1
        pid = os.fork()
        if pid == 0:
            self.let_go(client)
            self.wanted = json.loads(request)
            return
        process = os.pidfd_open(pid)
        self.clients[pid] = client
        self.selector.register(process, selectors.EVENT_READ, lambda: self.end(pid, process))
        self.selector.register(client, selectors.EVENT_READ, lambda: self.kill(pid))
        answer(client, pid)

    def let_go(self, client):
        """Close the server's files in a new process."""
        # Not unregistered: the selector's own file is shared with the server.
        self.selector.close()
        for each in (client, self.listener, *self.clients.values()):
            each.close()

    def end(self, pid, process):
        _, status = os.waitpid(pid, 0)
        self.selector.unregister(process)
        os.close(process)
        client = self.clients.pop(pid)
        self.selector.unregister(client)
        answer(client, os.waitstatus_to_exitcode(status))
        client.close()

    def kill(self, pid):
        """The client has disconnected, because it was killed."""
        if pid in self.clients:
            os.kill(pid, signal.SIGKILL)


def answer(client, number):
    with contextlib.suppress(ConnectionError):  # the client may be gone
        client.sendall(f"{number}\n".encode())


def become(wanted):
    """Turn this copy into a process with the wanted folder, environment and log, in a new session."""
    os.setsid()
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    for descriptor, file in ((1, wanted["output"]), (2, wanted["log"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.dump_traceback_later(HANGS_AFTER_S)
    faulthandler.register(signal.SIGQUIT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def run(program, arguments):
    """Run like ``python program arguments`` or ``python -m program arguments``."""
    sys.argv = [program, *arguments]
    # In place of the folder of this file.
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)) if program.endswith(".py") else os.getcwd())
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()  # loaded modules stay, so no copy needs to collect them
    server = Server(sys.argv[1])
    print("ready", flush=True)
    wanted = server.serve()
    become(wanted)
    run(wanted["program"], wanted["arguments"])
