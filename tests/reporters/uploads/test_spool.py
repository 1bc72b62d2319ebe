"""The journal on disk: what survives, what is cut off, what is never written."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from genlight.adapter.contract.exceptions import UploadError
from genlight.reporters.uploads.journal import JOURNAL, Line, read_description, read_journal
from genlight.reporters.uploads.spool import Spool


@pytest.fixture
def open_spool(tmp_path):
    opened = []

    def build():
        opened.append(Spool(tmp_path / "uploads"))
        return opened[-1]

    yield build
    for spool in opened:
        spool.close()


def _bodies(entries):
    return [entry.body for entry in entries]


def test_entries_and_their_progress_survive_the_process(open_spool):
    spool = open_spool()
    first = spool.add("checkpoint", 1, {"a": 1})
    second = spool.add("checkpoint", 2, {"a": 2})
    spool.note_part(second, "put:0", {"ref": "x"})
    spool.remove(first)
    spool.add_receipt("terminal", {"at": 3})
    spool.close()
    again = open_spool()
    (entry,) = again.entries()
    assert (entry.seq, entry.step, entry.parts, entry.attempted) == (2, 2, {"put:0": {"ref": "x"}}, True)
    assert again.receipt("terminal") == {"at": 3}
    assert again.add("sample", 5, {}).seq == 3


def test_a_number_is_never_used_twice(open_spool):
    for number in (1, 2, 3):
        open_spool().close()  # rewrites the journal, in which nothing waits
        spool = open_spool()
        entry = spool.add("metrics", 1, {})
        assert entry.seq == number
        spool.remove(entry)
        spool.close()


def test_a_failure_lasts_as_long_as_the_attempt(open_spool):
    spool = open_spool()
    entry = spool.add("checkpoint", 1, {})
    spool.fail(entry, "HTTP 400", auth=False)
    assert spool.head("checkpoint") is None
    assert read_journal(spool.directory)[0].failure == "HTTP 400"
    spool.close()
    assert open_spool().head("checkpoint").failure is None


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_cut_off_and_not_glued_to_the_next(open_spool, cut):
    spool = open_spool()
    spool.add("metrics", 1, {"a": 1})
    spool.add("metrics", 2, {"a": 2})
    spool.close()
    path = spool.directory / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    again = open_spool()
    again.add("metrics", 3, {"a": 3})
    again.close()
    assert _bodies(read_journal(spool.directory)) == [{"a": 1}, {"a": 3}]


def test_a_journal_that_is_nothing_but_a_torn_line_begins_anew(open_spool, tmp_path):
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads" / JOURNAL).write_bytes(b'{"op":"add","se')
    spool = open_spool()
    spool.add("metrics", 1, {"a": 1})
    assert _bodies(read_journal(spool.directory)) == [{"a": 1}]


def test_damage_in_the_middle_is_an_error_that_names_file_and_line(open_spool):
    spool = open_spool()
    for step in range(3):
        spool.add("metrics", step, {})
    spool.close()
    path = spool.directory / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 20 + b"\n" + lines[2])
    with pytest.raises(UploadError, match=rf"{JOURNAL} is damaged in line 2"):
        open_spool()
    path.write_bytes(b"")
    open_spool()  # the lock was given back


def test_what_is_gone_leaves_the_journal_and_what_is_added_meanwhile_does_not(open_spool):
    spool = open_spool()
    for step in range(100):
        spool.remove(spool.add("metrics", step, {"text": "x" * 100}))
    kept = spool.add("checkpoint", 7, {"a": 1})
    done = threading.Event()

    def add_until_done():
        spool.add("sample", 1, {})
        while not done.is_set():
            spool.add("sample", 1, {})

    threads = [threading.Thread(target=add_until_done) for _ in range(2)]
    for thread in threads:
        thread.start()
    spool.rewrite()
    done.set()
    for thread in threads:
        thread.join()
    added = spool.count("sample")
    spool.close()
    assert b"xxx" not in (spool.directory / JOURNAL).read_bytes()
    again = open_spool()
    assert again.entries("checkpoint")[0].seq == kept.seq
    assert again.count("sample") == added > 0
    assert len({entry.seq for entry in again.entries()}) == added + 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["add", "part", "fail", "gone", "rewrite", "reopen"]), st.integers(0, 9))))
def test_a_reopened_spool_holds_what_the_open_one_held(operations):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(folder)
        try:
            for operation, number in operations:
                entries = spool.entries()
                chosen = entries[number % len(entries)] if entries else None
                if operation == "add":
                    spool.add("sample", number, {"n": number})
                elif operation == "rewrite":
                    spool.rewrite()
                elif operation == "reopen":
                    before = [msgspec.to_builtins(entry) | {"failure": None, "attempted": True} for entry in entries]
                    spool.close()
                    spool = Spool(folder)
                    assert [msgspec.to_builtins(entry) for entry in spool.entries()] == before
                elif chosen is not None and operation == "part":
                    spool.note_part(chosen, f"put:{number}", {"n": number})
                elif chosen is not None and operation == "fail":
                    spool.fail(chosen, "why", auth=False)
                elif chosen is not None:
                    spool.remove(chosen)
        finally:
            spool.close()


def test_threads_that_rewrite_the_journal_do_so_one_after_the_other(open_spool):
    """The training thread does when the disk has refused a line, the uploading one when much is gone."""
    spool = open_spool()
    failures = []

    def rewrite_often():
        try:
            for step in range(50):
                spool.add("sample", step, {})
                spool.rewrite()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=rewrite_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(read_journal(spool.directory)) == spool.count("sample") == 150


def test_what_a_full_disk_refused_is_held_and_written_once_there_is_room(open_spool, full_disk):
    spool = open_spool()
    sent, gone, _ = (spool.add("metrics", step, {"a": step}) for step in (1, 2, 3))
    with full_disk(spool.directory / JOURNAL):
        spool.note_part(sent, "post", {"at": "x" * 100})
        spool.remove(gone)
        spool.add("metrics", 4, {"a": "x" * 1000})
        assert "File too large" in str(spool.catch_up())
        held = _bodies(spool.entries())
        assert held == [{"a": 1}, {"a": 3}, {"a": "x" * 1000}]
        assert _bodies(read_journal(spool.directory)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    spool.add("metrics", 5, {"a": 5})
    assert _bodies(read_journal(spool.directory)) == [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 5}]

    assert spool.catch_up() is None
    assert _bodies(read_journal(spool.directory)) == _bodies(spool.entries()) == [*held, {"a": 5}]
    assert read_journal(spool.directory)[0].parts == {"post": {"at": "x" * 100}}


def test_what_a_full_disk_refused_is_written_at_the_latest_when_the_spool_is_closed(open_spool, full_disk):
    spool = open_spool()
    with full_disk(spool.directory / JOURNAL):
        spool.add("metrics", 1, {"a": "x" * 1000})
    spool.close()
    assert _bodies(read_journal(spool.directory)) == [{"a": "x" * 1000}]


WRITER = textwrap.dedent(
    """
    import sys
    from genlight.reporters.uploads.spool import Spool

    spool = Spool(sys.argv[1])
    for step in range(int(sys.argv[2]), 10**9):
        spool.add("sample", step, {"text": "x" * 200})
        print(step, flush=True)
        if step % 50 == 0:
            spool.rewrite()
    """
)


def test_what_was_added_before_a_kill_is_there_after_it(tmp_path):
    step = 0
    for lines in (60, 1, 130):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        for _ in range(lines):
            step = int(writer.stdout.readline())
        writer.kill()
        seen = [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        writer.wait()
        writer.stdout.close()
        step = max([step, *seen]) + 1
        steps = [entry.step for entry in read_journal(tmp_path)]
        assert steps[:step] == list(range(step))
        step = len(steps)  # one more may have been written than was told
    (tmp_path / ".tmp-journal.jsonl.new-1-x").touch()
    Spool(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [JOURNAL, "lock"]


def test_files_of_others_in_the_folder_of_a_spool_stay(tmp_path):
    (tmp_path / ".tmp-notes").write_text("mine")
    (tmp_path / ".tmp-folder").mkdir()
    Spool(tmp_path).close()
    assert (tmp_path / ".tmp-notes").read_text() == "mine"
    assert (tmp_path / ".tmp-folder").is_dir()


def test_a_spool_is_open_in_one_process_at_a_time_and_free_after_a_kill(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), "0"], stdout=subprocess.PIPE)
    writer.stdout.readline()
    with pytest.raises(UploadError, match="in use by another run"):
        Spool(tmp_path)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    Spool(tmp_path).close()


def test_the_description_tells_whose_spool_it_is(open_spool, tmp_path):
    spool = open_spool()
    spool.describe({"run_id": "r", "owner": "me", "targets": []})
    assert read_description(spool.directory).run_id == "r"
    with pytest.raises(UploadError, match="not an upload spool"):
        read_description(tmp_path)


def test_the_newest_receipts_are_kept(open_spool):
    spool = open_spool()
    for number in range(1100):
        spool._content.apply(msgspec.convert({"op": "receipt", "key": str(number), "receipt": {}}, Line))
    assert spool.receipt("0") is None
    assert spool.receipt("1099") == {}


def test_every_line_of_the_journal_is_json(open_spool):
    spool = open_spool()
    spool.remove(spool.add("metrics", 1, {"metrics": {"a": float("nan")}}))
    assert [json.loads(line)["op"] for line in (spool.directory / JOURNAL).read_text().splitlines()] == ["add", "gone"]
