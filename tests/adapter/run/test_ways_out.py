"""Errors of torch whose own words do not say what to do are told with a way out, and not by a traceback."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket

import pytest
import torch

from genlight.adapter.plumbing.failures import describe_failure
from genlight.adapter.run.outcome import log_failure
from genlight.adapter.run.ways_out import way_out_of


class Dies(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def dead_worker():
    for _ in torch.utils.data.DataLoader(Dies(), num_workers=1, multiprocessing_context="fork"):
        pass


def port_in_use():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        torch.distributed.TCPStore("127.0.0.1", held.getsockname()[1], is_master=True)


@pytest.mark.parametrize(
    ("fail", "said"), [(dead_worker, "use fewer `workers`"), (port_in_use, "Set MASTER_PORT to a free one")]
)
def test_the_way_out_is_told_and_the_traceback_is_in_a_file(tmp_path, caplog, fail, said):
    with pytest.raises(RuntimeError) as raised:
        fail()
    error = raised.value.with_traceback(None)  # as from a thread of torch or Lightning: none of the user's frames
    failure = describe_failure(error, has_checkpoint=False)
    log_failure(error, failure, secrets=(), tracebacks=tmp_path / "failures")
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said in record.getMessage()
    assert "Traceback" not in record.getMessage()
    (whole,) = (tmp_path / "failures").iterdir()
    assert str(whole) in record.getMessage()
    assert type(error).__name__ in whole.read_text()


def test_the_way_out_of_a_cause_is_that_of_the_error_and_others_have_none():
    error = ValueError("no rendezvous")
    error.__cause__ = OSError(errno.EADDRINUSE, "Address already in use")
    assert "MASTER_PORT" in way_out_of(error)
    assert way_out_of(RuntimeError("shapes cannot be multiplied")) is None
