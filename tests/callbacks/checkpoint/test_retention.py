"""The checkpoints that a run keeps."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from genlight.callbacks.checkpoint import CheckpointStore, listing, save, storage, store as store_module
from genlight.callbacks.checkpoint.format.record import CheckpointRecord, FileEntry, step_of_name
from genlight.callbacks.checkpoint.selection import Retention, add_score, to_delete

pytestmark = pytest.mark.promise(name="checkpoint")


def record(step, *, score=None, final=False, is_old=False):
    return CheckpointRecord(
        path=Path(f"/c/step-{step:08d}.json"),
        step=step,
        run_id="r",
        state={},
        folder=None,
        files=(),
        final=final,
        metrics={} if score is None else {"score": score},
        is_old=is_old,
    )


def steps(records):
    return [item.step for item in records]


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "retention", "deleted"),
    [
        ([None] * 4, Retention(), [0, 1]),
        ([None] * 9, Retention(keep_last=None), []),
        ([5.0, 1.0, 3.0, 9.0, 4.0], Retention(keep_last=1, keep_best=2, monitor="score", mode="min"), [0, 3]),
        ([5.0, 1.0, 3.0, 9.0, 4.0], Retention(keep_last=1, keep_best=1, monitor="score", mode="max"), [0, 1, 2]),
        ([NAN, 7.0, None, None], Retention(keep_last=1, monitor="score", mode="max"), [0, 2]),
    ],
)
def test_the_newest_and_the_best_are_kept(scores, retention, deleted):
    records = [record(step, score=score) for step, score in enumerate(scores)]
    assert steps(to_delete(records[::-1], retention)) == deleted


def test_the_newest_with_finite_weights_is_kept_although_later_ones_follow():
    finite = [True, True, False, False, False]
    records = [dataclasses.replace(record(at), finite_weights=known) for at, known in enumerate(finite)]
    assert steps(to_delete(records, Retention(keep_last=1))) == [0, 2, 3]
    unknown = [dataclasses.replace(r, finite_weights=r.finite_weights and None) for r in records]
    assert steps(to_delete(unknown, Retention(keep_last=1))) == [0, 2, 3]


def test_final_and_checkpoints_of_the_older_runtime_are_kept():
    records = [record(1, final=True), record(2, is_old=True), record(3), record(4)]
    assert steps(to_delete(records, Retention(keep_last=1))) == [3]


@given(
    scores=st.lists(st.none() | st.floats(allow_nan=True), min_size=1, max_size=12),
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 3),
)
def test_newest_and_best_are_never_deleted(scores, keep_last, keep_best):
    records = [record(step, score=score) for step, score in enumerate(scores)]
    retention = Retention(keep_last, keep_best, "score", "max")
    gone = set(steps(to_delete(records, retention)))
    assert not gone & set(range(len(scores) - keep_last, len(scores)))
    finite = sorted((s for s in scores if s is not None and abs(s) < float("inf")), reverse=True)
    for step, score in enumerate(scores):
        if keep_best and finite and score == finite[0] and scores.index(score) == step:
            assert step not in gone
    assert len(scores) - len(gone) <= keep_last + keep_best


def test_removals_after_each_save_read_a_record_once_until_it_changes(tmp_path, monkeypatch):
    """Quadratic reading once delayed a run by minutes."""
    saved = [save(tmp_path / f"step-{step:08d}", {"global_step": step}) for step in range(60)]
    read, store = [], CheckpointStore()

    def reading(path, *, real=storage.read_record):
        read.append(step_of_name(Path(path).stem))
        return real(path)

    def reads_of_removal(choose):
        read.clear()
        store.prune(tmp_path, choose)
        store.background.finish()
        return sorted(read)

    monkeypatch.setattr(storage, "read_record", reading)
    monkeypatch.setattr(listing, "read_record", reading)
    assert reads_of_removal(lambda listed: saved[:50]) == sorted([*range(60), *range(50)])  # once more to remove it
    assert len(list(tmp_path.glob("*.json"))) == 10
    add_score(saved[55], "loss", 0.5)
    for step in (57, 60):
        save(tmp_path / f"step-{step:08d}", {"global_step": step})
    (tmp_path / "step-00000058.json").write_text("{")  # a broken record keeps its folder
    assert reads_of_removal(lambda listed: []) == [55, 57, 58, 60]
    reads_of_removal(lambda listed: saved[59:])
    assert (tmp_path / "step-00000058").is_dir()


def test_a_failure_of_a_removal_is_logged(tmp_path, caplog, monkeypatch):
    store = CheckpointStore()
    monkeypatch.setattr(store_module, "delete_checkpoint", lambda *_: 1 / 0)
    store.save(tmp_path / "new", {"global_step": 2}, asynchronous=True)
    store.remove(tmp_path / "old")
    store.close()
    assert f"Could not remove {tmp_path / 'old'}: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("of the user's"), PermissionError(13, "Permission denied")], ids=repr
)
def test_a_failure_of_retention_is_logged(tmp_path, caplog, error):
    """Otherwise the disk fills up without a reason in the log."""

    def choose(listed):
        raise error

    store = CheckpointStore()
    store.prune(tmp_path, choose)
    store.close()
    assert f"Could not remove old checkpoints from {tmp_path}: {type(error).__name__}: {error}" in caplog.text


@pytest.mark.parametrize(
    "named", ["step-00000001.json", "step-00000001", "step-00000001/model.safetensors", "step-00000001/trainer/lora"]
)
def test_a_checkpoint_stays_while_one_of_its_paths_is_in_use(named: str) -> None:
    files = (FileEntry("step-00000001/model.safetensors", 1, "0" * 32),)
    used = dataclasses.replace(
        record(1), folder="step-00000001", files=files, trainer_checkpoint={"primary_path": "lora"}
    )
    records = [used, record(2), record(3)]
    assert steps(to_delete(records, Retention(keep_last=1), {f"/c/{named}"})) == [2]
    assert steps(to_delete(records, Retention(keep_last=1), {"/c/step-00000001/other"})) == [1, 2]
