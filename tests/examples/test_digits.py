"""The main job: a trainer class that draws digits."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from genlight.adapter.job.config import resolve_run_config
from support.forked import run_forked

LOAD_DIGITS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""SHA-256 of scikit-learn's ``load_digits``: its pixels and then its labels, a byte each."""


@pytest.fixture(scope="module")
def table(examples):
    return pq.read_table(examples / "digits" / "digits.parquet")


def digits_of_picture(file, scale=6, cell=9, side=8):
    """The grey values [rows, columns, 8, 8] of a picture of the example."""
    grid = np.asarray(Image.open(file))[::scale, ::scale]
    rows, columns = (length // cell for length in grid.shape)
    inner = grid[1:, 1:].reshape(rows, cell, columns, cell).swapaxes(1, 2)
    return inner[:, :, :side, :side]


def test_the_data_is_scikit_learns_digits_in_five_row_groups(examples, table):
    assert table.num_rows == 1797
    pixels = np.array(table["image"].to_pylist(), dtype=np.uint8)
    labels = table["label"].to_numpy().astype(np.uint8)
    assert hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest() == LOAD_DIGITS
    assert table.schema.field("image").type == pa.list_(pa.uint8(), 64)
    assert pq.ParquetFile(examples / "digits" / "digits.parquet").num_row_groups == 5


def test_the_trainer_knows_nothing_of_what_runs_it(examples):
    source = (examples / "digits" / "trainer.py").read_text()
    imported = set(re.findall(r"^(?:from|import) ([\w]+)", source, re.MULTILINE))
    assert not imported & {"genlight", "lightning", "pytorch_lightning"}
    assert "gen_worker" in imported


def test_the_job_is_a_sound_spec_without_a_warning(examples):
    config = resolve_run_config(spec_path=examples / "digits" / "job.json", environ={})
    assert config.warnings == ()
    assert [Path(path).is_file() for path in config.dataset.parquet_paths] == [True]
    assert [request.prompt for request in config.sample_prompts] == ["all", "3", "7"]
    assert config.sample_seed == 1
    assert config.job.max_steps % config.job.sample_every == 0
    assert config.job.max_steps % config.job.checkpoint_every == 0


@pytest.fixture(scope="module")
def reader_of_digits(table):
    """A function from images to the labels of the real digits that are nearest to them."""
    real = torch.tensor(table["image"].to_pylist(), dtype=torch.float32)
    labels = table["label"].to_numpy()
    return lambda images: labels[torch.cdist(torch.from_numpy(images).float(), real).argmin(dim=1)]


def run_job(job, artifacts, *settings):
    words = [word for setting in settings for word in ("--set", setting)]
    environ = {**os.environ, "TRAINER_ARTIFACTS_DIR": str(artifacts)}
    return run_forked("run", job, *words, folder=Path.cwd(), environ=environ)


def recognised(reader, picture, labels):
    images = digits_of_picture(picture).reshape(-1, 64) * (16 / 255)
    return float(np.mean(reader(images) == labels))


@pytest.mark.slow
def test_the_job_ends_with_digits_that_a_classifier_of_real_ones_recognises(examples, tmp_path, reader_of_digits):
    """A third of the job's steps are enough; `make demo` trains them all."""
    steps = 1000
    settings = (f"max_steps={steps}", f"sample_every={steps}", f"checkpoint_every={steps // 2}")
    done = run_job(examples / "digits" / "job.json", tmp_path / "artifacts", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in (tmp_path / "artifacts/metrics/events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["step"]) == ("completed", steps)

    pictures = tmp_path / "artifacts" / "samples"
    last = {path.name: path for path in pictures.glob(f"step-{steps:08d}-*/*.png")}
    assert set(last) == {"digits-all.png", "digits-3.png", "digits-7.png"}
    assert recognised(reader_of_digits, last["digits-all.png"], np.repeat(np.arange(10), 10)) >= 0.85
    assert recognised(reader_of_digits, last["digits-3.png"], 3) >= 0.85
    assert recognised(reader_of_digits, last["digits-7.png"], 7) >= 0.85
