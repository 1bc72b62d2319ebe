"""Ten lines of Python around an existing trainer class."""

from __future__ import annotations

import csv
import runpy
import sys

import pytest
import torch


@pytest.fixture
def run(examples, monkeypatch, tmp_path):
    """Run the script in an empty working directory; gives its names."""
    folder = examples / "wrap_existing"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    state, before = torch.get_rng_state(), set(sys.modules)
    yield lambda: runpy.run_path(str(folder / "wrap.py"))
    torch.set_rng_state(state)
    for name in set(sys.modules) - before:
        if name == "existing" or name.startswith("gen_worker"):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore:.*passed in a `val_dataloader`.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated, use `isinstance.*")
def test_the_script_trains_the_class_and_lightnings_own_callbacks_see_it(run, tmp_path, capsys):
    names = run()
    trainer = names["trainer"]
    assert trainer.global_step == 600
    assert trainer.callback_metrics["train/accuracy"] > 0.9
    assert "600 steps, accuracy " in capsys.readouterr().out

    assert list((tmp_path / "runs/wrap_existing/checkpoints").glob("*.ckpt"))
    assert names["best"].best_model_score < 0.5
    (log,) = (tmp_path / "runs/wrap_existing").rglob("metrics.csv")
    with log.open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    assert len(losses) == 60
    assert losses[-1] < 0.3 * losses[0]


def test_the_class_knows_nothing_of_lightning(examples):
    source = (examples / "wrap_existing" / "existing.py").read_text()
    assert "gen_worker.trainer" in source
    assert "lightning" not in source
    assert "genlight" not in source
