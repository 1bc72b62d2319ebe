"""The supervisors of a run on several nodes: where each one is, how they find each other, and their messages.

Each node has one supervisor (`restarts`). The first one decides: it tells the others when an attempt begins and when
the run ends, and they report each rank that has ended.

It leaves its port and a new token in a file of the run's folder, which all nodes share and only this user may read.
Every message has a number and a digest made with that token, so nobody else can begin or end an attempt. Messages are
JSON of fixed types. A supervisor that dies closes its connections, and a node that vanishes no longer answers the
kernel's probes of them, so supervisors need no thread: they fork.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..cluster.job_context import current_job_context, in_srun_task
from ..contract.exceptions import UsageError
from ..plumbing.durable import make_directory, write_bytes_durably
from ..plumbing.safe_open import PRIVATE_FILE, read_own
from .rank_files import LAUNCH, RESTART
from .ranks import end_of_rank

log = logging.getLogger(__name__)

FILE = ".supervisor"
"""File of the run's folder in which the first supervisor leaves how to reach it."""
ARRIVES_WITHIN_S = 600.0
"""How long the supervisors wait for each other at the start."""
LOST_AFTER_S = 30
"""How long a node may not answer before the others take it for lost."""
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that a launcher sets for each process that it starts."""
_WAITS_SILENTLY_S = 10.0
_POLL_S = 0.2
_LARGEST = 1 << 16
_PROBE_S = 5
WAY_OUT = (
    "It forks the ranks of its node itself, so start it once on each node: `torchrun --nproc-per-node 1 --no-python "
    "genlight run ...` or `srun --ntasks-per-node=1 genlight run ...`"
)


class LostNodeError(Exception):
    """A supervisor has ended, does not answer, or has not arrived; the message names its node."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A supervisor arrives; the first one answers when all have arrived."""

    node: int
    ranks: tuple[int, ...]
    """Number of ranks of its node; from the first one, of all nodes."""


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
    """Number of attempts before this one."""
    launch: str
    """Identifies this attempt."""
    port: int
    """Port of the first node at which the ranks meet; 0 for a single rank."""
    died: Exit | None
    """The rank whose death ended the attempt before."""
    died_s: float
    """When it died, in seconds since 1970."""
    ended_s: float
    """When all ranks of the attempt before had ended, in seconds since 1970."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The run ends on all nodes."""

    code: int
    text: str = ""
    """Why all nodes have to be started again; empty if they need not."""


Message = Hello | Exit | Begin | End
_decoder = msgspec.json.Decoder(Message)


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
        """Open a free port that all nodes can reach; on one machine, that only this machine can reach."""
        if self.address in ("127.0.0.1", "localhost"):
            return socket.create_server(("127.0.0.1", 0))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0))


def launched_place() -> Place:
    """Return the place of this supervisor from the variables of its launcher; the only node without a launcher.

    Raises:
        UsageError: The launcher has started several processes on a node, or does not say how many nodes there are.
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
    """Connection to the supervisor of another node.

    Args:
        connection: The open connection.
        token: The secret of the first supervisor.
        is_first: Whether this process is the first supervisor.
    """

    def __init__(self, connection: socket.socket, token: str, *, is_first: bool) -> None:
        self._connection, self._token, self._is_first = connection, token.encode(), is_first
        self.node = 0
        """The other node."""
        self.messages: list[Message] = []
        """Messages that have arrived."""
        self._part, self._key, self._rest = secrets.token_hex(16).encode(), b"", b""
        self._counts = {True: 0, False: 0}
        """Messages of the first supervisor, and of the other one."""
        connection.settimeout(LOST_AFTER_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        probes = {socket.TCP_KEEPIDLE: _PROBE_S, socket.TCP_KEEPINTVL: _PROBE_S}
        probes |= {socket.TCP_KEEPCNT: LOST_AFTER_S // _PROBE_S - 1, socket.TCP_USER_TIMEOUT: 1000 * LOST_AFTER_S}
        for option, value in probes.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.sendall(self._part + b"\n")

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection in this process."""
        self._connection.close()

    def put(self, message: Message) -> None:
        """Send a message, once the other side has sent its part of the key.

        Raises:
            OSError: The other supervisor has ended or does not answer.
            LostNodeError: As from `read`.
        """
        while not self._key:
            self.read()
        body = msgspec.json.encode(message)
        self._connection.sendall(self._digest(body, of_first=self._is_first) + b" " + body + b"\n")

    def next(self) -> Message:
        """Return the oldest message; wait for it if there is none.

        Raises:
            LostNodeError: As from `read`.
        """
        while not self.messages:
            self.read()
        return self.messages.pop(0)

    def read(self) -> None:
        """Wait for some bytes, and add the messages that are complete.

        Raises:
            LostNodeError: The other supervisor has ended or does not answer, or the bytes are not from it.
        """
        try:
            if not (data := self._connection.recv(_LARGEST)):
                raise ConnectionError("its supervisor has closed the connection")
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines and not self._key:
                parts = (self._part, lines.pop(0)) if self._is_first else (lines.pop(0), self._part)
                self._key = hmac.digest(self._token, b" ".join(parts), "sha256")
            self.messages += [self._decode(line) for line in lines]
            if len(self._rest) > _LARGEST:
                raise ValueError("a line is too long")
        except (OSError, ValueError) as error:
            raise LostNodeError(f"node {self.node}, counted from 0, is lost: {error}") from error

    def _decode(self, line: bytes) -> Message:
        digest, _, body = line.partition(b" ")
        if not hmac.compare_digest(digest, self._digest(body, of_first=not self._is_first)):
            raise ValueError("a message was not made with the token of the run")
        return _decoder.decode(body)

    def _digest(self, body: bytes, *, of_first: bool) -> bytes:
        self._counts[of_first] += 1
        return hmac.digest(self._key, f"{of_first} {self._counts[of_first]} ".encode() + body, "sha256").hex().encode()


def tell(links: Mapping[int, Link], message: Message) -> None:
    """Send a message to other supervisors. Whoever reads from a lost one notices that it is lost."""
    for link in links.values():
        with contextlib.suppress(OSError):
            link.put(message)


def await_ends(links: Mapping[int, Link], within_s: float) -> None:
    """Wait until the other supervisors have ended."""
    end, left = time.monotonic() + within_s, [*links.values()]
    while left and (ready := select.select(left, [], [], max(0.0, end - time.monotonic()))[0]):
        for link in ready:
            try:
                link.read()
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
        UsageError: The nodes have different numbers of ranks.
    """
    if place.nodes == 1:
        return {}
    began, has_warned = time.monotonic(), False

    def check_wait(nodes: str) -> None:
        nonlocal has_warned
        waited_s = time.monotonic() - began
        if waited_s >= within_s or is_stopping():
            how = "it was stopped" if is_stopping() else f"for {within_s:g} s, in vain"
            raise LostNodeError(f"node {place.node} of {place.nodes}, counted from 0, has waited for {nodes}: {how}")
        if waited_s >= _WAITS_SILENTLY_S and not has_warned:
            has_warned = True
            log.warning("node %d has waited %g s for %s", place.node, _WAITS_SILENTLY_S, nodes)

    launch = " ".join(os.environ.get(name, "") for name in (*LAUNCH, RESTART, "MASTER_ADDR", "MASTER_PORT"))
    if place.is_first:
        links, counts = _receive_all(place, ranks, folder, launch, check_wait)
    else:
        link = _join(place, ranks, folder / FILE, launch, check_wait)
        while not link.messages:
            check_wait("the other nodes")
            if select.select([link], [], [], _POLL_S)[0]:
                link.read()
        hello = link.next()
        links, counts = {0: link}, hello.ranks if isinstance(hello, Hello) else ()
    if len({*counts}) != 1:
        counted = ", ".join(f"{count} on node {node}" for node, count in enumerate(counts))
        raise UsageError(
            f"--restarts needs equally many ranks on each node, but counts {counted}: set `lightning.devices`"
        )
    return links


def _join(place: Place, ranks: int, path: Path, launch: str, check_wait: Callable[[str], None]) -> Link:
    while True:
        check_wait("node 0")
        with contextlib.suppress(OSError, ValueError, LostNodeError):  # the file is absent, or of an earlier start
            address = msgspec.json.decode(read_own(path, limit=_LARGEST), type=_Address)
            if address.launch == launch:
                connection = socket.create_connection((place.address, address.port), timeout=LOST_AFTER_S)
                link = Link(connection, address.token, is_first=False)
                link.put(Hello(place.node, (ranks,)))
                return link
        time.sleep(_POLL_S)


def _receive_all(
    place: Place, ranks: int, folder: Path, launch: str, check_wait: Callable[[str], None]
) -> tuple[dict[int, Link], tuple[int, ...]]:
    token, links, guests, counts = secrets.token_hex(32), dict[int, Link](), list[Link](), {0: ranks}
    with place.listen() as listener:
        make_directory(folder, shared=None)
        address = _Address(listener.getsockname()[1], token, launch)
        write_bytes_durably(folder / FILE, msgspec.json.encode(address), mode=PRIVATE_FILE)
        while missing := [str(node) for node in range(1, place.nodes) if node not in links]:
            check_wait(f"node {', '.join(missing)}")
            for ready in select.select([listener, *guests], [], [], _POLL_S)[0]:
                if ready is listener:
                    with contextlib.suppress(OSError):
                        guests.append(Link(listener.accept()[0], token, is_first=True))
                    continue
                try:
                    ready.read()
                except LostNodeError:  # anybody may connect
                    guests.remove(ready)
                for hello in ready.messages:
                    if isinstance(hello, Hello) and 0 < hello.node < place.nodes:
                        ready.node, links[hello.node], counts[hello.node] = hello.node, ready, sum(hello.ranks)
                        guests.remove(ready)
                ready.messages.clear()
    (folder / FILE).unlink(missing_ok=True)
    by_node = tuple(counts[node] for node in range(place.nodes))
    tell(links, Hello(0, by_node))
    return links, by_node
