"""Stands for a job that ``fork_server.py`` runs: ends as it ends, and when this is killed, so is the job.

    python forked_job.py SOCKET JOB_SPEC FOLDER

The job notes its processes in the folder, by files whose names are ``<rank>-<pid>``.
"""

import json
import os
import socket
import sys


def main():
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        server.sendall(json.dumps({"argv": sys.argv, "environ": dict(os.environ)}).encode() + b"\n")
        status = int(server.makefile().readline())
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
