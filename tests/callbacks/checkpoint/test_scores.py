"""A score that arrives after its checkpoint was saved counts for that checkpoint and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genlight.callbacks import Checkpoint, Hook
from genlight.callbacks.checkpoint import RecordMeta, delete_checkpoint, list_checkpoints, save
from genlight.callbacks.checkpoint.format.record import SCORES_FILE
from genlight.callbacks.checkpoint.listing import read_scores
from genlight.callbacks.checkpoint.selection import WRITER, add_score
from genlight.callbacks.hook.events import publish_scores

pytestmark = pytest.mark.promise(name="checkpoint")


class Publishes(Hook):
    writes = ("eval_scores",)
    critical = True

    def __init__(self, scores: dict[int, tuple[int, float]]) -> None:
        self.scores = scores

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.scores:
            step, value = self.scores[trainer.global_step]
            publish_scores(trainer, {"val": value}, step)


def saver(folder: Path, **settings) -> Checkpoint:
    return Checkpoint(folder, every_n_steps=2, monitor="val", save_final=False, **{"asynchronous": False, **settings})


def scores_in(folder: Path) -> dict[int, float | None]:
    return {entry.record.step: entry.record.metrics.get("val") for entry in list_checkpoints(folder)}


def test_a_checkpoint_saved_while_an_older_one_is_scored_does_not_get_that_score(fit, counting_trainer, tmp_path):
    """The scores of the previous attempt, with which a resumed run begins, must not count either."""
    folder = tmp_path / "c"
    fit(
        counting_trainer(),
        [Publishes({3: (2, 0.1)}), saver(folder, keep_last=None)],
        steps=6,
        enable_checkpointing=True,
    )
    assert scores_in(folder) == {2: 0.1, 4: None, 6: None}

    fit(
        counting_trainer(),
        [Publishes({9: (8, 0.3)}), saver(folder, keep_last=None)],
        steps=10,
        enable_checkpointing=True,
        ckpt_path=folder / "step-00000006.json",
    )
    assert scores_in(folder) == {2: 0.1, 4: None, 6: None, 8: 0.3, 10: None}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_score_counts_whether_it_comes_before_the_save_or_after(fit, counting_trainer, tmp_path, asynchronous):
    class PublishesAfterTheSave(Publishes):
        writes = ()
        reads = ("latest_checkpoint_uri",)

    folder = tmp_path / "c"
    hooks = [Publishes({2: (2, 0.25)}), PublishesAfterTheSave({4: (4, 0.5)})]
    fit(
        counting_trainer(),
        [*hooks, saver(folder, keep_last=None, asynchronous=asynchronous)],
        steps=5,
        enable_checkpointing=True,
    )
    assert scores_in(folder) == {2: 0.25, 4: 0.5}


def record_at(folder: Path, step: int, weight: float):
    dump = {"state_dict": {"w": torch.full((2,), weight)}, "global_step": step}
    return save(folder / f"step-{step:08d}.json", dump, meta=RecordMeta(run_id="r", writer=WRITER))


def test_a_checkpoint_that_replaces_another_does_not_inherit_its_score(tmp_path):
    add_score(record_at(tmp_path, 2, 1.0), "val", 0.5)
    assert scores_in(tmp_path) == {2: 0.5}
    record_at(tmp_path, 2, 2.0)
    assert scores_in(tmp_path) == {2: None}


def test_scores_are_deleted_with_their_checkpoint(tmp_path):
    record = record_at(tmp_path, 2, 1.0)
    add_score(record, "val", 0.5)
    add_score(record, "test", 0.25)
    (record.data_path / ".tmp-scores.json-12-0123abcd").write_bytes(b"{")  # of a process that was killed
    assert list_checkpoints(tmp_path)[0].record.metrics == {"val": 0.5, "test": 0.25}
    delete_checkpoint(record.path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"val": "best"}', b"{}" * 1_000_000])
def test_a_damaged_score_file_causes_a_warning_and_loses_no_checkpoint(tmp_path, caplog, content):
    record = record_at(tmp_path, 2, 1.0)
    (record.data_path / SCORES_FILE).write_bytes(content)
    assert scores_in(tmp_path) == {2: None}
    assert "scores.json cannot be read" in caplog.text


def test_a_link_instead_of_the_score_file_is_not_followed_but_replaced(tmp_path, caplog):
    other = tmp_path / "other"
    other.write_text('{"val": 1.0}')
    record = record_at(tmp_path / "c", 2, 1.0)
    (record.data_path / SCORES_FILE).symlink_to(other)
    assert read_scores(record) == {}
    assert "cannot be read" in caplog.text
    add_score(record, "val", 0.5)
    assert read_scores(record) == {"val": 0.5}
    assert other.read_text() == '{"val": 1.0}'


def test_a_checkpoint_is_reported_after_the_validation_of_its_step(tmp_path, make_trainer, make_net):
    """The event log would drop scores of a step whose checkpoint it already has."""
    heard = []

    class Listener(Hook):
        def on_validation_end(self, trainer, pl_module):
            heard.append(f"scores of {trainer.global_step}")

        def on_checkpoint_durable(self, trainer, pl_module, record):
            heard.append(f"checkpoint of {record.step}")

    net, batches = make_net(), torch.utils.data.DataLoader(torch.ones(5, 6, 4), batch_size=None)
    net.validation_step = lambda batch, batch_idx: None
    saves = Checkpoint(tmp_path, every_n_steps=2, save_final=False, asynchronous=False)
    trainer = make_trainer(saves, Listener(), max_epochs=1, val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(net, batches, batches)

    events = [f"{what} of {step}" for step in (2, 4) for what in ("scores", "checkpoint")]
    assert heard == events
