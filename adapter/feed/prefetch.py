"""A background thread that decodes ahead of the training thread, within a number of chunks and of bytes.

It hands over large chunks, so that the cost of a hand-over is paid once per thousands of rows, and it waits when
enough is ready. An error travels in the same queue and is raised when the consumer comes to the place where the data
should have been.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from ..plumbing.threads import started
from .decode import Chunk

__all__ = ["ReadAhead"]

_FULL_SIZE = 1 << 20
_SMALL_WEIGHT = 1 / 64


class ReadAhead:
    """An iterator over the chunks of `make()`, decoded by a background thread.

    At most `max_items` chunks of more than 1 MiB, or as many more smaller ones, wait at a time, and together at most
    `max_bytes`, one chunk excepted: a chunk that is larger by itself is handed over when nothing else waits. With
    ``max_items=0`` there is no thread.

    Args:
        make: Makes the iterator that decodes; called in the thread. It must not refer to the consumer.
        max_items: Chunks kept ready.
        max_bytes: Bytes kept ready.
    """

    def __init__(self, make: Callable[[], Iterator[Chunk]], max_items: int, max_bytes: int) -> None:
        self.wait_seconds = 0.0
        self._direct = make() if max_items == 0 else None
        self._ready: deque[Chunk] = deque()
        if self._direct is None:
            self._queue = _Queue(max_items, max_bytes)
            filling = threading.Thread(target=_fill, args=(self._queue, make), name="genlight-feed", daemon=True)
            thread = started(filling)
            # Also at interpreter exit: a thread that decodes while Arrow is torn down would crash the process.
            self._stop = weakref.finalize(self, _stop, self._queue, thread)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Chunk:
        if self._ready:
            return self._take()
        start = time.perf_counter()
        try:
            if self._direct is not None:
                return next(self._direct)
            self._ready = self._queue.take_all()
        finally:
            self.wait_seconds += time.perf_counter() - start
        return self._take()

    def _take(self) -> Chunk:
        chunk = self._ready.popleft()
        self._queue.release(chunk)
        return chunk

    def close(self) -> None:
        """Stop decoding and wait for the thread to end; more than one call is fine."""
        self._ready.clear()
        if self._direct is None:
            self._stop()
        else:
            self._direct = iter(())


class _Queue:
    """Hands chunks from one thread to another, in order, within limits.

    The consumer takes all that is there at once and releases chunks one by one as it uses them: with small chunks the
    two threads would otherwise wait for each other, and for the interpreter lock, at every single one.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._chunks: deque[Chunk] = deque()
        self._end: BaseException | None = None
        self._weight = 0.0
        self._bytes = 0
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, chunk: Chunk) -> bool:
        """Wait for room, then append; False when the consumer has gone."""
        size = chunk.batch.nbytes
        with self._changed:
            while not self._stopped and self._weight and self._is_too_much(size):
                self._changed.wait()
            if self._stopped:
                return False
            self._chunks.append(chunk)
            self._bytes += size
            self._weight += _weight(size)
            self._changed.notify_all()
            return True

    def _is_too_much(self, size: int) -> bool:
        return self._bytes + size > self._max_bytes or self._weight + _weight(size) > self._max_items

    def end(self, reason: BaseException) -> None:
        """No more chunks; the consumer gets `reason` raised after the last one."""
        with self._changed:
            self._end = reason
            self._changed.notify_all()

    def take_all(self) -> deque[Chunk]:
        """Everything that is ready, at least one chunk; at the end its reason is raised, each time."""
        with self._changed:
            while not self._chunks:
                if self._stopped:
                    raise StopIteration
                if self._end is not None:
                    raise self._end
                self._changed.wait()
            taken, self._chunks = self._chunks, deque()
            return taken

    def release(self, chunk: Chunk) -> None:
        """`chunk` is in use and no longer counts as waiting."""
        size = chunk.batch.nbytes
        with self._changed:
            self._bytes -= size
            self._weight -= _weight(size)
            # Waking the decoder for each of many small chunks would be the ping-pong that this avoids.
            if size >= _FULL_SIZE or self._weight <= self._max_items / 2:
                self._changed.notify_all()

    def stop(self) -> None:
        """End both sides."""
        with self._changed:
            self._stopped = True
            self._chunks.clear()
            self._changed.notify_all()


def _weight(size: int) -> float:
    """How much of a full-sized chunk this is; powers of two, so that sums of them are exact."""
    return 1.0 if size >= _FULL_SIZE else _SMALL_WEIGHT


def _fill(queue: _Queue, make: Callable[[], Iterator[Chunk]]) -> None:
    reason: BaseException = StopIteration()
    try:
        for chunk in make():
            if not queue.put(chunk):
                return
    except BaseException as error:  # noqa: BLE001 - raised in the training thread
        reason = error
    queue.end(reason)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.stop()
    # Garbage may be collected in any thread, in the decoding one too.
    if thread is not threading.current_thread():
        thread.join()
