"""Data workers that ignore stop signals keep everything else that torch and the user set up."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from genlight.adapter.contract.exceptions import InputError
from genlight.callbacks.stop import data_workers
from genlight.callbacks.stop.data_workers import protected_workers


@pytest.fixture
def protected():
    with protected_workers():
        yield


class Doing(Dataset):
    def __init__(self, function):
        self.function = function

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.function(index)


def loader_of(function, **options):
    return DataLoader(Doing(function), **{"batch_size": None, "num_workers": 1, **options})


def facts(index):
    return index, get_worker_info().seed, torch.rand(()).item(), os.environ.get("WORKER")


def note_worker(worker):
    os.environ["WORKER"] = str(worker)


class Refusing:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), r"/dev/shm.*`workers: 0`"),
        (OSError(28, "No space left on device"), r"/dev/shm has \d+ MiB.*--shm-size"),
        (TypeError("cannot pickle '_thread.lock' object"), "pickle.*train without workers"),
    ],
)
def test_a_batch_that_a_worker_cannot_send_is_raised_with_the_way_out(error, way_out, protected):
    loader = loader_of(lambda index: Refusing(error) if index == 3 else index, num_workers=2)
    taken = []
    with pytest.raises(InputError, match=way_out):
        taken.extend(index for index in loader)
    assert not taken or taken == [0, 1, 2]


def test_batches_are_those_of_an_unprotected_loader_and_the_loader_stays_as_it_was():
    loader = loader_of(facts, num_workers=2, worker_init_fn=note_worker)
    torch.manual_seed(3)
    expected = list(loader)
    torch.manual_seed(3)
    with protected_workers():
        assert list(loader) == expected
    assert expected[1][3] == "1"
    assert loader.worker_init_fn is note_worker


def signalled(index):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return index


class Forked(DataLoader):
    """Makes its iterators itself, as torchdata's ``StatefulDataLoader`` does."""

    def _get_iterator(self):
        return _MultiProcessingDataLoaderIter(self)


class Extended(DataLoader):
    def _get_iterator(self):
        self.asked = True
        return super()._get_iterator()


@pytest.mark.parametrize("kind", [DataLoader, Forked, Extended])
def test_workers_of_any_loader_ignore_stop_signals(kind, protected):
    assert list(kind(Doing(signalled), batch_size=None, num_workers=1)) == list(range(8))


def test_kinds_of_loaders_are_their_own_again_after_the_outer_block():
    own = [vars(kind)["_get_iterator"] for kind in (DataLoader, Forked, Extended)]
    with protected_workers():
        with protected_workers():
            pass
        assert all(vars(kind)["_get_iterator"] not in own for kind in (DataLoader, Forked, Extended))
    assert [vars(kind)["_get_iterator"] for kind in (DataLoader, Forked, Extended)] == own


def terminate_a_program(_):
    return subprocess.run(["sh", "-c", "kill -TERM $$; echo still there"], capture_output=True, check=False).returncode


def test_a_program_that_a_worker_starts_ends_on_sigterm_as_usual(protected):
    assert next(iter(loader_of(terminate_a_program))) == -signal.SIGTERM


def say_who_and_hang(index):
    if index == 0:
        return os.getpid()
    return time.sleep(600)


def test_a_worker_that_hangs_ends_after_its_iterator(protected, monkeypatch):
    monkeypatch.setattr(data_workers, "PATIENCE_S", 0.2)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    batches = iter(loader_of(say_who_and_hang))
    pid = next(batches)
    worker = next(child for child in multiprocessing.active_children() if child.pid == pid)
    del batches
    gc.collect()
    worker.join(60)
    assert worker.exitcode == 0


held = []


def leave_workers_behind():
    protected_workers().__enter__()
    held.append(iter(loader_of(int, persistent_workers=True)))
    next(held[0])


def test_a_process_ends_although_nobody_ended_its_workers():
    process = multiprocessing.get_context("fork").Process(target=leave_workers_behind)
    process.start()
    process.join(60)
    assert process.exitcode == 0
