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

from .reader import Chunk

__all__ = ["ReadAhead"]


class ReadAhead:
    """An iterator over the chunks of `make()`, decoded by a background thread.

    At most `max_items` chunks wait at a time, and together at most `max_bytes`, one chunk excepted: a chunk that is
    larger by itself is handed over when nothing else waits. With ``max_items=0`` there is no thread.

    Args:
        make: Makes the iterator that decodes; called in the thread. It must not refer to the consumer.
        max_items: Chunks kept ready.
        max_bytes: Bytes kept ready.
    """

    def __init__(self, make: Callable[[], Iterator[Chunk]], max_items: int, max_bytes: int) -> None:
        self.wait_seconds = 0.0
        self._direct = make() if max_items == 0 else None
        if self._direct is None:
            self._queue = _Queue(max_items, max_bytes)
            thread = threading.Thread(target=_fill, args=(self._queue, make), name="genlight-feed", daemon=True)
            thread.start()
            # Also at interpreter exit: a thread that decodes while Arrow is torn down would crash the process.
            self._stop = weakref.finalize(self, _stop, self._queue, thread)

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Chunk:
        start = time.perf_counter()
        try:
            return next(self._direct) if self._direct is not None else self._queue.get()
        finally:
            self.wait_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Stop decoding and wait for the thread to end; more than one call is fine."""
        if self._direct is None:
            self._stop()
        else:
            self._direct = iter(())


class _Queue:
    """Hands chunks from one thread to another, in order, within limits."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items, self._max_bytes = max_items, max_bytes
        self._items: deque[tuple[Chunk | BaseException, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, item: Chunk | BaseException, size: int) -> bool:
        """Wait for room, then append; False when the consumer has gone."""
        with self._changed:
            while not self._stopped and self._full(size):
                self._changed.wait()
            if self._stopped:
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def _full(self, size: int) -> bool:
        return bool(self._items) and (len(self._items) >= self._max_items or self._bytes + size > self._max_bytes)

    def get(self) -> Chunk:
        """The next chunk; an exception that was put is raised, and again each time after."""
        with self._changed:
            while not self._items:
                if self._stopped:
                    raise StopIteration
                self._changed.wait()
            item, size = self._items[0]
            if isinstance(item, BaseException):
                raise item
            self._items.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        """End both sides."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()


def _fill(queue: _Queue, make: Callable[[], Iterator[Chunk]]) -> None:
    end: BaseException = StopIteration()
    try:
        for chunk in make():
            if not queue.put(chunk, chunk.batch.nbytes):
                return
    except BaseException as error:  # noqa: BLE001 - raised in the training thread
        end = error
    queue.put(end, 0)


def _stop(queue: _Queue, thread: threading.Thread) -> None:
    queue.stop()
    thread.join()
