"""Show the runs below a folder as pages of a browser, live, with their curves, samples, checkpoints and findings.

A run can be stopped there, and its checkpoints and pictures downloaded. Only this machine can reach the pages unless
--host says otherwise; then whoever opens them needs the token that is in the address written at the start.

Exit codes: 0 ended by Ctrl-C, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import secrets
import socket

from .parser import folder_of_runs
from .terminal import complain, say

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default=".", type=folder_of_runs, help="folder with runs below it"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; this machine alone without it")
    parser.add_argument("--port", type=int, default=8765, help="port to listen at; 0: any that is free")
    parser.add_argument("--token", action="store_true", help="ask for a token also at an address of this machine alone")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name by which browsers ask for it"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return its exit code: 0 after Ctrl-C, or 2 for what cannot be used."""
    try:
        import uvicorn

        from ..view.site import application
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette"):
            raise
        return complain("serve", f"{error.name} is not installed: pip install 'genlight[serve]'")
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listening = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:
        text = f"cannot listen at {args.host} port {args.port}: {error}; choose another with --host or --port"
        return complain("serve", text)
    token = secrets.token_urlsafe(24) if args.token or not _is_of_this_machine(args.host) else None
    names = {socket.gethostname(), socket.getfqdn(), args.host, *args.allow_host}
    app = application(args.dir, token=token, hosts=names if token else args.allow_host)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    shown = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host  # noqa: S104 - what the user chose
    address = f"[{shown}]" if ":" in shown else shown
    say(f"http://{address}:{listening.getsockname()[1]}/{f'?token={token}' if token else ''}")
    say(f"shows the runs below {args.dir} until Ctrl-C", style="dim")
    with listening, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _is_of_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
