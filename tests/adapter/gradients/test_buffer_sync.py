"""The buffers of rank 0 arrive on the other ranks before any code can read them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from genlight.adapter.discovery.discover import discover
from genlight.adapter.gradients.ddp import buffers as buffer_sync
from genlight.adapter.gradients.ddp.buffers import BufferSync
from support.rank_processes import run_ranks

pytestmark = pytest.mark.promise(name="ranks")


@pytest.fixture
def sent(group_of_one, monkeypatch):
    """The broadcasts and the waits for them."""
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
    return happened


def sync_of(model):
    return BufferSync(discover({"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}))


def test_all_kinds_of_buffers_are_one_message(sent):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kinds = [torch.bool, torch.complex64, torch.int16, torch.float64, torch.bfloat16]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"buffer{number}", torch.ones(3, dtype=kind))
    model.register_buffer("empty", torch.ones(0))
    model.register_buffer("none", None)

    sync_of(model).end()

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
        sync.end()
        on_their_way, most, total = 0, 0, 0
        for what, size in sent:
            on_their_way += 1 if what == "sent" else -1
            most, total = max(most, on_their_way), total + size
            assert size <= 100 or size == 50 * 4 or size == 30 * 4
        assert (on_their_way, most, total) == (0, 2, 2 * 133 * 4)


def test_buffers_that_were_replaced_resized_or_cast_in_the_step_are_sent(sent):
    model = nn.Linear(2, 2)
    model.register_buffer("first", torch.ones(2))
    model.register_buffer("second", torch.tensor(3.0))
    sync = sync_of(model)

    def size():
        sent.clear()
        sync.end()
        return sent[0][1]

    assert size() == 3 * 4
    model.first = torch.full((3,), 5.0)
    assert size() == 4 * 4
    model.first.resize_(4)
    assert size() == 5 * 4
    model.double()
    assert size() == 5 * 8
    model.first = None
    assert size() == 8


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the buffers that two ranks saw, and the error of a rank after the other was lost."""
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
def test_buffers_are_equal_wherever_they_can_be_read(ranks, place, times):
    first, second = (found[place] for found in ranks[0])

    assert [len(each["seen"]) for each in (first, second)] == [times, times]
    for step, (mine, other) in enumerate(zip(first["seen"], second["seen"], strict=True)):
        assert torch.equal(mine, other), step
    assert first["end"].keys() == second["end"].keys()
    for name, value in first["end"].items():
        assert torch.equal(value, second["end"][name]) == (not name.endswith("own_rows")), name


def test_a_resumed_run_has_the_buffers_of_one_that_was_not_interrupted(ranks):
    for found in ranks[0]:
        plain, resumed = found["resumed"].values()
        assert plain.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in plain.items())


def test_a_rank_whose_buffers_never_come_names_the_rank_that_was_lost(ranks):
    message = (ranks[1] / "lost").read_text()

    assert message.startswith("the buffers that rank 0 sends at the end of step 2 did not arrive; rank 0 ")
    assert "rank 0 did not answer within 2 s" in message
