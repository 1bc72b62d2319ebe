"""Any sequence of saves, links, retentions and removals preserves files of others and kept checkpoints."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genlight.adapter.contract.exceptions import CheckpointError
from genlight.callbacks.checkpoint import (
    Checkpoint,
    CheckpointStore,
    RecordMeta,
    load,
    read_record,
    storage,
    sweep,
    verify,
)
from genlight.callbacks.checkpoint.format.record import record_path

pytestmark = [pytest.mark.promise(name="checkpoint"), pytest.mark.timeout(3600)]

IS_LONG = bool(os.environ.get("GENLIGHT_LONG_FAULTS"))
NAMES = ["a", "a~1", "last", "final", "step-00000001", "v1.2.final"]
SUFFIXES = ["", ".json", ".ckpt"]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A file system on which a sync costs nothing."""
paths = st.builds(str.__add__, st.sampled_from(NAMES), st.sampled_from(SUFFIXES))
records = st.builds(str.__add__, st.sampled_from(NAMES), st.sampled_from(SUFFIXES[1:]))
temporary = st.sampled_from([".tmp-notes", ".tmp-a-2026-11-22"])
contents = st.sampled_from([b"", b"{}", b"mine", b'{"state": 1}', b'{"format":"genlight"}'])


class Directory(RuleBasedStateMachine):
    """A directory that the plugin, the callback and a user share."""

    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(dir=MEMORY))
        self.directory = self.base / "c"
        self.directory.mkdir()
        self.store = CheckpointStore()
        self.foreign: dict[Path, object] = {}
        self.kept: dict[Path, tuple[int, str]] = {}
        self.step = 0

    def teardown(self):
        shutil.rmtree(self.base)

    # Actions of a user

    @rule(name=st.one_of(paths, temporary), content=contents)
    def put_file(self, name, content):
        path = self.directory / name
        if not os.path.lexists(path):
            path.write_bytes(content)
            self.foreign[path] = content

    @rule(name=st.one_of(paths, temporary), inside=st.sampled_from(["model.safetensors", "training_state.json", "x"]))
    def put_folder(self, name, inside):
        path = self.directory / name
        if not os.path.lexists(path):
            path.mkdir()
            (path / inside).write_bytes(b"mine")
            self.foreign[path / inside] = b"mine"

    @rule(name=paths, to=st.one_of(paths, st.just("nowhere")))
    def put_link(self, name, to):
        path = self.directory / name
        if not os.path.lexists(path):
            os.symlink(to, path)
            self.foreign[path] = ("link", to)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), name=st.sampled_from(["notes", "trainer/notes", "deep/er/notes"]))
    def put_file_into_data(self, data, name):
        path = read_record(data.draw(st.sampled_from(sorted(self.kept)))).data_path / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"mine")
            self.foreign[path] = b"mine"

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), copy=st.sampled_from(["copy", "a~2"]))
    def copy_data(self, data, copy):
        path = read_record(data.draw(st.sampled_from(sorted(self.kept)))).data_path
        if not os.path.lexists(self.directory / copy):
            shutil.copytree(path, self.directory / copy, symlinks=True)
            for file in (self.directory / copy).rglob("*"):
                if file.is_file():
                    self.foreign[file] = file.read_bytes()

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), name=st.sampled_from(["backup.safetensors", "last.ckpt", "v1.2.final.ckpt"]))
    def put_hard_link(self, data, name):
        path = self.directory / name
        if not os.path.lexists(path):
            files = [
                file
                for file in read_record(data.draw(st.sampled_from(sorted(self.kept)))).data_path.rglob("*")
                if file.is_file() and file not in self.foreign
            ]
            os.link(data.draw(st.sampled_from(sorted(files))), path)
            self.foreign[path] = path.read_bytes()

    # Actions of genlight

    @rule(name=paths)
    def save(self, name):
        self._save(self.directory / name, "")

    @rule(skipped=st.booleans())
    def save_by_callback(self, skipped):
        step = self.step + 1 + skipped
        self._save(self.directory / f"step-{step:08d}.json", "Checkpoint")
        linked = {os.path.realpath(path) for path in self.directory.iterdir() if path.is_symlink()}
        of_callback = sorted(step for step, writer in self.kept.values() if writer)
        for path, (step, writer) in list(self.kept.items()):
            if not path.exists():
                assert writer, f"{path.name} was removed"
                assert step not in of_callback[-2:]
                assert str(path) not in linked
                del self.kept[path]

    def _save(self, path, writer):
        self.step += 1
        record = record_path(path)
        state = {"global_step": self.step, "state_dict": {"w": torch.full((3,), float(self.step))}}
        was_link = record.is_symlink()
        try:
            self.store.save(path, state, RecordMeta(writer=writer))
        except CheckpointError:
            assert record in self.foreign or record.is_dir()
            assert not was_link
        else:
            if was_link:
                del self.foreign[record]
            assert record not in self.foreign
            self.kept[record] = (self.step, writer)
            if writer:
                self.retain()

    def retain(self):
        self.store.prune(self.directory, Checkpoint(self.directory, keep_last=2)._surplus)
        self.store.background.finish()

    @rule(name=records)
    def remove(self, name):
        path = self.directory / name
        is_link = path.is_symlink()
        self.store.remove(path)
        if is_link and not os.path.lexists(path):
            del self.foreign[path]
        self.kept.pop(path, None)

    @rule()
    def restart(self):
        storage._live.clear()
        sweep(self.directory)

    @invariant()
    def others_are_untouched(self):
        for path, content in self.foreign.items():
            found = ("link", os.readlink(path)) if path.is_symlink() else path.read_bytes()
            assert found == content, path

    @invariant()
    def kept_checkpoints_are_complete(self):
        for path, (step, _) in self.kept.items():
            verify(path)
            assert float(load(path)["state_dict"]["w"][0]) == step
        for path in self.directory.iterdir():
            assert not path.name.startswith(".tmp-") or path in self.foreign or path.is_dir()


Directory.TestCase.settings = settings(
    max_examples=200 if IS_LONG else 40,
    stateful_step_count=40 if IS_LONG else 25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDirectory = Directory.TestCase
