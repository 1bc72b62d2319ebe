"""A file is replaced completely or not at all, and it is synced before its rename."""

import errno
import functools
import os
import stat

import pytest

from genlight.adapter.plumbing import durable
from genlight.adapter.plumbing.durable import (
    TEMPORARY_PREFIX,
    create_file,
    fsync_directory,
    make_directory,
    write_all,
    write_bytes_durably,
)
from support.messages import refusal

pytestmark = pytest.mark.promise(name="checkpoint")


@pytest.fixture
def calls(monkeypatch):
    """The system calls in order, each with the name of its file."""
    seen, opened = [], {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "close")}

    def spy_open(path, *args, **kwargs):
        descriptor = real["open"](path, *args, **kwargs)
        opened[descriptor] = os.path.basename(path)
        return descriptor

    def spy(name):
        def call(descriptor, *args):
            seen.append((name, opened.get(descriptor, "?")))
            return real[name](descriptor, *args)

        return call

    def spy_replace(source, target):
        seen.append(("replace", os.path.basename(target)))
        real["replace"](source, target)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "replace", spy_replace)
    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, spy(name))
    return seen


@pytest.mark.parametrize("data", [b"", b"x", b"\x00" * 100_000])
def test_the_file_holds_exactly_the_bytes(tmp_path, data):
    path = tmp_path / "a.json"
    path.write_bytes(b"old and longer than the new one")

    write_bytes_durably(path, data)

    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_synced_before_the_rename_and_the_folder_after_it(tmp_path, calls):
    write_bytes_durably(tmp_path / "a.json", b"data")

    kinds = [name for name, _ in calls]
    assert kinds == ["write", "fsync", "replace", "fsync"]
    written, synced, renamed, folder = [about for _, about in calls]
    assert written == synced
    assert written.startswith(TEMPORARY_PREFIX + "a.json-")
    assert (renamed, folder) == ("a.json", tmp_path.name)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "stop"])
def test_a_failure_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail(*args):
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        write_bytes_durably(path, b"new")
    monkeypatch.undo()

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


TEAM = 54321
"""A group that is neither this user's own nor root's."""


@pytest.mark.parametrize(
    ("mode", "group", "file", "folder"),
    [
        (0o755, TEAM, 0o600, 0o700),
        (0o1777, TEAM, 0o600, 0o700),
        (0o775, 0, 0o600, 0o700),
        (0o775, TEAM, 0o640, 0o750),
        (0o2755, TEAM, 0o640, 0o750),
        (0o2700, TEAM, 0o600, 0o700),
        (0o777, 0, 0o640, 0o750),
    ],
    ids=["readable", "sticky", "root's group", "a group's", "a team's", "closed", "everybody's"],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another group")
def test_files_and_folders_are_private_except_in_a_shared_folder(tmp_path, mode, group, file, folder):
    os.chown(tmp_path, -1, group)
    tmp_path.chmod(mode)
    before = os.umask(0o027)
    try:
        write_bytes_durably(tmp_path / "file", b"")
        write_bytes_durably(tmp_path / "secret", b"", mode=0o600)
        make_directory(tmp_path / "folder", shared=None)
        make_directory(tmp_path / "closed")
        create_file(tmp_path / "empty")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": file, "empty": file, "secret": 0o600, "folder": folder, "closed": 0o700}


def test_a_wrong_place_is_an_error(tmp_path):
    (tmp_path / "a").touch()
    for error, act in (
        (FileNotFoundError, lambda: write_bytes_durably(tmp_path / "absent" / "a.json", b"x")),
        (FileNotFoundError, lambda: fsync_directory(tmp_path / "absent")),
        (NotADirectoryError, lambda: fsync_directory(tmp_path / "a")),
        (NotADirectoryError, lambda: make_directory(tmp_path / "a" / "b" / "c")),
        (FileExistsError, lambda: make_directory(tmp_path / "a")),
    ):
        with pytest.raises(error):
            act()


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(durable.os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))

    with (tmp_path / "f").open("wb", buffering=0) as file:
        write_all(file.fileno(), b"0123456789")
        write_all(file.fileno(), memoryview(b"abcd"))

    assert (tmp_path / "f").read_bytes() == b"0123456789abcd"


def test_a_file_system_that_cannot_sync_a_directory_needs_no_sync(tmp_path, monkeypatch):
    def refuse(descriptor, *, code=errno.EINVAL):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    fsync_directory(tmp_path)
    monkeypatch.setattr(os, "fsync", functools.partial(refuse, code=errno.EIO))
    with refusal(OSError):
        fsync_directory(tmp_path)
