"""The background thread: bounded, honest about waiting, and gone when it should be."""

import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from genlight.adapter import ArrowDataModule, ArrowFeed
from genlight.adapter.feed import batching
from genlight.adapter.feed.batching import ReadAhead
from support.messages import refusal


@pytest.fixture
def decoders() -> Iterator[Callable[[], list[threading.Thread]]]:
    """The decoding threads that the test has begun; garbage, which may hold some, is collected when the test asks."""

    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("genlight-feed")]

    earlier = set(running())
    gc.disable()
    yield lambda: [thread for thread in running() if thread not in earlier]
    gc.enable()


class Decoding:
    """Items, with a note of how many were asked for and a signal when no more are for a while."""

    def __init__(self, count: int) -> None:
        self.made, self._count = 0, count

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            self.made += 1
            yield number

    def settles_at(self, expected: int) -> bool:
        """Whether so many items are made, and then no more."""
        deadline = time.monotonic() + 60
        while self.made < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return self.made == expected


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_reading_ahead_stops_at_the_number_of_chunks(ahead):
    decoding = Decoding(10)
    reader = ReadAhead(iter(decoding), ahead)
    try:
        assert decoding.settles_at(ahead)
        next(reader)
        assert decoding.settles_at(ahead + 1)
    finally:
        reader.close()


def test_an_error_comes_after_what_was_decoded_before_it():
    def failing():
        yield 0
        raise OSError("the disk is gone")

    reader = ReadAhead(failing(), 2)
    assert next(reader) == 0
    with refusal(OSError):
        next(reader)
    reader.close()


def test_closing_ends_the_thread_also_when_it_waits_for_room(rows_file, decoders):
    feed = ArrowFeed(rows_file(*[4] * 50), batch_size=4, readahead=1, shuffle=True)
    next(iter(feed))
    feed.close()
    iterator = iter(feed)
    next(iterator)
    assert len(decoders()) == 1
    feed.close()
    assert not decoders()


def test_a_feed_in_a_cycle_takes_its_thread_along_when_garbage_is_collected(rows_file, decoders):
    feed = ArrowFeed(rows_file(*[4] * 50), batch_size=4)
    feed.itself = iter(feed)
    next(feed.itself)
    del feed
    assert len(decoders()) == 1
    gc.collect()
    assert not decoders()


@pytest.mark.parametrize("has_validation", [False, True])
def test_no_thread_is_left_between_two_epochs(rows_file, decoders, has_validation):
    path = str(rows_file(*[4] * 50))
    data = ArrowDataModule(path, batch_size=4, val_paths=path if has_validation else None)
    list(data.train_dataloader())
    assert not decoders()


def test_a_process_that_ends_in_the_middle_of_reading_ends_cleanly(rows_file):
    code = (
        "import sys; from genlight.adapter import ArrowFeed; "
        "it = iter(ArrowFeed(sys.argv[1], batch_size=2, shuffle=True)); print(next(it).num_rows)"
    )
    path = rows_file(*[50] * 20)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


@pytest.mark.parametrize("readahead", [0, 2])
def test_waiting_for_data_is_measured(rows_file, readahead):
    feed = ArrowFeed(rows_file(20), batch_size=4, readahead=readahead, epochs=1)
    assert feed.wait_seconds == 0
    list(itertools.islice(feed, 2))
    assert feed.wait_seconds > 0


def test_batches_do_not_keep_more_than_their_own_chunk_alive(rows_file, monkeypatch):
    monkeypatch.setattr(batching, "CHUNK_BYTES", 1 << 16)
    feed = ArrowFeed(rows_file(*[2000] * 40), batch_size=100, readahead=1, epochs=1)
    gc.collect()
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - before for _ in feed)
    # In use, waiting and being decoded: three chunks of 64 KiB, and what Parquet needs for itself; all is 1.5 MB.
    assert most < 1_000_000
