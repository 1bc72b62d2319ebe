"""Worker processes: the same batches, order and position as without them."""

import multiprocessing
import os
import random
import resource
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from genlight.adapter import ArrowFeed
from genlight.adapter.contract.exceptions import InputError
from support import SUPPORT
from support.jobs import write_job
from support.messages import refusal


def with_noise(batch):
    noise = (random.random(), float(np.random.rand()), float(torch.rand(())))
    return batch.column("id").to_pylist(), noise


def refuse_row_40(batch):
    if 40 in batch.column("id").to_pylist():
        raise ValueError("row 40 is not welcome")
    return batch


def test_workers_that_cannot_be_started_are_told_with_the_way_out(rows_file, ids):
    path = rows_file(10)
    assert len(ids(ArrowFeed(path, workers=2, epochs=1))) == 1  # all is loaded then that starting them takes
    feed = ArrowFeed(path, workers=2, epochs=1)
    feed.check()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with refusal(InputError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays open
        try:
            next(iter(feed))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("shard", ["rows", "row_groups"])
def test_workers_hand_out_the_same_batches_in_the_same_order_and_draw_no_number_of_this_process(rows_file, ids, shard):
    path = rows_file(11, 2, 20, 9, 31)
    before = torch.get_rng_state()
    for rank in range(2):
        options = {"batch_size": 3, "epochs": 2, "shuffle": True, "rank": rank, "world_size": 2, "shard": shard}
        made = ArrowFeed(path, workers=2, **options).iter_batches()
        assert ids(made) == ids(ArrowFeed(path, **options).iter_batches())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_taken_with_workers_in_flight_resumes_with_any_number_of_them(rows_file, ids):
    path = rows_file(11, 2, 20, 9, 31)
    options = {"batch_size": 4, "epochs": 2, "shuffle": True}
    whole = ids(ArrowFeed(path, **options).iter_batches())
    for steps, before, after in ((5, 2, 0), (17, 0, 2), (22, 2, 1)):
        feed = ArrowFeed(path, workers=before, **options)
        assert ids(feed.iter_batches(), steps) == whole[:steps]
        state = feed.state_dict()
        feed.close()
        again = ArrowFeed(path, workers=after, **options)
        again.load_state_dict(state)
        assert ids(again.iter_batches()) == whole[steps:]


def test_random_numbers_in_collate_depend_on_the_rows_alone(rows_file):
    path = rows_file(11, 2, 20, 9, 31)
    options = {"batch_size": 8, "epochs": 2, "collate": with_noise}
    whole = list(ArrowFeed(path, workers=1, **options).iter_batches())
    assert len({noise for _, noise in whole}) == len(whole)
    feed = ArrowFeed(path, workers=2, **options)
    iterator = feed.iter_batches()
    assert [next(iterator) for _ in range(7)] == whole[:7]
    again = ArrowFeed(path, workers=1, **options)
    again.load_state_dict(feed.state_dict())
    assert list(again.iter_batches()) == whole[7:]
    feed.close()


def test_tensors_come_out_of_workers(rows_file):
    feed = ArrowFeed(rows_file(6), batch_size=4, epochs=1, workers=1, columns=["id"], collate="torch")
    assert [batch["id"].tolist() for batch in feed] == [[0, 1, 2, 3], [4, 5]]


def test_an_error_in_collate_is_raised_as_what_it_is(rows_file):
    feed = ArrowFeed(rows_file(30, 30), batch_size=4, epochs=1, workers=1, collate=refuse_row_40)
    with refusal(ValueError):
        list(feed)
    feed.close()


def with_a_lock(batch):
    return {"rows": batch.num_rows, "lock": threading.Lock()}


def out_of_memory(batch):
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.parametrize(
    ("collate", "way_out"), [(with_a_lock, "cannot pickle.*without workers"), (out_of_memory, "/dev/shm.*workers: 0")]
)
def test_a_batch_that_cannot_be_handed_over_ends_the_feed_with_the_way_out(rows_file, collate, way_out):
    feed = ArrowFeed(rows_file(30), batch_size=4, epochs=1, workers=2, collate=collate)
    with pytest.raises(InputError, match=way_out):
        list(feed)
    feed.close()


@pytest.mark.slow
def test_a_shared_memory_that_is_too_small_ends_the_run_with_the_way_out(tmp_path):
    """In a mount namespace with a /dev/shm of 4 MiB, which only root can make."""
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(64 * 100_000, np.float32)), 100_000)
    pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet")
    data = {"parquet_paths": ["x.parquet"], "batch_size": 16, "workers": 2, "collate": "torch"}
    write_job(tmp_path, max_steps=8, dataset=data, mock_batches=...)
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm || exit 99; exec "
    command = f"{mount} {sys.executable} -m genlight.adapter.cli run job.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    if ended.returncode == 99 or "unshare failed" in ended.stderr:
        pytest.skip("needs root, for a mount of its own")
    assert ended.returncode == 1
    assert "/dev/shm has 4 MiB" in ended.stderr


class InWorker(torch.utils.data.IterableDataset):
    """A feed where it must not be: inside the worker of somebody else's data loader."""

    def __init__(self, feed):
        self.feed = feed

    def __iter__(self):
        return iter(self.feed)


def test_a_feed_inside_a_foreign_worker_is_refused_instead_of_repeating_every_row(rows_file):
    loader = torch.utils.data.DataLoader(InWorker(ArrowFeed(rows_file(9))), batch_size=None, num_workers=1)
    batches = iter(loader)
    with refusal(RuntimeError):
        next(batches)
    batches._shutdown_workers()  # a garbage collection would wait 5 s for the worker


def test_workers_outlive_a_sigterm_that_their_parent_did_not_send(rows_file, ids):
    feed = ArrowFeed(rows_file(*[10] * 12), batch_size=5, epochs=1, workers=2, readahead=1)
    batches = iter(feed)
    before = multiprocessing.active_children()
    first = ids(batches, 1)
    workers = set(multiprocessing.active_children()) - set(before)
    for worker in workers:
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert first + ids(batches) == [list(range(n, n + 5)) for n in range(0, 120, 5)]
    assert len(workers) == 2
