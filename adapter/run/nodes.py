"""The supervisors of a run on several nodes: where each one is, how they find each other, and their messages.

Each node has one supervisor (`restarts`). The supervisor of node 0, called the first one, decides: it tells the others
when an attempt begins, when rank zero has ended and when the run ends. The others report to it each of their ranks that
has ended.

The first supervisor leaves its port and a new token in `FILE` in the run's folder. All nodes share the folder, and only
this user may read the file. Both ends of a connection prove that they know the token, so nobody else can begin or end
an attempt. Messages are JSON of fixed types.

No thread sends heartbeats, because a process with threads cannot be forked safely. Instead, the kernel closes the
connections of a supervisor that dies, and its keepalive probes (`_OPTIONS`) end those to a node that vanishes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import msgspec

from ..cluster.job_context import current_job_context, in_srun_task
from ..contract.exceptions import UsageError
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.failures import EXIT_STARTUP
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .rank_files import LAUNCH, RESTART
from .ranks import end_of_rank

log = logging.getLogger(__name__)

FILE = ".supervisor"
"""File in the run's folder with the port and the token of the first supervisor (`_Address`)."""
ARRIVES_WITHIN_S = 600.0
"""How long the supervisors wait for each other at the start."""
LOST_AFTER_S = 30
"""Seconds without an answer after which a node counts as lost."""
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that a launcher such as torchrun sets for each process that it starts."""
_WAITS_SILENTLY_S = 10.0
_POLL_S = 0.2
_LARGEST = 1 << 16
_ANSWERS_WITHIN_S = 5
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWERS_WITHIN_S, 0)),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_AFTER_S // 5 - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S),
)
WAY_OUT = (
    "It forks the ranks of its node itself, so start it once on each node: `torchrun --nproc-per-node 1 --no-python "
    "genlight run ...` or `srun --ntasks-per-node=1 genlight run ...`"
)


class LostNodeError(Exception):
    """Another supervisor has ended, does not answer, or did not arrive in time; the message names its node."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of every supervisor but the first one: it has arrived."""

    node: int
    ranks: int
    """Number of ranks of its node."""


class Exit(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended."""

    rank: int
    code: int
    """Exit code; negative for a signal."""
    is_stopping: bool = False
    """Whether the supervisor of its node has received a stop signal."""
    is_lost: bool = False
    """Whether its node is lost."""

    def __str__(self) -> str:
        return f"rank {self.rank} was lost with its node" if self.is_lost else end_of_rank(self.rank, self.code)


class Begin(msgspec.Struct, frozen=True, tag=True):
    """An attempt begins on all nodes."""

    restart: int
    """Number of attempts that these supervisors have made before this one."""
    launch: str
    """Identifies this attempt."""
    port: int
    """Port of the first node at which the ranks meet; 0 for a single rank."""
    died: Exit | None
    """The rank whose death ended the attempt before; None for the first attempt and after a preemption."""
    died_s: float
    """When that rank died, in seconds since 1970; 0 without one."""
    ended_s: float
    """When this attempt was ordered, in seconds since 1970: once all ranks of the attempt before had ended."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The run ends on all nodes."""

    code: int
    text: str = ""
    """The error that ends it: checkpoints in memory then stay for the next start. Empty after a last attempt, when each
    node removes them."""
    memory: str = ""
    """`memory_id` of the first node after a last attempt: a node with the same memory removes nothing itself."""


Message = Hello | Exit | Begin | End
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


@dataclass(frozen=True)
class Place:
    """The place of a supervisor among the nodes."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    """Address of the first node."""

    @property
    def is_first(self) -> bool:
        """Whether the supervisor of this node decides."""
        return self.node == 0

    def listen(self) -> socket.socket:
        """Listen at a free port. Only this machine can reach it if `address` is the loopback, otherwise all nodes."""
        if self.address in ("127.0.0.1", "localhost"):
            return socket.create_server(("127.0.0.1", 0))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def launched_place() -> Place:
    """Return the place of this supervisor, from the variables of its launcher. Without a launcher there is one node.

    Raises:
        UsageError: The launcher has started several processes on a node, or its variables lack the number of this node,
            the number of nodes or the first node's address.
    """
    variables = [name for name in LAUNCHERS if name in os.environ]
    if variables:
        by, tasks = f"`{variables[0]}` is set", os.environ.get("LOCAL_WORLD_SIZE", "1")
        node, nodes, address = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    elif in_srun_task():
        try:
            by, context = "this is a task of srun", current_job_context()
        except ValueError as error:
            raise UsageError(str(error)) from error
        tasks = "1" if context.world_size == context.num_nodes else f"{context.world_size} on {context.num_nodes} nodes"
        node, nodes, address = str(context.node_rank), str(context.num_nodes), context.master_addr or ""
    else:
        return Place()
    text = f"--restarts cannot work with the launcher of this process ({by}): "
    if tasks != "1":
        raise UsageError(f"{text}it has started several on a node ({tasks}). {WAY_OUT}")
    if not (node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes) and address):
        given = f"RANK={node!r}, WORLD_SIZE={nodes!r}, MASTER_ADDR={address!r}"
        raise UsageError(
            f"{text}the number of this node, of all nodes, and the first one's address are {given}. {WAY_OUT}"
        )
    return Place(int(node), int(nodes), address)


class Link:
    """Connection to the supervisor of another node; both have proven that they know the token.

    Args:
        connection: The open connection.
        token: The secret of the first supervisor.
        is_first: Whether this process is the first supervisor.

    Raises:
        LostNodeError: The other side does not know the token, or does not answer.
    """

    def __init__(self, connection: socket.socket, token: str, *, is_first: bool) -> None:
        connection.setblocking(True)
        for option in _OPTIONS:
            connection.setsockopt(*option)
        self.node = 0
        """The other node."""
        self._connection = Connection(connection.detach())
        proofs = (deliver_challenge, answer_challenge) if is_first else (answer_challenge, deliver_challenge)
        try:
            for prove in proofs:
                prove(self._connection, token.encode())
        except (OSError, EOFError, ProcessError) as error:
            raise LostNodeError(f"the other side does not prove that it knows the token: {error}") from error

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection in this process."""
        self._connection.close()

    def put(self, message: Message) -> None:
        """Send a message. If the other supervisor is lost, nothing is sent, and `get` raises the error."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.json.encode(message))

    def get(self) -> Message:
        """Wait for the next message and return it.

        Raises:
            LostNodeError: The other supervisor has ended or does not answer, or the message is not one of ours.
        """
        select.select([self], [], [])
        try:
            return _decoder.decode(self._connection.recv_bytes(_LARGEST))
        except (OSError, EOFError, ValueError) as error:
            reason = str(error) or "its supervisor has ended"
            raise LostNodeError(f"node {self.node}, counted from 0, is lost: {reason}") from error


def await_ends(links: Iterable[Link], within_s: float) -> None:
    """Wait until the supervisors behind `links` have ended, at most `within_s` seconds."""
    end, left = time.monotonic() + within_s, [*links]
    while left and (ready := select.select(left, [], [], max(0.0, end - time.monotonic()))[0]):
        for link in ready:
            try:
                link.get()
            except LostNodeError:
                left.remove(link)


class _Address(msgspec.Struct, frozen=True):
    """How to reach the first supervisor."""

    port: int
    token: str
    launch: str


def meet(
    place: Place, ranks: int, folder: Path, is_stopping: Callable[[], bool], *, within_s: float = ARRIVES_WITHIN_S
) -> dict[int, Link]:
    """Connect the first supervisor to all others, and each of the others to the first; return the links by node.

    Args:
        place: The place of this one.
        ranks: Number of ranks of this node.
        folder: The run's folder.
        is_stopping: Returns whether to stop waiting.
        within_s: Longest wait.

    Raises:
        LostNodeError: A node has not arrived in time, or the wait was stopped.
        UsageError: The nodes have different numbers of ranks. Raised on the first node; the others receive an `End`.
    """
    if place.nodes == 1:
        return {}
    began, links, counts = time.monotonic(), dict[int, Link](), {0: ranks}
    launch = " ".join(os.environ.get(name, "") for name in (*LAUNCH, RESTART, "MASTER_ADDR", "MASTER_PORT"))
    warn_at = began + _WAITS_SILENTLY_S

    def wait(nodes: str, port: Link | socket.socket | None) -> bool:
        """Wait at most `_POLL_S`; return whether something has arrived at `port`. Raises `LostNodeError`."""
        nonlocal warn_at
        now = time.monotonic()
        if is_stopping() or now >= began + within_s:
            how = "was stopped while it waited" if is_stopping() else f"has waited {within_s:g} s in vain"
            raise LostNodeError(f"node {place.node} of {place.nodes}, counted from 0, {how} for {nodes}")
        if now >= warn_at:
            warn_at = math.inf
            log.warning("node %d has waited %g s for %s", place.node, _WAITS_SILENTLY_S, nodes)
        return bool(select.select([] if port is None else [port], [], [], _POLL_S)[0])

    if not place.is_first:
        while not links:
            wait("node 0", None)
            with contextlib.suppress(OSError, ValueError, LostNodeError):  # no file yet, or one of an earlier start
                address = msgspec.json.decode(read_own(folder / FILE, limit=_LARGEST), type=_Address)
                if address.launch == launch:
                    connection = socket.create_connection((place.address, address.port), _ANSWERS_WITHIN_S)
                    links[0] = Link(connection, address.token, is_first=False)
                    links[0].put(Hello(place.node, ranks))
        while not wait("other nodes", links[0]):  # once all have arrived, the first one sends its order
            pass
        return links
    token = secrets.token_hex(32)
    with place.listen() as listener:
        make_directory(folder, shared=None)
        address = _Address(listener.getsockname()[1], token, launch)
        write_bytes_durably(folder / FILE, msgspec.json.encode(address), mode=PRIVATE_FILE)
        while missing := [str(node) for node in range(1, place.nodes) if node not in links]:
            if wait(f"node {', '.join(missing)}", listener):
                with contextlib.suppress(OSError, LostNodeError):  # a stranger may connect, but does not know the token
                    link = Link(listener.accept()[0], token, is_first=True)
                    hello = link.get()
                    if isinstance(hello, Hello) and str(hello.node) in missing:
                        link.node, links[hello.node], counts[hello.node] = hello.node, link, hello.ranks
    (folder / FILE).unlink(missing_ok=True)
    if len({*counts.values()}) > 1:
        found = ", ".join(f"{count} on node {node}" for node, count in sorted(counts.items()))
        text = f"--restarts needs equally many ranks on each node, but there are {found}: set `lightning.devices`"
        for link in links.values():
            link.put(End(EXIT_STARTUP, text))
        raise UsageError(text)
    return links
