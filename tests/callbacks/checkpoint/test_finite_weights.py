"""The entry of a checkpoint about its weights: finite, not finite, or unknown."""

import json

import pytest
import torch

from genlight.adapter.cli.command_line import main
from genlight.callbacks.checkpoint import Checkpoint, DurableCheckpointIO, RecordMeta, list_checkpoints, load, save
from genlight.callbacks.checkpoint.format.record import digest_of, read_record

pytestmark = pytest.mark.promise(name="checkpoint")

NAN, INF = float("nan"), float("inf")


def saved(path, parameters=frozenset(), **weights):
    tensors = {name: torch.tensor(values) for name, values in weights.items()}
    meta = RecordMeta(step=1, parameters=frozenset(parameters))
    return save(path, {"state_dict": tensors}, meta=meta).finite_weights


def test_a_record_says_whether_the_parameters_are_finite(tmp_path):
    assert saved(tmp_path / "a", weight=[1.0, 2.0]) is True
    assert saved(tmp_path / "b", {"weight"}, weight=[1.0], mask=[-INF]) is True
    assert saved(tmp_path / "c", {"weight"}, weight=[1.0, NAN], mask=[1.0]) is False
    assert saved(tmp_path / "d", weight=[1.0, INF]) is None  # it may be a mask
    assert save(tmp_path / "e", {"epoch": 1}, meta=RecordMeta(step=1)).finite_weights is None


def test_a_record_without_the_entry_still_loads(tmp_path):
    saved(tmp_path / "a", weight=[1.0])
    path = tmp_path / "a.json"
    content = json.loads(path.read_bytes())
    del content["finite_weights"], content["digest"]
    body = json.dumps(content, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + b',"digest":"xxh3_128:' + digest_of(body).encode() + b'"}\n')
    assert read_record(path).finite_weights is None
    assert load(path)["state_dict"]["weight"].tolist() == [1.0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_diverged_run_keeps_its_newest_finite_checkpoint(tmp_path, train_net, make_net, caplog, capsys, asynchronous):
    class Diverges(type(make_net())):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (NAN if batch_idx >= 3 else 1.0)

    checkpoint = Checkpoint(tmp_path, every_n_steps=1, keep_last=2, asynchronous=asynchronous)
    train_net(checkpoint, max_steps=7, net=Diverges())
    found = {listed.record.name: listed.record.finite_weights for listed in list_checkpoints(tmp_path)}
    assert found == {"step-00000003": True, "step-00000006": False, "step-00000007": False, "final": False}

    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "not finite" in line] == ["step-00000006", "step-00000007", "final"]

    plugin = DurableCheckpointIO()
    plugin.load_checkpoint(tmp_path / "step-00000003.json")
    assert "not finite" not in caplog.text
    train_net(Checkpoint(tmp_path), max_steps=8, net=Diverges(), ckpt_path=tmp_path / "final.json")
    assert "final.json are not finite" in caplog.text
