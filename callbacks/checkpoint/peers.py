"""Checkpoints in the memory of several nodes: their copies on other nodes, and their way to the disk before a resume.

Rank zero saves in the memory of its node. The nodes form a ring: in the background, the first rank of each node sends
every new checkpoint to the first rank of the next node. The receiver commits it in its own memory, complete or absent.
So after one round all nodes have the checkpoint. Of the checkpoints that wait while another one is sent, only the
newest is sent. The sender opens all files before it sends the first, so a checkpoint may be removed meanwhile.

Before a resume all ranks agree on the newest checkpoint that a node has in memory. That node copies it to the disk,
which all nodes share. If the copy is not intact, another node that has it is tried, then the next older checkpoint.

The first ranks have a separate gloo group. It needs no server and no additional port, and is protected exactly as well
as the exchange of gradients.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ...adapter.contract.exceptions import CheckpointError
from ...adapter.plumbing.devices import host_group
from ...adapter.plumbing.safe_open import open_regular, read_regular
from ...adapter.plumbing.threads import started
from ..rank_channel import Channel
from .format.record import LARGEST_RECORD_BYTES, MOST_NAMES, CheckpointRecord, FileEntry, read_record, step_name
from .listing import list_checkpoints
from .memory_tier import memory_folder, memory_id, require_room
from .storage import copy_checkpoint, delete_checkpoint, read_pieces

log = logging.getLogger(__name__)

_PIECE = 16 << 20
_NOTHING = b""
"""Answer of a node that needs no file of a checkpoint."""
_NO_LIMIT = dt.timedelta(days=365)
"""Wait for a message: until there is one, or the connection closes."""
_NEVER_SENT = 1 << 20
"""A tag of messages that nobody sends."""
_CLOSES_WITHIN_S = 5.0
"""Longest wait for the end of the ring when training ends; then the connections are closed."""


def first_ranks(channel: Channel) -> list[int]:
    """Return the first rank of each node; ranks are on one node if they share its memory. Collective."""
    ids = channel.gather_everywhere(memory_id())
    return sorted({ids.index(each) for each in ids})


def save_newest(
    channel: Channel, directory: Path, accept: Callable[[CheckpointRecord], bool]
) -> CheckpointRecord | None:
    """Copy the newest intact checkpoint in the memory of any node to `directory`, and return its record. Collective.

    Args:
        channel: Connects all ranks.
        directory: The folder of checkpoints on disk, which all nodes share.
        accept: Whether a checkpoint is newer than those on disk, and the run may continue from it.
    """
    folder = memory_folder(directory) if channel.rank in first_ranks(channel) else None
    listed = [] if folder is None else list_checkpoints(folder)
    own = {each.record.digest: each.record for each in listed if each.record and accept(each.record)}
    offers = channel.gather_everywhere({digest: (record.step, record.path.name) for digest, record in own.items()})
    found = [(step, rank, digest, name) for rank, each in enumerate(offers) for digest, (step, name) in each.items()]
    for step, rank, digest, name in sorted(found, key=lambda offer: (-offer[0], offer[1])):

        def copy(rank: int = rank, digest: str = digest) -> None:
            if channel.rank == rank:
                copy_checkpoint(own[digest], directory)

        try:
            channel.agreed(copy, f"copy step {step} from the memory of its node to the disk")
            return read_record(directory / name)
        except (CheckpointError, OSError) as error:
            log.warning("Step %d in the memory of the node of rank %d is not used: %s", step, rank, error)
    return None


def forget_copies(directory: Path) -> None:
    """Remove the copies in the memory of this node. Not called on the first node, which has the originals."""
    if (folder := memory_folder(directory)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


class _Link:
    """Messages between two ranks: a size, then that many bytes; the size -1 says that nothing follows."""

    def __init__(self, group: dist.ProcessGroup, other: int, tag: int) -> None:
        self._group, self._other, self._tag = group, other, tag

    def put(self, data: bytes | memoryview | None) -> None:
        """Send a message.

        Raises:
            RuntimeError: The other rank has ended.
        """
        self._transfer(dist.isend, torch.tensor([-1 if data is None else len(data)], device="cpu"))
        if data:
            writable = data if isinstance(data, memoryview) else bytearray(data)
            self._transfer(dist.isend, torch.frombuffer(writable, dtype=torch.uint8))

    def get(self, limit: int) -> memoryview:
        """Receive a message of at most `limit` bytes.

        Raises:
            _RingEnd: Nothing follows.
            RuntimeError: The other rank has ended, or sends more.
        """
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._transfer(dist.irecv, size)
        nbytes = int(size)
        if nbytes > limit:
            raise RuntimeError(f"rank {self._other} sends {nbytes:,} bytes in place of at most {limit:,}")
        if nbytes < 0:
            raise _RingEnd
        data = bytearray(nbytes)
        if data:
            self._transfer(dist.irecv, torch.frombuffer(data, dtype=torch.uint8))
        return memoryview(data)

    def break_off(self) -> None:
        """Close the connections of the group: a timeout does that, and every wait in it fails."""
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(torch.zeros(1, device="cpu"), self._other, group=self._group, tag=_NEVER_SENT)
            assert work is not None
            work.wait(dt.timedelta(milliseconds=1))

    def _transfer(self, begin: Callable[..., dist.Work | None], data: torch.Tensor) -> None:
        if (work := begin(data, self._other, group=self._group, tag=self._tag)) is not None:
            work.wait(_NO_LIMIT)


class Ring:
    """This node's place in the ring: two threads, one that receives checkpoints and one that sends them on.

    Args:
        group: Process group of the first ranks.
        rank: This rank.
        ranks: The first ranks of all nodes, at least two.
        folder: The folder in the memory of this node.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, ranks: Sequence[int], folder: Path) -> None:
        at, count = ranks.index(rank), len(ranks)
        self._next = _Link(group, ranks[(at + 1) % count], at)
        self._before = _Link(group, ranks[at - 1], (at - 1) % count)
        self._is_first, self._folder = at == 0, folder
        self._waiting: CheckpointRecord | None = None
        self._changed = threading.Condition()
        self._is_over = self._is_closing = self._is_slow = self._has_ended = False
        works = (self._send_all, self._receive_all)
        self._threads = [started(threading.Thread(target=w, name="genlight-peer-copy", daemon=True)) for w in works]

    def offer_saved(self, saved: Future[CheckpointRecord | None]) -> None:
        """Send the checkpoint of a save that has ended."""
        if saved.exception() is None and (record := saved.result()) is not None:
            self._offer(record)

    def close(self) -> bool:
        """End the ring on the first node. On any other node, wait until the ring ends and its copies are removed.

        If the ring does not end soon, because a rank is lost, the copies stay for the next start of the run.

        Returns:
            Whether the previous node has ended its part. For the first node, this means that all other nodes have
            removed their copies.
        """
        if self._is_first:
            self._stop(is_over=True)
        self._wait_for_threads(_CLOSES_WITHIN_S)
        if any(thread.is_alive() for thread in self._threads):
            # An interpreter that exits must not have a thread within gloo: it would abort the process.
            self._stop()
            self._before.break_off()
            self._wait_for_threads(1.0)
        return self._has_ended

    def _offer(self, record: CheckpointRecord) -> None:
        """Send `record` next, in place of one that still waits."""
        with self._changed:
            if self._waiting is not None and not self._is_slow:
                self._is_slow = True
                text = "Step %d in memory is not copied to the next node, because copies take longer than saves in"
                log.warning(f"{text} memory. After each copy, that node gets the newest step", self._waiting.step)
            self._waiting = record
            self._changed.notify()

    def _wait_for_threads(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))

    def _stop(self, *, is_over: bool = False) -> bool:
        """Stop the threads after the message in flight; return False if they were stopping already.

        Args:
            is_over: Whether the first node has ended the ring.
        """
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
            self._is_over |= is_over
            self._changed.notify()
        return not was_closing

    def _send_all(self) -> None:
        """Send offered checkpoints until the ring ends, then the end itself."""
        with self._ending():
            while not self._is_closing:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closing)
                    record, self._waiting = self._waiting, None
                if record is not None:
                    self._send(record)
            if self._is_over:
                self._next.put(None)

    def _send(self, record: CheckpointRecord) -> None:
        """Send the record of a checkpoint, then the files that the next node asks for."""
        with contextlib.ExitStack() as opened:
            try:
                content = read_regular(record.path, limit=LARGEST_RECORD_BYTES)
                paths = [record.path.parent / entry.path for entry in record.files]
                files = [opened.enter_context(os.fdopen(open_regular(path), "rb", buffering=0)) for path in paths]
            except OSError:  # a newer checkpoint has replaced this one, and is offered next
                return
            self._next.put(content)
            wanted = self._next.get(MOST_NAMES)
            buffer = memoryview(bytearray(_PIECE))
            for file, entry in itertools.compress(zip(files, record.files, strict=True), wanted):
                left = entry.size
                while left and not self._is_closing:
                    piece = buffer[:left]
                    file.readinto(piece)  # if it is too short, the digest will differ
                    self._next.put(piece)
                    left -= len(piece)

    def _receive_all(self) -> None:
        with self._ending():
            while True:
                self._receive(bytes(self._before.get(LARGEST_RECORD_BYTES)))

    def _receive(self, content: bytes) -> None:
        """Receive a checkpoint; it is complete and proven when this returns, and earlier ones are removed.

        Raises:
            CheckpointError: It differs from its record, or it could not be written.
        """
        record = read_record(self._folder / "received.json", content)
        record = replace(record, path=self._folder / f"{step_name(record.step)}.json")
        if self._is_first:
            self._before.put(_NOTHING)
            seconds = time.time() - record.created_at_ms / 1000
            log.debug("step %d in memory is on all nodes, %.3f s after it was saved", record.step, seconds)
            return
        try:
            require_room(record.size_bytes, record.name)
        except CheckpointError as error:
            self._before.put(_NOTHING)
            log.warning("A checkpoint in memory is not copied to this node: %s", error)
            return
        earlier = [each.record for each in list_checkpoints(self._folder) if each.record is not None]
        # Files that an earlier checkpoint also has, such as frozen weights, are not sent again.
        known = {_key(entry): (each, entry) for each in earlier for entry in each.files}
        self._before.put(bytes(_key(entry) not in known for entry in record.files))

        def read(entry: FileEntry) -> Iterator[bytes | memoryview]:
            return read_pieces(*known[_key(entry)]) if _key(entry) in known else self._pieces(entry.size)

        copy_checkpoint(record, self._folder, read)
        for listed in list_checkpoints(self._folder):
            if listed.path != record.path:
                delete_checkpoint(listed.path)
        self._offer(read_record(record.path))

    def _pieces(self, size: int) -> Iterator[memoryview]:
        while size:
            piece = self._before.get(min(size, _PIECE))
            size -= len(piece)
            yield piece
        if self._is_closing:
            raise CheckpointError("it is complete only now, and may be older than the state of the run")

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the ring if an error, or the end of the previous node, ends the work of a thread in this block."""
        try:
            yield
        except _RingEnd:
            self._has_ended = True
            if not self._is_first:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._stop(is_over=True)
        except (RuntimeError, CheckpointError, OSError) as error:  # gloo raises the first if a connection closes
            if self._stop():
                log.warning("From now on no checkpoint in memory is copied to another node: %s", error)
                self._before.break_off()


def open_ring(channel: Channel, ranks: Sequence[int], directory: Path, open_here: Callable[[], object]) -> Ring | None:
    """Begin to send checkpoints in memory from node to node, or log why that is not possible. Collective.

    Args:
        channel: Connects all ranks.
        ranks: The first ranks of all nodes.
        directory: The folder of checkpoints on disk.
        open_here: Makes the folder in memory on a node other than the first.

    Returns:
        This node's place; None on ranks that are not the first of their node, or without a ring.
    """

    def prepare() -> None:
        if len(ranks) == 1:
            raise CheckpointError("all ranks of the run share one memory")
        if channel.rank in ranks[1:]:
            open_here()

    try:
        channel.agreed(prepare, "hold copies of checkpoints in memory")
    except (CheckpointError, OSError) as error:
        if channel.rank == 0:
            log.warning("Checkpoints in memory are not copied to other nodes: %s", error)
        elif channel.rank in ranks:
            forget_copies(directory)
        return None
    group = host_group(ranks=ranks)
    if channel.rank not in ranks or (folder := memory_folder(directory)) is None:
        return None
    return Ring(group, channel.rank, ranks, folder)


class _RingEnd(Exception):
    """The rank before this one has sent its last message."""


def _key(entry: FileEntry) -> tuple[int, str]:
    return entry.size, entry.xxh3_128
