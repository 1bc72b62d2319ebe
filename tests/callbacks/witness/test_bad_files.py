"""A witness that is torn, foreign or cannot be written ends no training; one line says what is not compared."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from genlight.callbacks.witness import entry as entries
from genlight.callbacks.witness.entry import (
    ON_DEVICE,
    Entry,
    Header,
    StepDifference,
    WitnessFile,
    compare,
    file_of_rank,
    read_witness,
    summarize,
    unpack,
)
from support.witnessed import Hosted, attempt, rows

pytestmark = pytest.mark.promise(name="resume")


@pytest.fixture
def broken_off(tmp_path):
    """The folder of checkpoints of a training that broke off after step 17, and its witness."""
    attempt(tmp_path, Hosted(), rows(), until=17)
    return tmp_path, file_of_rank(tmp_path, 0)


def change_header(path: Path, **facts: Any) -> None:
    recorded = read_witness(path)
    assert recorded is not None
    header = recorded.header
    if "run" in facts:
        header = msgspec.structs.replace(header, run=facts.pop("run"))
    header = msgspec.structs.replace(header, attempts={1: {**header.attempts[1], **facts}})
    WitnessFile(path, header, recorded.entries).close()


def lines_of(caplog: Any) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("genlight.callbacks.witness")]
    return [record.getMessage() for record in ours]


def test_a_torn_end_is_not_compared(broken_off, caplog):
    folder, path = broken_off
    path.write_bytes(path.read_bytes()[:-10])

    (proof,) = attempt(folder, Hosted(), rows(), seed=8)

    assert proof.steps == (11, 12, 13, 14, 15, 16)
    (line,) = lines_of(caplog)
    assert "torn" in line


@pytest.mark.parametrize("change", ["version", "damaged", "run", "empty"])
def test_a_file_that_does_not_belong_to_the_run_is_replaced_with_one_line(change, broken_off, caplog):
    folder, path = broken_off
    data = path.read_bytes()
    if change == "run":
        change_header(path, run="another")
    else:
        changed = {"version": data.replace(b"witness 1", b"witness 9"), "damaged": data.replace(b"ranks", b"rankz")}
        path.write_bytes({**changed, "empty": b""}[change])

    assert attempt(folder, Hosted(), rows(), seed=8) == []

    assert len(lines_of(caplog)) == 1
    assert read_witness(path) is not None


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_foreign_link_is_neither_followed_nor_replaced(place, broken_off, caplog):
    folder, path = broken_off
    linked = path if place == "file" else path.parent
    target = folder / "elsewhere"
    linked.rename(target)
    linked.symlink_to(target)
    before = (target if place == "file" else target / path.name).read_bytes()

    assert attempt(folder, Hosted(), rows(), seed=8) == []

    assert linked.is_symlink()
    assert (target if place == "file" else target / path.name).read_bytes() == before
    assert len(lines_of(caplog)) == 1


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_full_disk_is_reported_once_and_ends_nothing(when, tmp_path, monkeypatch, caplog):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((entries, "write_bytes_durably") if when == "at the start" else (Entry, "pack")), full)

    attempt(tmp_path, Hosted(), rows(), steps=24)

    assert (tmp_path / "final.json").exists()
    (line,) = lines_of(caplog)
    assert os.strerror(errno.ENOSPC) in line


def test_another_number_of_ranks_is_compared_with_nothing(broken_off, caplog):
    caplog.set_level("INFO")
    folder, path = broken_off
    change_header(path, ranks=2)

    assert attempt(folder, Hosted(), rows(), seed=8) == []

    (line,) = lines_of(caplog)
    assert "2 and 1 ranks" in line


def test_values_of_another_kind_of_device_are_not_compared(broken_off):
    folder, path = broken_off
    recorded = read_witness(path)
    assert recorded is not None

    def elsewhere(each: Entry) -> Entry:
        random = (*each.random[:ON_DEVICE], 1, *each.random[ON_DEVICE + 1 :])
        return msgspec.structs.replace(each, losses=1, loss=0.5, rates=1, random=random)

    others = {key: elsewhere(each) for key, each in recorded.entries.items()}
    facts = {1: {**recorded.header.attempts[1], "device": "cuda"}}
    WitnessFile(path, msgspec.structs.replace(recorded.header, attempts=facts), others).close()

    (proof,) = attempt(folder, Hosted(), rows(), seed=8)

    assert proof.difference is None
    assert "losses and learning rates are not compared, because cuda and cpu round differently" in proof.text


ENTRY = Entry(5, 0, 4, 1, 10, (1, 2, 3, 4, 5, 6), 7, 8, 0.1, 0.25)


def test_an_entry_is_read_as_it_was_written_or_not_at_all():
    data = ENTRY.pack()
    assert unpack(data) == ENTRY
    for place in range(len(data)):
        assert unpack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) is None


def test_another_loss_names_what_has_changed_since_the_earlier_attempt():
    facts = {"numerics": {"threads": 2, "python": "3.11"}, "packages": {"torch": "2.9"}, "host": "a", "device": "cpu"}
    changed = {**facts, "numerics": {"threads": 1, "python": "3.11"}, "host": "b"}
    now = msgspec.structs.replace(ENTRY, attempt=2, losses=9, loss=0.5)

    found = compare(ENTRY, now, rank=0, facts={1: facts, 2: changed})

    assert found is not None
    assert "the loss is 0.5, was 0.25" in found.text
    assert "Since then: threads is 1, was 2; host is b, was a" in found.text


@pytest.mark.parametrize("loss", [0.25, math.nan])
def test_another_loss_than_the_first_one_is_named_so(loss):
    earlier = msgspec.structs.replace(ENTRY, loss=loss)
    found = compare(earlier, msgspec.structs.replace(earlier, losses=9), rank=0, facts={})

    assert found is not None
    assert "the loss is the same, but another one differs" in found.text


def test_of_several_ranks_the_earliest_difference_counts_and_steps_before_it_are_equal():
    later, earlier = (StepDifference("rows", (step, 0, step), rank, "") for rank, step in enumerate((5, 3)))

    proof = summarize([((1, 3, 4), later), ((1, 2), earlier)])

    assert proof is not None
    assert (proof.steps, proof.difference) == ((1, 2), earlier)


def test_a_generator_of_the_model_is_only_a_reason_for_another_loss():
    random = (*ENTRY.random[:-1], 99)
    now = msgspec.structs.replace(ENTRY, random=random)
    assert compare(ENTRY, now, rank=0, facts={}) is None

    found = compare(ENTRY, msgspec.structs.replace(now, losses=9), rank=0, facts={})
    assert found is not None
    assert found.kind == "random numbers"


def test_the_file_keeps_the_newest_of_several_attempts_and_it_comes_last(tmp_path):
    path, later = file_of_rank(tmp_path, 3), msgspec.structs.replace(ENTRY, step=6, batch=5)
    file = WitnessFile(path, Header("r", 3, {1: {}, 2: {}}), {ENTRY.key: ENTRY, later.key: later})
    newer = msgspec.structs.replace(ENTRY, attempt=2)
    file.append(newer)
    file.close()

    recorded = read_witness(path)
    assert recorded is not None
    assert list(recorded.entries.values()) == [later, newer]
