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

from genlight.adapter.contract.types import StepContext, TrainingJobSpec
from genlight.adapter.job.config import resolve_run_config
from support.forked import run_forked

LOAD_DIGITS = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""SHA-256 of scikit-learn's ``load_digits``: its pixels and then its labels, a byte each."""
SMALL = {"width": 16, "depth": 1, "warmup_steps": 5, "sampling_steps": 3}


def context(**job):
    spec = {"run_id": "digits", "max_steps": 40, "hyperparams": SMALL, **job}
    return StepContext(job=TrainingJobSpec(**spec), device="cpu", dtype="fp32")


@pytest.fixture(autouse=True)
def _keep_torch_settings():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def table(examples):
    return pq.read_table(examples / "digits" / "digits.parquet")


@pytest.fixture
def batches(table):
    return table.combine_chunks().to_batches(max_chunksize=64)


@pytest.fixture
def ready(digits):
    trainer, ctx = digits.DigitsTrainer(), context()
    trainer.setup(ctx)
    return trainer, trainer.configure(ctx), ctx


def train(ready, batches, steps):
    trainer, state, ctx = ready
    results = []
    for step in range(steps):
        batch = trainer.prepare_batch(batches[step % len(batches)], state, ctx)
        results.append(trainer.train_step(batch, state, ctx))
    return results


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


def test_the_data_can_be_written_again(make_dataset, table):
    assert make_dataset.digits_table().equals(table)


def test_the_trainer_knows_nothing_of_what_runs_it(examples):
    source = (examples / "digits" / "trainer.py").read_text()
    imported = set(re.findall(r"^(?:from|import) ([\w]+)", source, re.MULTILINE))
    assert not imported & {"genlight", "lightning", "pytorch_lightning"}
    assert "gen_worker" in imported


def test_training_lowers_the_loss_and_reports_rate_and_gradient(ready, batches):
    results = train(ready, batches, 40)
    losses = [float(result.metrics["loss"]) for result in results]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert set(results[0].metrics) == {"loss", "lr", "train/grad_norm"}
    rates = [result.metrics["lr"] for result in results]
    assert rates[:5] == pytest.approx([0.0004, 0.0008, 0.0012, 0.0016, 0.002])
    assert max(rates) == rates[5]
    assert rates[-1] < 0.0001
    assert ready[1].scheduler.get_last_lr() == pytest.approx([0])


def test_a_digit_as_prompt_gives_a_picture_of_forty(ready, tmp_path):
    result = ready[1].generate_sample(prompt="3", seed=1, step=7, output_dir=tmp_path)
    assert result == {"picture": "digits-3.png", "count": 40, "guidance": 1.5, "trained_steps": 7}
    assert digits_of_picture(tmp_path / "digits-3.png").shape == (4, 10, 8, 8)


def test_pictures_depend_on_the_seed_alone_and_leave_the_random_numbers_of_training(ready, tmp_path):
    before = torch.get_rng_state()
    data = []
    for index, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(index)
        folder.mkdir()
        ready[1].generate_sample(prompt="0", seed=seed, step=0, output_dir=folder)
        torch.rand(1)
        data.append((folder / "digits-0.png").read_bytes())
    assert data[0] == data[1] != data[2]
    torch.set_rng_state(before)
    ready[1].generate_sample(prompt="0", seed=1, step=0, output_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


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
