"""Starts processes of runs from one that has torch and Lightning loaded: a copy costs milliseconds, a start seconds.

It has one thread when it copies itself, so that a copy is as good as a process of its own. Requests and answers are
lines of JSON: a process to start, then its id; an id to ask for, then its exit code or null.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading

LOADED = (
    "lightning.pytorch",
    "genlight.adapter.assembly",
    "genlight.adapter.cli.command_line",
    "genlight.adapter.compat",
    "genlight.adapter.inputs.transfer",
    "genlight.adapter.module",
    "genlight.adapter.run",
    "genlight.callbacks.checkpoint",
    "genlight.callbacks.evaluate",
    "genlight.callbacks.stop_requests",
    "genlight.callbacks.upload_artifacts",
    "genlight.callbacks.watch_hangs",
)

HANGS_AFTER_S = 140
"""When a process that has not ended says where its threads are."""


def serve():
    """Answer requests; returns, in each process that it starts, what that is to be."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            ended, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1
            answer = os.fork()
            if answer == 0:
                return asked
        print(json.dumps(answer), flush=True)
    os._exit(0)


def become(wanted):
    """Turn this copy into a process with the wanted folder, environment and log, in a session of its own."""
    os.setsid()
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environ"])
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    faulthandler.dump_traceback_later(HANGS_AFTER_S)
    faulthandler.register(signal.SIGQUIT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)


def run(program, arguments):
    """As ``python program arguments`` or ``python -m program arguments``."""
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()  # what was loaded stays, and is not looked through in every copy
    wanted = serve()
    become(wanted)
    run(wanted["program"], wanted["arguments"])
