"""A run's folder from elsewhere: its upload queue is data and never a command."""

import contextlib
import json
import os

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import StartupContractError, UploadError
from genlight.callbacks.checkpoint.format.record import record_paths
from genlight.callbacks.checkpoint.selection import MOST_WARNINGS, newest_valid
from genlight.reporters.uploads import UploadConfig, Uploader
from genlight.reporters.uploads.queue import DELIVERED, Entry, Queue, pack, read_entries
from support.messages import refusal

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
    entries = (_entry(secret), _entry("../home/id_rsa"), _entry("checkpoints/link"))
    err, files = sent(*entries, prepare=lambda run: (run / "checkpoints" / "link").symlink_to(secret))
    assert "outside" in err
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


@pytest.mark.parametrize("is_named", [False, True])
def test_an_uploader_sends_only_files_of_the_runs_folder_and_of_those_that_the_job_names(
    foreign, tmp_path, secret, is_named
):
    loot = tmp_path / "loot"
    run, roots = foreign(_entry(secret, to=[f"file://{loot}"])), [secret.parent] if is_named else []
    config = UploadConfig(run_id="theirs", queue_dir=run / "uploads", targets=[f"file://{loot}"], roots=roots)
    with Uploader(config) as uploader:
        left = uploader.settle(30 if is_named else 0.1)
    assert (left is None) == is_named
    assert is_named or "is outside the run's folders" in str(left)
    assert _all_files(loot) == (["theirs/checkpoints/step.json"] if is_named else [])


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


def _encoded(value):
    return json.dumps(value).encode()


URL = "http://127.0.0.1:9"


def open_uploader(folder):
    config = UploadConfig("r", folder / "uploads", terminal_url=f"{URL}/t", checkpoint_url=f"{URL}/c")
    return Uploader(config, keep_terminal=True)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run's folder with an upload of each kind, and the bytes of its entries, delivered ones too."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.json").write_text("{}")
    queue = Queue(folder / "uploads")
    common = {"run_id": "r", "step": 1, "to": ("endpoint",)}
    for kind in ("checkpoint", "checkpoint"):
        queue.add(Entry(kind=kind, local_path="a.json", files=pack(folder, folder / "a.json", []), **common))
    queue.add(Entry(kind="metrics", payload={"metrics": {"a": 1.0}}, key="k", **common))
    queue.add(Entry(kind="terminal", payload={"status": "failed", "step": 1}, key="k", **common))
    queue.finish(queue.entries()[0])
    queue.close()
    return folder, {
        path: path.read_bytes() for path in (folder / "uploads").rglob("*.json") if "links" not in path.parts
    }


@pytest.mark.parametrize("name", [f"{DELIVERED}/000000001.json", "000000002.json", "000000003.json", "000000004.json"])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_byte_that_is_wrong(sound, name, place, byte, cut):
    folder, files = sound
    for path in (folder / "uploads").rglob("0*.json"):
        path.unlink()
    for path, data in files.items():
        path.write_bytes(data)
    damaged = folder / "uploads" / name
    data = files[damaged]
    place %= len(data)
    damaged.write_bytes(data[:place] + bytes([byte]) * (not cut) + data[place + 1 :])

    refusal = None
    try:
        open_uploader(folder).close()
    except (UploadError, StartupContractError) as error:
        refusal = str(error)
    if refusal is not None:
        assert str(damaged) in refusal
    else:
        assert {entry.kind for entry in read_entries(folder / "uploads")} <= {"checkpoint", "metrics", "terminal"}


def test_of_many_broken_records_a_few_are_named_and_the_others_counted(tmp_path):
    for number in range(500):
        (tmp_path / f"step-{number:08d}.json").write_text("{}")

    record, warnings = newest_valid(tmp_path)
    assert record is None
    assert len(warnings) == MOST_WARNINGS + 1
    assert "step-00000499 is broken" in warnings[0]
    assert warnings[-1] == f"490 more checkpoints in {tmp_path} are broken"


def test_a_device_or_a_pipe_of_that_name_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert record_paths(tmp_path) == []
    assert record_paths(tmp_path / "missing") == []
