"""Unclear errors of torch are reported with a way out instead of a traceback."""

from __future__ import annotations

import logging
import os
import signal
import socket

import pytest
import torch
from torch import nn

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.plumbing.failures import describe_failure, explain
from genlight.adapter.run.report import log_failure


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
    ("fail", "said"), [(dead_worker, "use fewer `workers`"), (port_in_use, "Set `MASTER_PORT` to a free port")]
)
def test_the_way_out_is_shown_without_a_traceback(tmp_path, caplog, fail, said):
    with pytest.raises(RuntimeError) as raised:
        fail()
    error = explain(raised.value)
    log_failure(error, describe_failure(error, has_checkpoint=False), secrets=(), folder=tmp_path)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said in record.getMessage()
    assert "Traceback" not in record.getMessage()
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerators")
@pytest.mark.parametrize(
    "move",
    [
        lambda: nn.Linear(1, 1).to("cuda"),
        lambda: torch.ones(1).cuda(),
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: torch.zeros(1, device="mps"),
    ],
    ids=["to", "cuda", "device", "mps"],
)
def test_a_missing_device_is_named_with_the_line_that_asks_for_it(move):
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        move()
    error = explain(raised.value)
    assert isinstance(error, ContractError)
    assert f"{__file__}:{move.__code__.co_firstlineno} asks for a device" in str(error)
    assert ".to(ctx.device)" in str(error)
    assert explain(AssertionError("the class's own")) is None


def test_differing_shapes_and_names_are_listed_up_to_a_limit():
    saved, built = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with pytest.raises(RuntimeError) as raised:
        built.load_state_dict(saved.state_dict())
    text = str(explain(raised.value))
    for said in (
        'Unexpected key(s) in state_dict: "1.weight", "1.bias". size mismatch for 0.weight',
        "`genlight fit --resume never`",
    ):
        assert said in text
    deep = nn.Sequential(*(nn.Linear(1, 1) for _ in range(99)))
    with pytest.raises(RuntimeError) as raised:
        deep.load_state_dict(nn.Linear(1, 1).state_dict())
    assert "…. Build the model as it was" in str(explain(raised.value))


def test_other_errors_are_not_explained():
    assert explain(RuntimeError("CUDA out of memory")) is None
