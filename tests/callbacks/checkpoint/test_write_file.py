"""A written file has the bytes of memory and is durable."""

import errno
import itertools
import os

import pytest
import xxhash

from genlight.callbacks.checkpoint import storage
from genlight.callbacks.checkpoint.storage import hash_file, write_file
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")

CHUNK = 1000


@pytest.fixture
def many_chunks(monkeypatch):
    monkeypatch.setattr(storage, "_WRITE_CHUNK", CHUNK)
    monkeypatch.setattr(storage, "_JOINED_BUFFER", CHUNK // 10)


@pytest.fixture
def data():
    return os.urandom(50 * CHUNK + 7)


def test_a_file_holds_its_buffers_one_after_the_other(many_chunks, data, tmp_path):
    cuts = [0, 1, 1, 500, 20_000, 20_100, len(data)]
    buffers = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    facts = write_file(tmp_path / "file", buffers)
    assert (tmp_path / "file").read_bytes() == data
    assert facts == hash_file(tmp_path / "file") == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_an_empty_file_is_written(tmp_path):
    assert write_file(tmp_path / "file", []) == hash_file(tmp_path / "file") == (0, xxhash.xxh3_128_hexdigest(b""))


def test_the_sync_comes_after_the_last_write(many_chunks, data, tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    write_file(tmp_path / "file", [data])
    assert calls == ["write"] * 51 + ["fsync"]


def test_a_write_that_fails_is_raised_and_nothing_is_synced(many_chunks, data, tmp_path, monkeypatch, open_files):
    real, calls = os.write, []

    def fail_late(descriptor, part):
        calls.append("write")
        if len(calls) == 30:
            raise OSError(errno.ENOSPC, "injected")
        return real(descriptor, part)

    monkeypatch.setattr(os, "write", fail_late)
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    with refusal(OSError):
        write_file(tmp_path / "file", [data])
    assert calls == ["write"] * 30
    assert open_files(tmp_path) == 0


def test_short_writes_are_continued(many_chunks, data, tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, part: real(descriptor, memoryview(part)[:333]))
    write_file(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data
