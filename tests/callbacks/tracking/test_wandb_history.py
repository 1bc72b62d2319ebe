"""What is read of W&B's files stays within their folder, and ends where a file does."""

from __future__ import annotations

import struct

import pytest

from genlight.callbacks.tracking.wandb_history import _records, last_steps_of_wandb

FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def part(kind: int, content: bytes) -> bytes:
    return struct.pack("<IHB", 0, len(content), kind) + content


@pytest.mark.parametrize("run_id", ["../../etc", "a/b", "*", "", "[a]"])
def test_an_id_that_leads_elsewhere_is_refused(tmp_path, run_id):
    with pytest.raises(ValueError, match="is not the id of a run"):
        last_steps_of_wandb(tmp_path, run_id)


def test_records_of_one_part_and_of_several_are_whole(tmp_path):
    path = tmp_path / "run-a.wandb"
    path.write_bytes(
        b":W&B\xe1\xbe\x00" + part(FULL, b"one") + part(FIRST, b"t") + part(MIDDLE, b"w") + part(LAST, b"o")
    )
    assert list(_records(path)) == [b"one", b"two"]


def test_a_block_that_ends_with_less_than_a_head_goes_on_in_the_next(tmp_path):
    path = tmp_path / "run-a.wandb"
    first = part(FULL, b"x" * (32 * 1024 - 7 - 7 - 3))
    path.write_bytes(b":W&B\xe1\xbe\x00" + first + b"\0\0\0" + part(FULL, b"two"))
    assert [len(record) for record in _records(path)] == [len(first) - 7, 3]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_file_that_was_cut_off_ends_with_its_last_whole_record(tmp_path, cut):
    path = tmp_path / "run-a.wandb"
    path.write_bytes((b":W&B\xe1\xbe\x00" + part(FULL, b"one") + part(FULL, b"two"))[:-cut])
    assert list(_records(path)) == [b"one"]


def test_another_file_is_skipped(tmp_path, caplog):
    path = tmp_path / "run-a.wandb"
    path.write_bytes(b"something else")
    assert list(_records(path)) == []
    assert "is not a history of W&B" in caplog.text
