"""Replay buffers: what is drawn, who may write, what a checkpoint holds, and what bad input is told."""

import os
import signal
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings, strategies as st

from genlight.adapter import ReplayBuffer, ReplayFeed
from genlight.adapter.contract.exceptions import BrokenCheckpointError, InputError, ReplayWriterError
from support.messages import refusal

ROW = {
    "observation": torch.zeros(2),
    "reward": torch.tensor(0.0),
    "next_observation": torch.zeros(2),
    "terminated": torch.tensor(False),
    "truncated": torch.tensor(False),
}


def rows(first: int, count: int, **changed: Any) -> dict[str, torch.Tensor]:
    """Rows whose values are their numbers."""
    number = torch.arange(first, first + count, dtype=torch.float32)
    made = {
        "observation": torch.stack([number, -number], 1),
        "reward": number,
        "next_observation": torch.stack([number + 1, -number - 1], 1),
        "terminated": torch.zeros(count, dtype=torch.bool),
        "truncated": torch.zeros(count, dtype=torch.bool),
    }
    return made | changed


OPERATIONS = st.tuples(st.sampled_from(["write", "draw", "save", "save again"]), st.integers(1, 10))


@settings(max_examples=30)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=30))
def test_a_buffer_has_its_newest_rows_and_draws_the_same_after_a_save_and_a_load(tmp_path_factory, operations):
    """A saved and loaded buffer next to one that is never saved; folders are renamed, as for checkpoints."""

    folder, buffer, unsaved = tmp_path_factory.mktemp("saves"), ReplayBuffer(10, ROW), ReplayBuffer(10, ROW)
    for place, (operation, count) in enumerate([("write", 3), *operations]):
        if operation == "write":
            for each in (buffer, unsaved):
                each.extend(rows(each.written, count))
        elif operation == "draw" and count <= len(buffer):
            drawn, expected = buffer.sample(count), unsaved.sample(count)
            assert all(torch.equal(drawn[name], value) for name, value in expected.items())
            assert set(drawn["index"].tolist()) <= set(range(max(0, buffer.written - 10), buffer.written))
            assert torch.equal(drawn["reward"], drawn["index"].float())
            assert torch.equal(drawn["observation"], torch.stack([drawn["reward"], -drawn["reward"]], 1))
        elif operation.startswith("save"):
            buffer.save(folder / "new")
            saved = folder / "new" if operation == "save again" else (folder / "new").rename(folder / f"{place}")
            buffer.close()
            buffer = ReplayBuffer(10, ROW, seed=1)
            buffer.load(saved)
            assert (len(buffer), buffer.written) == (len(unsaved), unsaved.written)


def test_draws_are_seeded_and_uniform():
    counts = np.zeros(50)
    a, b = ReplayBuffer(50, ROW, seed=3), ReplayBuffer(50, ROW, seed=3)
    a.extend(rows(0, 50))
    b.extend(rows(0, 50))
    for _ in range(400):
        drawn = a.sample(50)["index"]
        assert torch.equal(drawn, b.sample(50)["index"])
        counts += np.bincount(drawn.numpy(), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 100  # chi squared of 49 degrees, p below 1e-4


def test_a_second_thread_and_a_forked_process_may_not_write():
    buffer = ReplayBuffer(8, ROW)
    buffer.extend(rows(0, 4))
    told = []

    def write() -> None:
        try:
            buffer.extend(rows(100, 4))
        except ReplayWriterError as error:
            told.append(str(error))

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        write()
        os._exit(len(told) - 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert f"thread {threading.get_ident()} of process {os.getpid()}" in told[0]
    assert buffer.written == 4
    assert buffer.sample(4)["reward"].max() < 4

    buffer.release_writer()
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (len(told), buffer.written) == (1, 8)
    with pytest.raises(ReplayWriterError):
        buffer.extend(rows(0, 1))


def test_rows_are_whole_while_another_thread_writes():
    buffer = ReplayBuffer(64, ROW)
    buffer.extend(rows(0, 64))
    buffer.release_writer()

    def write() -> None:
        for first in range(64, 20_064, 10):
            buffer.extend(rows(first, 10))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        drawn = buffer.sample(32)
        assert torch.equal(drawn["reward"], drawn["index"].float())
        assert torch.equal(drawn["next_observation"][:, 0], drawn["reward"] + 1)
    writer.join()
    assert buffer.written == 20_064


def test_a_save_writes_only_rows_that_are_new(tmp_path):
    """The others are links, and a folder that is gone costs a whole save."""
    buffer = ReplayBuffer(10_000, ROW)
    buffer.extend(rows(0, 9_000))

    def new_bytes(folder):
        return sum(path.stat().st_size for path in folder.glob("rows-*") if path.stat().st_nlink == 1)

    buffer.save(tmp_path / "a")
    whole = new_bytes(tmp_path / "a")
    buffer.extend(rows(9_000, 90))
    buffer.save(tmp_path / "b")
    assert 0 < new_bytes(tmp_path / "b") < 0.05 * whole
    linked = [path for path in (tmp_path / "b").glob("rows-*") if path.stat().st_nlink == 2]
    assert len(linked) == 1

    again = ReplayBuffer(10_000, ROW)
    again.load(tmp_path / "b")
    again.extend(rows(9_090, 10))
    again.save(tmp_path / "c")
    assert 0 < new_bytes(tmp_path / "c") < 0.05 * whole
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    again.save(tmp_path / "d")
    last = ReplayBuffer(10_000, ROW)
    last.load(tmp_path / "d")
    assert last.written == 9_100
    assert torch.equal(last._rows(torch.arange(9_100))["reward"], torch.arange(9_100.0))


def test_saving_again_into_one_folder_leaves_only_what_is_needed(tmp_path):
    buffer = ReplayBuffer(100, ROW)
    for first in range(0, 1000, 50):
        buffer.extend(rows(first, 50))
        buffer.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    again = ReplayBuffer(100, ROW)
    again.load(tmp_path)
    assert torch.equal(again._rows(torch.arange(900, 1000))["reward"], torch.arange(900.0, 1000))


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "meta"])
def test_a_save_that_is_not_whole_is_refused(tmp_path, damage):
    buffer = ReplayBuffer(1000, ROW)
    buffer.extend(rows(0, 100))
    buffer.save(tmp_path)
    (path,) = tmp_path.glob("rows-*")
    if damage == "meta":
        path = tmp_path / "replay.bin"
        path.write_text("{}")
    elif damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-10])
    with pytest.raises(BrokenCheckpointError, match=path.name):
        ReplayBuffer(1000, ROW).load(tmp_path)


@pytest.mark.parametrize("damage", ["rows", "generator"])
def test_a_save_of_another_form_is_refused_though_its_digests_fit(tmp_path, damage):
    buffer = ReplayBuffer(1000, ROW)
    buffer.extend(rows(0, 100))
    buffer.save(tmp_path)
    (path,) = tmp_path.glob("rows-*")
    meta = msgspec.msgpack.decode((tmp_path / "replay.bin").read_bytes()[16:])
    if damage == "generator":
        meta["generator"] = b"x"
    else:
        path.write_bytes(b"x" * 50)
        meta["files"][0][2:] = [50, xxhash.xxh3_128_hexdigest(b"x" * 50)]
    packed = msgspec.msgpack.encode(meta)
    (tmp_path / "replay.bin").write_bytes(xxhash.xxh3_128_digest(packed) + packed)
    with pytest.raises(BrokenCheckpointError):
        ReplayBuffer(1000, ROW).load(tmp_path)


def test_a_process_that_is_killed_in_a_save_leaves_the_save_before_it(tmp_path):
    for kill in range(5):
        child = os.fork()
        if child == 0:
            buffer = ReplayBuffer(500, ROW)
            if (tmp_path / "replay.bin").exists():
                buffer.load(tmp_path)
            while True:
                buffer.extend(rows(buffer.written, 30))
                buffer.save(tmp_path)
        while not (tmp_path / "replay.bin").exists():
            time.sleep(0.005)
        time.sleep(0.05 + 0.013 * kill)  # wherever that is in a save
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        again = ReplayBuffer(500, ROW)
        again.load(tmp_path)
        numbers = torch.arange(again.written - len(again), again.written)
        assert torch.equal(again._rows(numbers)["reward"], numbers.float())
        assert len(again) == min(500, again.written)


def test_a_save_of_another_buffer_is_refused(tmp_path):
    buffer = ReplayBuffer(100, ROW)
    buffer.extend(rows(0, 10))
    buffer.save(tmp_path)
    other = ReplayBuffer(50, {**ROW, "reward": torch.tensor(0.0, dtype=torch.float64)})
    with refusal(ValueError):
        other.load(tmp_path)
    with refusal(FileNotFoundError):
        other.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "`capacity` >= 1, but received 0"),
        ({"row": {}}, "expected rows by column, but received {}"),
        ({"row": [1]}, r"expected rows by column, but received \[1\]"),
        ({"row": {"a": "text"}}, "no tensor can be made of column 'a'"),
        ({"row": {"index": torch.zeros(1)}}, "a separate column named index"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(**{"capacity": 10, "row": ROW, **arguments})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": torch.zeros(4, dtype=torch.float64)}, r"'reward': 'torch\.float32 \[\]'.*received.*torch\.float64"),
        ({"observation": torch.zeros(4, 3)}, r"'observation': 'torch\.float32 \[2\]'.*received.*\[3\]"),
        ({"reward": torch.zeros(3)}, "but received 3 and 4 rows"),
        ({"gain": torch.zeros(4)}, "but received .*'gain'"),
        ({"observation": None}, "no tensor can be made of column 'observation'"),
        ({"reward": torch.tensor(1.0)}, "but received 0 and 4 rows"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(change, message):
    buffer = ReplayBuffer(10, ROW)
    buffer.extend(rows(0, 4))
    with pytest.raises(ValueError, match=message):
        buffer.extend(rows(4, 4, **change))
    assert buffer.written == 4


def test_rows_that_were_computed_with_gradients_keep_no_graph():
    """A log-probability that nobody detached would else keep all networks of the past alive, in every later sample."""
    buffer, weight = ReplayBuffer(10, ROW), torch.ones((), requires_grad=True)
    written = rows(0, 4)
    buffer.extend({**written, "reward": written["reward"] * weight})
    drawn = buffer.sample(4)
    assert not drawn["reward"].requires_grad
    assert torch.equal(drawn["reward"], drawn["index"].float())


def test_numbers_of_rows_that_cannot_be_are_refused():
    buffer = ReplayBuffer(10, ROW)
    with refusal(ValueError):
        buffer.extend(rows(0, 12))
    with refusal(ValueError):
        buffer.sample(1)
    buffer.extend(rows(0, 4))
    with refusal(ValueError):
        buffer.sample(5)


def test_a_feed_waits_for_its_writer():
    buffer = ReplayBuffer(100, ROW)
    with refusal(InputError):
        next(iter(ReplayFeed(buffer, 10, start_after=20, wait_s=0.01)))
    writer = threading.Thread(target=lambda: [buffer.extend(rows(first, 5)) for first in range(0, 40, 5)])
    feed = iter(ReplayFeed(buffer, 10, start_after=20))
    writer.start()
    batches = [next(feed) for _ in range(3)]
    writer.join()
    assert [len(batch["index"]) for batch in batches] == [10, 10, 10]
    with refusal(ValueError):
        ReplayFeed(buffer, 0, start_after=200)
