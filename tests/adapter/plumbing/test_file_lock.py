"""A lock has one holder at a time, and none after its holder has ended in any way."""

import copy
import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from genlight.adapter.plumbing.file_lock import FileLock, LockHeldError, NoLocksError, holding_process, is_held
from genlight.adapter.plumbing.safe_open import UnsafeFileError

HOLD = """
import os, sys, time
from genlight.adapter.plumbing.file_lock import FileLock

lock = FileLock(sys.argv[1])
child = os.fork() if sys.argv[2] == "fork" else 0
if child == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def without_locks(monkeypatch):
    """A file system without locks, such as Lustre without its mount option."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


def hold_elsewhere(path, mode="plain"):
    """Start another process that holds the lock; return it, and the id of its forked child or its own."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), mode], stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def test_a_second_holder_in_the_same_process_is_refused_until_the_first_releases(path):
    lock = FileLock(path)
    assert is_held(path)
    path.chmod(0o644)
    assert is_held(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "a check changes nothing"
    with pytest.raises(LockHeldError):
        FileLock(path, tries=2)
    lock.release()
    lock.release()
    assert not is_held(path)
    FileLock(path).release()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_process_is_named_and_its_lock_ends_when_it_is_killed(path):
    process, _ = hold_elsewhere(path)
    with process:
        with pytest.raises(LockHeldError) as caught:
            FileLock(path)
        assert holding_process(caught.value.filename) in (process.pid, None)  # a sandbox may hide the holder
        assert caught.value.filename == str(path)
        process.kill()
        process.wait()
    FileLock(path).release()


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(path):
    process, child = hold_elsewhere(path, "fork")
    with process:
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)
            FileLock(path).release()
        finally:
            os.kill(child, 9)


def test_a_file_that_was_moved_aside_is_not_locked(path, monkeypatch):
    lock, aside = fcntl.flock, path.with_suffix(".aside")
    path.touch()

    def lock_late(descriptor, operation):
        if not aside.exists():
            path.rename(aside)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    held = FileLock(path)
    assert os.path.samestat(os.fstat(held.descriptor), path.stat())
    held.release()


def test_a_copy_holds_no_lock(path):
    lock = FileLock(path)
    assert copy.deepcopy(lock).descriptor == -1
    assert is_held(path)
    lock.release()


def test_a_link_instead_of_the_lock_is_not_followed(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFileError):
        FileLock(path)
    assert not is_held(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_an_error_with_the_systems_reason(path, without_locks):
    with pytest.raises(NoLocksError) as caught:
        FileLock(path)
    assert caught.value.strerror == os.strerror(errno.ENOSYS)
    assert not is_held(path)
