"""Values that become nan or infinite during training, and their reports."""

import lightning.pytorch as pl
import pytest
import torch

from genlight.adapter import NonfiniteError
from genlight.callbacks import Checkpoint, WatchNonfinite
from genlight.callbacks.checkpoint import list_checkpoints
from genlight.callbacks.finite import are_finite
from genlight.reporters import EventLogger, read_events
from support.messages import refusal
from support.trainers import quiet_trainer


class Line(pl.LightningModule):
    """One weight; the batch is the slope of its loss."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.tensor([float("-inf")]))

    def training_step(self, batch, batch_idx):
        return (batch * self.weight).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, values, *callbacks, **options):
    trainer = quiet_trainer(*callbacks, max_epochs=1, default_root_dir=tmp_path, **options)
    trainer.fit(Line(), torch.tensor(values).unsqueeze(1))


def test_a_nonfinite_metric_is_logged_once_with_its_step_and_as_an_event(tmp_path, caplog):
    logger = EventLogger(tmp_path / "events.jsonl", run_id="r")
    fit(tmp_path, [1.0] * 5 + [float("inf")] + [1.0] * 9, WatchNonfinite(every_n_steps=2), logger=logger)
    (message,) = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert message.startswith("the metric 'loss' is not finite at step 6; all was finite at step 4.")
    found = [e for e in read_events(tmp_path / "events.jsonl") if e.get("name") == "trainer/nonfinite_step"]
    assert [(event["value"], event["step"]) for event in found] == [(6.0, 6)]


def test_a_weight_that_stays_nan_is_noticed_at_the_next_cadence(tmp_path, caplog):
    fit(tmp_path, [1.0, float("nan")] + [0.0] * 6, WatchNonfinite(every_n_steps=3))
    assert any("not finite at step 3" in message for message in caplog.messages)


def test_stop_ends_the_run_before_the_step_is_saved(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c", every_n_steps=2, keep_last=None)
    with refusal(NonfiniteError):
        fit(tmp_path, [1.0] * 3 + [float("inf")] * 3, checkpoint, WatchNonfinite("stop", every_n_steps=2))
    assert [listed.record.step for listed in list_checkpoints(tmp_path / "c")] == [2]


def test_nothing_is_logged_if_all_values_are_finite(tmp_path, caplog):
    """An infinite buffer may be a mask and does not count."""
    fit(tmp_path, [1.0] * 6, WatchNonfinite("stop", every_n_steps=1))
    assert "not finite" not in caplog.text


def test_an_unknown_policy_is_refused():
    with refusal(ValueError):
        WatchNonfinite("skip")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_large_values_are_finite_and_one_bad_element_is_found(dtype):
    large = torch.full((5,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    rest = [torch.ones(2), torch.arange(3), torch.empty(0)]
    assert are_finite([large, *rest])
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not are_finite([*rest, torch.tensor([1.0, bad]).to(dtype)])
