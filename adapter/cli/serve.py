"""Show the runs below a folder live in a browser: curves, samples, checkpoints and findings.

On the page you can stop a run and download checkpoints and pictures. `/metrics` has the figures of all runs for
Prometheus, `/runs.json` the list as JSON. Only this machine can reach the page, unless you name another address with
--host. Then the page requires the token that is part of the printed address.

Exit codes: 0 ended by Ctrl-C, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import re
import secrets
import socket

from ..contract.exceptions import UsageError
from .parser import folder_of_runs
from .terminal import say

_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "dir", metavar="DIR", nargs="?", default=".", type=folder_of_runs, help="folder with runs below it"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at; only this machine can reach the default"
    )
    parser.add_argument("--port", type=int, default=8765, help="port to listen at; 0 takes a free one")
    parser.add_argument("--token", action="store_true", help="require a token even if only this machine can reach it")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="allow the name of a proxy; may be repeated"
    )
    parser.add_argument(
        "--prefix", default="", type=_prefix, metavar="PATH", help="path below which a proxy shows it, such as /runs"
    )


def _prefix(text: str) -> str:
    path = f"/{text.strip('/')}" if text.strip("/") else ""
    if not _PATH.fullmatch(path):
        raise argparse.ArgumentTypeError(f"{text!r} is not a path of letters, digits and - . _ ~, such as /runs")
    return path


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code: 0, after Ctrl-C.

    Raises:
        UsageError: The address cannot be used.
        ModuleNotFoundError: The extra ``serve`` (starlette, uvicorn) is not installed.
    """
    import uvicorn

    from ..view.site import application

    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listening = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:
        text = f"cannot listen at {args.host} port {args.port}: {error}; choose another with --host or --port"
        raise UsageError(text) from None
    token = secrets.token_urlsafe(24) if args.token or not _is_of_this_machine(args.host) else None
    names = {socket.gethostname(), socket.getfqdn(), args.host, *args.allow_host}
    app = application(args.dir, token=token, hosts=names if token else args.allow_host, prefix=args.prefix)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    shown = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host  # noqa: S104 - what the user chose
    address = f"[{shown}]" if ":" in shown else shown
    say(f"http://{address}:{listening.getsockname()[1]}{args.prefix}/{f'?token={token}' if token else ''}")
    say(f"shows the runs below {args.dir} until Ctrl-C", style="dim")
    with listening, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _is_of_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
