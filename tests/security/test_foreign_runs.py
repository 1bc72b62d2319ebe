"""A run's folder from elsewhere: its upload queue is data and never a command."""

from __future__ import annotations

import contextlib
import json
import os

import msgspec
import pytest
from hypothesis import given, strategies as st

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads import UploadConfig, Uploader
from genlight.reporters.uploads.queue import Queue, read_entries
from support.messages import refusal

pytestmark = pytest.mark.promise(name="security")

NOWHERE = "http://127.0.0.1:9"


def _entry(path="checkpoints/step.json", layout="step.json", to=("endpoint",), **more):
    """The fields of an entry, as somebody else would write them."""
    file = {"path": str(path), "layout": layout, "size_bytes": 6, "mtime_ns": 0}
    return {"run_id": "theirs", "owner": "they", "kind": "checkpoint", "step": 1, "to": to, "local_path": "x",
            "files": [file], **more}  # fmt: skip


@pytest.fixture
def secret(tmp_path):
    """A file of the user outside of the run."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text("secret")
    return path


@pytest.fixture
def foreign(tmp_path):
    """Writes a queue as somebody else would; returns the run's folder."""

    def write(*entries):
        run = tmp_path / "run"
        (run / "uploads").mkdir(parents=True)
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "step.json").write_text("record")
        (run / "uploads" / "lock").touch()
        for number, entry in enumerate(entries, start=1):
            (run / "uploads" / f"{number:09d}.json").write_bytes(msgspec.json.encode({"seq": number, **entry}))
        return run

    return write


SOON = ("--set", "upload_deadline_seconds=0.1")


def _all_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def sent(foreign, genlight_uploads, tmp_path, monkeypatch):
    """Retry the entries of a foreign queue to a folder; return the output, and the files in that folder."""

    def retry(*entries, prepare=lambda run: None, arguments=()):
        target = f"file://{tmp_path / 'deep' / 'out'}"
        run = foreign(*({**entry, "to": [target, "endpoint"]} for entry in entries))
        prepare(run)
        monkeypatch.setenv("TRAINER_UPLOAD_CHECKPOINT_URL", NOWHERE)
        targets = f'uploads.targets=["{target}"]'
        _, _, err = genlight_uploads("retry", run, *SOON, "--set", targets, *arguments)
        return err, _all_files(tmp_path / "deep")

    return retry


@pytest.mark.parametrize("layout", ["../../../planted", "/tmp/planted-by-genlight-test", "a/../../b", "", ".", "x\0"])
def test_a_layout_that_leads_out_of_the_target_writes_nothing(sent, layout):
    err, files = sent(_entry(layout=layout))
    assert "000000001.json is damaged" in err
    assert files == []


def test_a_file_outside_of_the_run_is_not_sent(sent, secret):
    err, files = sent(_entry(secret), _entry("../home/id_rsa"))
    assert "outside" in err
    assert files == []


def test_nor_is_one_that_a_link_in_the_run_leads_to(sent, secret):
    _, files = sent(_entry("checkpoints/link"), prepare=lambda run: (run / "checkpoints" / "link").symlink_to(secret))
    assert files == []


def test_a_folder_of_ones_own_may_be_named(sent, secret):
    _, files = sent(_entry(secret), arguments=("--set", f"checkpoints_dir={secret.parent}"))
    assert len(files) == 1


def test_a_pipe_among_the_files_is_not_waited_for(sent):
    _, files = sent(_entry("checkpoints/pipe"), prepare=lambda run: os.mkfifo(run / "checkpoints" / "pipe"))
    assert files == []


def test_what_the_run_names_as_its_targets_is_not_sent_to(foreign, genlight_uploads, tmp_path, monkeypatch):
    loot = tmp_path / "loot"
    run = foreign(_entry(to=[f"file://{loot}"]))
    monkeypatch.setenv("TRAINER_UPLOAD_CHECKPOINT_URL", NOWHERE)
    code, _, err = genlight_uploads("retry", run, *SOON)
    assert code == 2
    assert "a target in a run's folder is not used" in err
    assert not loot.exists()
    genlight_uploads("retry", run, *SOON, "--set", f'uploads.targets=["file://{loot}"]')
    assert loot.exists()  # the command line names it


def test_an_uploader_sends_nothing_from_outside_of_the_runs_folders(foreign, tmp_path, secret):
    loot = tmp_path / "loot"
    run = foreign(_entry(secret, to=[f"file://{loot}"]))
    config = UploadConfig(run_id="theirs", queue_dir=run / "uploads", targets=[f"file://{loot}"])
    with Uploader(config) as uploader:
        left = uploader.settle(0.1)
    assert "is outside the run's folders" in str(left)
    assert not loot.exists()


def test_checkpoints_that_the_job_keeps_elsewhere_are_sent(foreign, tmp_path, secret):
    loot = tmp_path / "loot"
    run = foreign(_entry(secret, to=[f"file://{loot}"]))
    config = UploadConfig(run_id="theirs", queue_dir=run / "uploads", targets=[f"file://{loot}"], roots=[secret.parent])
    with Uploader(config) as uploader:
        assert uploader.settle(30) is None
    assert _all_files(loot) == ["theirs/checkpoints/step.json"]


@pytest.mark.parametrize("name", ["..", "x", "000000001", "../../home"])
def test_links_are_removed_below_the_queues_own_folder_alone(foreign, tmp_path, name):
    """An entry is known by the name of its file, and not by a path that it holds."""
    run = foreign()
    (tmp_path / "home" / "held" / "x").mkdir(parents=True)
    (tmp_path / "home" / "held" / "x" / "y").write_text("")
    (run / "uploads" / "held").mkdir()
    (run / "uploads" / f"{1:09d}.json").write_text(json.dumps({"seq": 1, **_entry(kind="sample", local_path=name)}))
    before = _all_files(tmp_path / "home")
    with contextlib.closing(Queue(run / "uploads")) as queue:
        queue.remove(queue.entries()[0])
    assert _all_files(tmp_path / "home") == before


@pytest.mark.parametrize("run_id", ["../../escaped", "..", "/abs", "a/b"])
def test_a_run_id_cannot_lead_out_of_a_target(tmp_path, run_id):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("x")
    config = UploadConfig(run_id, tmp_path / "run" / "uploads", targets=[f"file://{tmp_path}/deep/target"])
    with Uploader(config) as uploader:
        uploader.enqueue("checkpoint", tmp_path / "run" / "file", step=1)
        assert uploader.settle(30) is None
    (arrived,) = _all_files(tmp_path / "deep")
    assert arrived.startswith("target/")
    assert len(arrived.split("/")) == 4
    outside = [path for path in _all_files(tmp_path) if not path.startswith("run/")]
    assert outside == [f"deep/{arrived}"]


def test_an_entry_of_more_bytes_than_are_read_is_told(foreign, tmp_path):
    run = foreign()
    with (run / "uploads" / "000000001.json").open("wb") as file:
        file.truncate(1 << 40)
    with refusal(UploadError):
        read_entries(run / "uploads")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = st.sampled_from(["../x", "/etc/passwd", "a", "a/b", "", ".", "\0", "a/../../b", "uploads/held/x/y"])
FILES = st.fixed_dictionaries({"path": PATHS | JSON, "layout": PATHS | JSON, "size_bytes": JSON, "mtime_ns": JSON})
KINDS = st.sampled_from(["metrics", "sample", "checkpoint", "terminal"])
ENTRIES = st.fixed_dictionaries(
    {"seq": st.just(1), "run_id": st.text(max_size=3) | JSON, "kind": KINDS | JSON, "step": st.just(1) | JSON},
    optional={
        "to": st.lists(st.just("endpoint") | JSON, max_size=2) | JSON,
        "local_path": PATHS | JSON,
        "files": st.lists(FILES | JSON, max_size=2) | JSON,
        "payload": JSON,
        "key": JSON,
        "parts": st.dictionaries(st.sampled_from(["post", "put:0", "put:x"]), st.dictionaries(st.text(), JSON)) | JSON,
        "refused": JSON,
    },
)


@given(ENTRIES)
def test_whatever_an_entry_says_is_used_or_named(tmp_path, said):
    (tmp_path / "000000001.json").write_bytes(_encoded(said))
    try:
        (entry,) = read_entries(tmp_path)
    except UploadError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert all(".." not in file.layout.split("/") for file in entry.files)
    assert not refusal or str(tmp_path / "000000001.json") in refusal


@given(st.binary(max_size=200) | st.lists(JSON, max_size=3).map(lambda lines: b"\n".join(map(_encoded, lines)) + b"\n"))
def test_whatever_the_file_of_an_entry_holds_is_read_or_named(tmp_path, data):
    (tmp_path / "000000001.json").write_bytes(data)
    with contextlib.suppress(UploadError):
        assert [entry.seq for entry in read_entries(tmp_path)] in ([], [1])


def _encoded(value):
    return json.dumps(value).encode()
