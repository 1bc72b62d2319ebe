"""The feed under Lightning's own fit loop: shares, epochs, and resume in the middle of one."""

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule

from genlight.adapter import ArrowDataModule, ArrowFeed, ContractModule, MockDataModule, StepResult, TrainingJobSpec
from genlight.adapter.contract.exceptions import InputError
from support.messages import refusal
from support.trainer_class import Counts
from support.trainers import quiet_trainer


class Seen(LightningModule):
    """Notes the ids of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.column("id").to_pylist())
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Seen):
    """Notes the ids of each validation step as well."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[list[int]] = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch.column("id").to_pylist())


class SaveAt(Callback):
    """Saves a checkpoint at the end of one step, or of one epoch."""

    def __init__(self, path: Path, step: int | None = None, epoch: int | None = None) -> None:
        self.path, self.step, self.epoch = path, step, epoch

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, *args):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def fit(data, *callbacks, resume=None, model=None, **options):
    model = model or Seen()
    trainer = quiet_trainer(*callbacks, **{"max_epochs": 3, **options})
    trainer.fit(model, data, ckpt_path=resume, weights_only=False)
    return model


def test_an_epoch_of_lightning_is_one_pass_over_the_data(rows_file):
    model = fit(ArrowDataModule(str(rows_file(5)), batch_size=2))
    assert model.seen == [[0, 1], [2, 3], [4]] * 3


@pytest.mark.parametrize("where", [{"step": 2}, {"step": 3}, {"step": 5}, {"epoch": 0}, {"epoch": 1}])
def test_lightning_resumes_after_the_last_trained_batch(rows_file, tmp_path, where):
    data = {"parquet_paths": str(rows_file(7)), "batch_size": 3, "shuffle": True}
    whole = fit(ArrowDataModule(**data), SaveAt(tmp_path / "c.ckpt", **where)).seen
    assert len({tuple(batch) for batch in whole}) > 4
    done = where.get("step") or (where["epoch"] + 1) * 3
    resumed = fit(ArrowDataModule(**data), resume=tmp_path / "c.ckpt").seen
    assert resumed == whole[done:]


@pytest.mark.parametrize(("before", "after", "step"), [(2, 4, 6), (4, 2, 3), (4, 9, 5), (1, 3, 5), (20, 1, 2)])
def test_a_batch_size_that_changes_within_an_epoch_neither_loses_nor_repeats_a_row(
    rows_file, tmp_path, before, after, step
):
    data = {"parquet_paths": str(rows_file(9, 11)), "shuffle": True}
    first = fit(ArrowDataModule(batch_size=before, **data), SaveAt(tmp_path / "c.ckpt", step=step)).seen[:step]
    rest = fit(ArrowDataModule(batch_size=after, **data), resume=tmp_path / "c.ckpt").seen
    rows = [i for batch in [*first, *rest] for i in batch]
    assert [sorted(rows[i : i + 20]) for i in range(0, len(rows), 20)] == [list(range(20))] * 3


def test_rank_and_number_of_ranks_come_from_the_trainer(rows_file, ids):
    data = ArrowDataModule(str(rows_file(8)), batch_size=2)
    data.trainer = SimpleNamespace(global_rank=1, world_size=2)
    assert ids(data.train_dataloader()) == [[2, 3], [6, 7]]


def test_limited_epochs_are_followed_by_the_next_order_not_the_rest(rows_file):
    model = fit(ArrowDataModule(str(rows_file(6)), batch_size=2), limit_train_batches=2)
    assert model.seen == [[0, 1], [2, 3]] * 3


def test_validation_reads_its_files_anew_each_time(rows_file):
    data = ArrowDataModule(
        str(rows_file(2)), batch_size=2, val_paths=str(rows_file(3, name="val", first_id=10)), shuffle=True
    )
    model = fit(data, model=Validated(), max_epochs=2, num_sanity_val_steps=0)
    assert model.validated == [[10, 11], [12]] * 2


class RankOfTwo(LightningDataModule):
    """A user's own data module around a feed that is one of two ranks."""

    def __init__(self, path, rank, **options):
        super().__init__()
        self.feed = ArrowFeed(path, batch_size=2, rank=rank, world_size=2, shuffle=True, **options)
        self.train_dataloader = lambda: self.feed
        self.state_dict, self.load_state_dict = self.feed.state_dict, self.feed.load_state_dict


def resumed_on_two_of(path, checkpoint, **options):
    """Steps of the two ranks on which the run of one process goes on that had trained 8 of 9 rows."""
    data = {"batch_size": 4, "shuffle": True}
    alone = fit(ArrowFeed(path, **data), SaveAt(checkpoint, step=2)).seen[:2]
    state = torch.load(checkpoint, weights_only=False)
    state["RankOfTwo"] = state["loops"]["fit_loop"]["state_dict"].pop("combined_loader")[0]
    torch.save(state, checkpoint)
    return alone, [fit(RankOfTwo(path, rank, **options), resume=checkpoint).seen for rank in range(2)]


def test_rows_too_few_for_a_step_of_the_ranks_of_a_resume_are_trained_in_lightnings_next_epoch(rows_file, tmp_path):
    alone, ranks = resumed_on_two_of(rows_file(9), tmp_path / "c.ckpt")
    both = [first + second for first, second in zip(*ranks, strict=True)]
    rows = [i for step in [*alone, *both] for i in step]
    assert [sorted(rows[i : i + 9]) for i in range(0, 27, 9)] == [list(range(9))] * 3
    assert len(rows) == 27


def test_rows_that_are_dropped_at_a_resume_do_not_end_the_training(rows_file, tmp_path):
    _, ranks = resumed_on_two_of(rows_file(9), tmp_path / "c.ckpt", drop_last=True)
    assert [len(rank) for rank in ranks] == [4, 4]  # two steps in each of the two epochs that were left


def test_a_feed_that_was_asked_for_its_length_too_early_warns_that_lightning_will_cut_epochs_short(rows_file):
    path = rows_file(9)
    alone = ArrowFeed(path, batch_size=1)
    assert [batch.num_rows for _, batch in zip(range(6), alone, strict=False)] == [1] * 6
    shared = ArrowFeed(path, batch_size=2, world_size=2)
    assert len(shared) == 3
    with pytest.warns(UserWarning, match="7 steps, but before the position .* ArrowDataModule"):
        shared.load_state_dict(alone.state_dict())
    assert len(shared) == 7


class Hosted(Counts):
    """A trainer of the contract that notes the ids of each step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def train_step(self, batch, state, ctx):
        self.seen.append(batch.column("id").to_pylist())
        return StepResult()


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_a_hosted_trainer_resumes_as_if_never_stopped_where_epochs_are_cut_short(rows_file, tmp_path, step):
    def train(*callbacks, **options):
        trainer = Hosted()
        module = ContractModule(trainer, TrainingJobSpec(run_id="cut", max_steps=8))
        data = ArrowDataModule(str(rows_file(20)), batch_size=2, shuffle=True)
        fit(data, *callbacks, model=module, max_epochs=None, max_steps=8, limit_train_batches=3, **options)
        return trainer.seen

    whole = train(SaveAt(tmp_path / "c.ckpt", step=step))
    assert len({tuple(batch) for batch in whole}) == 8
    assert train(resume=tmp_path / "c.ckpt") == whole[step:]


def mock(batches, rank=0, world_size=1):
    data = MockDataModule(batches)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data.train_dataloader()


def test_each_iteration_is_one_pass_and_a_batch_can_be_asked_for_by_number():
    feed = mock([{"x": 1}, None, "three"])
    assert list(feed) == list(feed) == [{"x": 1}, None, "three"]
    assert (len(feed), feed[2]) == (3, "three")


def test_ranks_share_mock_batches_step_by_step_and_a_remainder_is_said(caplog):
    caplog.set_level(logging.INFO, logger="genlight")
    feeds = [mock([1, 2, 3, 4, 5], r, 2) for r in range(2)]
    assert [list(feed) for feed in feeds] == [[1, 3], [2, 4]]
    assert [feed[1] for feed in feeds] == [3, 4]
    assert "the last 1 rows" in caplog.text


def test_fewer_mock_batches_than_ranks_are_refused():
    with refusal(InputError):
        list(mock([1], 0, 2))


def test_mock_batches_resume_on_another_number_of_ranks():
    alone = mock(list(range(6)))
    list(itertools.islice(alone, 3))
    ranks = [mock(list(range(6)), rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert [list(rank) for rank in ranks] == [[3], [4]]
