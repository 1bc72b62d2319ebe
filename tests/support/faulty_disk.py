"""Fault injection at the level of system calls, and a model of a disk after a power cut."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

MUTATING = ("write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link")
"""Calls that change what is on the disk, or what a power cut would leave of it; opening to create counts too."""


class Crash(BaseException):
    """The process dies here: no handler of the code under test may do anything after it."""


class Injector:
    """Counts the mutating calls of the code under test and fails one of them, or all of them from one on."""

    def __init__(self, monkeypatch, fail, at=None):
        self.calls, self.at, self.fail, self.names = 0, at, fail, []
        self._real = {name: getattr(os, name) for name in (*MUTATING, "open")}
        for name in MUTATING:
            monkeypatch.setattr(os, name, self._wrap(name))
        monkeypatch.setattr(os, "open", self._open)

    def _open(self, path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            return self._call("open", path, flags, *args, **kwargs)
        return self._real["open"](path, flags, *args, **kwargs)

    def _wrap(self, name):
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    def _call(self, name, *args, **kwargs):
        self.calls += 1
        self.names.append(name)
        real = self._real[name]
        if self.at is None or self.calls < self.at:
            return real(*args, **kwargs)
        return self.fail(self, name, real, args, kwargs)

    @property
    def is_first(self):
        return self.calls == self.at


def crash_before(injector, name, real, args, kwargs):
    raise Crash


def crash_after(injector, name, real, args, kwargs):
    if injector.is_first:
        done = real(*args, **kwargs)
        if name == "open":
            os.close(done)  # as the end of the process would
    raise Crash


def crash_torn(injector, name, real, args, kwargs):
    """Half of a write reaches the file; other calls do not happen."""
    if injector.is_first and name == "write":
        data = bytes(args[1])
        injector._real["write"](args[0], data[: len(data) // 2])
    raise Crash


def fail_once(code):
    def fail(injector, name, real, args, kwargs):
        if injector.is_first:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return fail


def fail_growth_from_here(code):
    """Like a full disk: creating and writing fail, removing and renaming work."""

    def fail(injector, name, real, args, kwargs):
        if name in ("open", "write", "fsync", "mkdir"):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return fail


@contextlib.contextmanager
def inject(fail, at):
    """Have the at-th mutating call fail in this block."""
    with pytest.MonkeyPatch.context() as patch:
        yield Injector(patch, fail, at)


class _File:
    """Content as the process sees it, and the content that is durable."""

    def __init__(self, data=b""):
        self.seen, self.durable = bytearray(data), bytes(data)

    def after_power_cut(self, chance):
        if bytes(self.seen) == self.durable or chance is None:
            return self.durable
        torn = bytes(self.seen[: chance.randrange(len(self.seen) + 1)])
        holes = bytearray(self.seen)
        if holes:
            start = chance.randrange(len(holes))
            holes[start : start + 4096] = bytes(len(holes[start : start + 4096]))
        return chance.choice([self.durable, torn, bytes(len(self.seen)), bytes(holes), bytes(self.seen)])


class _Folder:
    """Names as the process sees them, the durable ones, and the changes since the last sync."""

    def __init__(self, entries=()):
        self.seen, self.durable, self.pending = dict(entries), dict(entries), []

    def change(self, name, node):
        self.pending.append((name, node))
        _apply(self.seen, name, node)

    def after_power_cut(self, chance):
        entries = dict(self.durable)
        for name, node in self.pending:
            if chance is not None and chance.random() < 0.5:
                _apply(entries, name, node)
        return entries


def _apply(entries, name, node):
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class RecordingDisk:
    """Executes the calls of the code under test and models what is durable after each of them."""

    def __init__(self, root, after_call):
        self.root, self.after_call = Path(root), after_call
        self.tree = self._read(self.root)
        self.files = {}

    def _read(self, path):
        if path.is_dir():
            return _Folder({entry.name: self._read(entry) for entry in path.iterdir()})
        return _File(path.read_bytes())

    def _locate(self, path, dir_fd=None):
        """Return the folder that holds `path`, and the name in it."""
        path = os.fspath(path)
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        parts = Path(os.path.abspath(path)).relative_to(self.root).parts
        node = self.tree
        for part in parts[:-1]:
            node = node.seen[part]
        return node, parts[-1] if parts else None

    def install(self, patch):
        real = {name: getattr(os, name) for name in (*MUTATING, "open", "close")}

        def opened(path, flags, *args, **kwargs):
            fd = real["open"](path, flags, *args, **kwargs)
            if self.root in (target := Path(os.readlink(f"/proc/self/fd/{fd}"))).parents or target == self.root:
                folder, name = self._locate(target)
                if flags & os.O_CREAT:
                    folder.change(name, _File())
                    self.after_call()
                self.files[fd] = self.tree if name is None else folder.seen[name]
            return fd

        def written(fd, data):
            count = real["write"](fd, data)
            self.files[fd].seen += bytes(data)[:count]
            self.after_call()
            return count

        def synced(fd):
            real["fsync"](fd)
            node = self.files[fd]
            if isinstance(node, _File):
                node.durable = bytes(node.seen)
            else:
                node.durable, node.pending = dict(node.seen), []
            self.after_call()

        def renamed(name):
            def call(source, target):
                real[name](source, target)
                (old_folder, old_name), (new_folder, new_name) = self._locate(source), self._locate(target)
                node = old_folder.seen[old_name]
                # The changes of the two folders may be lost separately.
                new_folder.change(new_name, node)
                old_folder.change(old_name, None)
                self.after_call()

            return call

        def removed(name):
            def call(path, *, dir_fd=None):
                folder, last = self._locate(path, dir_fd)
                real[name](path, dir_fd=dir_fd)
                folder.change(last, None)
                self.after_call()

            return call

        def linked(source, target, *, follow_symlinks=True):
            real["link"](source, target, follow_symlinks=follow_symlinks)
            (old_folder, old_name), (new_folder, new_name) = self._locate(source), self._locate(target)
            new_folder.change(new_name, old_folder.seen[old_name])
            self.after_call()

        def made(path, *args, **kwargs):
            real["mkdir"](path, *args, **kwargs)
            folder, last = self._locate(path)
            folder.change(last, _Folder())
            self.after_call()

        for name, call in {
            "open": opened,
            "write": written,
            "fsync": synced,
            "rename": renamed("rename"),
            "replace": renamed("replace"),
            "unlink": removed("unlink"),
            "rmdir": removed("rmdir"),
            "mkdir": made,
            "link": linked,
        }.items():
            patch.setattr(os, name, call)

    def materialise(self, target, chance):
        """Write a tree that a power cut now could leave; if `chance` is None, only what is durable."""
        shutil.rmtree(target, ignore_errors=True)
        _write_tree(self.tree, Path(target), chance)


def _write_tree(node, path, chance):
    if isinstance(node, _File):
        path.write_bytes(node.after_power_cut(chance))
        return
    path.mkdir()
    for name, child in node.after_power_cut(chance).items():
        _write_tree(child, path / name, chance)


@contextlib.contextmanager
def recorded(root):
    """Model what is durable below `root` while the block runs."""
    disk = RecordingDisk(root, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        yield disk
