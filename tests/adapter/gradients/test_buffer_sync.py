"""Buffers of rank 0 reach the others before anybody can look at them, and not much earlier."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.feed import ArrowFeed
from genlight.adapter.feed.mock import MockBatches
from genlight.adapter.gradients.ddp import buffers as buffer_sync
from genlight.adapter.gradients.ddp.buffers import BufferSync
from genlight.adapter.module.step import runs_no_user_code
from genlight.callbacks import Checkpoint, StopRequests
from genlight.callbacks.hook.listeners import may_look_at_weights
from support.rank_processes import run_ranks


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """What was broadcast, and what was awaited, in a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    happened, real = [], dist.broadcast

    class Work:
        def __init__(self, work, size):
            self.work, self.size = work, size

        def wait(self):
            happened.append(("awaited", self.size))
            self.work.wait()

    def broadcast(tensor, **settings):
        happened.append(("sent", tensor.nbytes))
        return Work(real(tensor, **settings), tensor.nbytes)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    yield happened
    dist.destroy_process_group()


def sync_of(model):
    return BufferSync(discover({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}))


def test_all_kinds_of_buffers_are_one_message(sent):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kinds = [torch.bool, torch.complex64, torch.int16, torch.float64, torch.bfloat16]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"buffer{number}", torch.ones(3, dtype=kind))
    model.register_buffer("empty", torch.ones(0))
    model.register_buffer("none", None)

    sync_of(model).send(1)

    size = 2 * 2 * 4 + 8 + 3 * sum(kind.itemsize for kind in kinds)
    assert sent == [("sent", size), ("awaited", size)]


def test_many_buffers_are_not_all_held_twice(sent, monkeypatch):
    monkeypatch.setattr(buffer_sync, "BUCKET_BYTES", 100)
    model = nn.Linear(2, 2)
    for number, count in enumerate([10, 10, 10, 50, 3, 30, 20]):
        model.register_buffer(f"buffer{number}", torch.zeros(count))
    sync = sync_of(model)

    for _ in range(2):
        sent.clear()
        sync.send(1)
        on_their_way, most, total = 0, 0, 0
        for what, size in sent:
            on_their_way += 1 if what == "sent" else -1
            most, total = max(most, on_their_way), total + size
            assert size <= 100 or size == 50 * 4 or size == 30 * 4
        assert (on_their_way, most, total) == (0, 2, 2 * 133 * 4)


def packed(sync):
    """What the next message holds."""
    sync.send(1)
    (message,) = sync._kept
    return message.flat.clone()


def test_what_is_sent_are_the_buffers_of_this_step_also_where_they_were_replaced_resized_or_cast(sent):
    model = nn.Linear(2, 2)
    model.register_buffer("first", torch.ones(2))
    model.register_buffer("second", torch.tensor(3.0))
    sync = sync_of(model)

    assert packed(sync).view(torch.float32).tolist() == [1, 1, 3]
    model.first.mul_(2)
    assert packed(sync).view(torch.float32).tolist() == [2, 2, 3]
    model.first = torch.full((2,), 5.0)
    assert packed(sync).view(torch.float32).tolist() == [5, 5, 3]
    model.first.resize_(3).fill_(7)
    assert packed(sync).view(torch.float32).tolist() == [7, 7, 7, 3]
    model.double()
    assert packed(sync).view(torch.float64).tolist() == [7, 7, 7, 3]
    model.first = None
    assert packed(sync).view(torch.float64).tolist() == [3]


def test_memory_of_a_message_is_used_again(sent):
    sync = sync_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    sync.send(1)
    before = sync._kept[0].flat.data_ptr()
    sync.send(2)
    assert sync._kept[0].flat.data_ptr() == before


def fail(sync, error):
    with sync.deferred():
        sync.send(1)
        raise error


def test_rank_0_holds_no_copy_of_large_buffers_while_the_next_step_runs(sent, monkeypatch):
    monkeypatch.setattr(buffer_sync, "BUCKET_BYTES", 100)
    model = nn.Linear(2, 2)
    model.register_buffer("large", torch.zeros(51))
    sync = sync_of(model)
    with sync.deferred() as settle:
        sync.send(1)
        assert len(sync._on_their_way) == 1
        settle()
        assert not sync._on_their_way
        assert not sync._kept


def test_an_interrupt_from_the_keyboard_waits_for_nothing_and_other_errors_leave_equal_buffers(sent):
    sync = sync_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for error, waits in ((KeyboardInterrupt, False), (ValueError, True), (SystemExit, True), (StopIteration, True)):
        sent.clear()
        with pytest.raises(error):
            fail(sync, error)
        assert ["awaited"] * waits == [what for what, _ in sent if what == "awaited"], error
    sent.clear()
    sync.send(2)
    assert [what for what, _ in sent] == ["sent", "awaited"], "a step outside of `deferred` waits at its end"


@pytest.mark.parametrize(
    ("loader", "known"),
    [
        ([1, 2], False),
        (torch.utils.data.DataLoader([1, 2]), False),
        (torch.utils.data.DataLoader([1, 2], num_workers=1), True),
        (torch.utils.data.DataLoader([1, 2], num_workers=1, sampler=[1, 0]), False),
        (torch.utils.data.DataLoader([1, 2], num_workers=1, batch_sampler=[[1, 0]]), False),
        (MockBatches([1, 2]), True),
        (ArrowFeed("rows.parquet"), True),
        (ArrowFeed("rows.parquet", collate="torch"), True),
        (ArrowFeed("rows.parquet", collate=lambda rows: rows), False),
        (ArrowFeed("rows.parquet", collate=lambda rows: rows, workers=1), True),
    ],
)
def test_a_loader_may_look_at_weights_unless_its_code_is_known(loader, known):
    assert runs_no_user_code(loader) is known


def test_a_callback_may_look_at_weights_unless_it_is_marked_and_calls_no_code_of_the_user():
    class Mine(StopRequests):
        def on_train_batch_end(self, *_): ...

    class Bar(TQDMProgressBar):
        def get_metrics(self, *_): ...

    checking = StopRequests()
    checking.add_check(lambda: None)
    known, others = (StopRequests(), TQDMProgressBar(), RichProgressBar()), (Mine(), checking, Bar(), Checkpoint("x"))
    assert not any(may_look_at_weights(each.on_train_batch_end) for each in known)
    assert all(may_look_at_weights(each.on_train_batch_end) for each in others)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks saw, and the error of the one whose other was lost."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("buffer_ranks.py", folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)], folder


@pytest.mark.parametrize(
    ("place", "times"),
    [
        ("prepare_batch", 6),
        ("train_step", 6),
        ("evaluate", 6),
        ("state_dict", 6),
        ("loader", 6),
        ("16-mixed", 0),
        ("logger", 6),
        ("profiled", 6),
        ("stopped", 1),
        ("on_train_batch_start", 6),
        ("on_train_batch_end", 6),
        ("on_mb_end", 6),
        ("on_train_epoch_end", 1),
        ("on_train_end", 1),
        ("on_exception", 1),
    ],
)
def test_buffers_are_equal_wherever_they_can_be_looked_at(ranks, place, times):
    first, second = (found[place] for found in ranks[0])

    assert [len(each["seen"]) for each in (first, second)] == [times, times]
    for step, (mine, other) in enumerate(zip(first["seen"], second["seen"], strict=True)):
        assert torch.equal(mine, other), step
    assert first["end"].keys() == second["end"].keys()
    for name, value in first["end"].items():
        assert torch.equal(value, second["end"][name]), name


def test_buffers_are_on_their_way_until_code_of_the_user_is_called(ranks):
    first, second = (found["order"] for found in ranks[0])

    assert second == {
        "without callbacks": ["sent 5", "batch", "landed 5"],
        "stops and metrics": ["sent 5", "batch", "landed 5"],
        "a callback of the user": ["sent 5", "landed 5", "callback", "batch"],
        "a loader of the user": ["sent 5", "landed 5", "batch"],
    }
    # Rank 0 has them, and waits for the last ones alone, before it sends the next.
    assert first["a callback of the user"] == ["sent 5", "landed 4", "callback", "batch"]


def test_a_resumed_run_has_the_buffers_of_one_that_was_not_interrupted(ranks):
    for found in ranks[0]:
        plain, resumed = found["resumed"].values()
        assert plain.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in plain.items())


def test_a_rank_whose_buffers_never_come_names_the_rank_that_was_lost(ranks):
    told = (ranks[1] / "lost").read_text()

    assert told.startswith("the buffers that rank 0 sends at the end of step 2 did not arrive; rank 0 ")
    assert "rank 0 did not answer within 2 s" in told
