"""`setup`, `configure`, `prepare_batch`, `train_step`: times, arguments, results and errors."""

from typing import Any

import pytest

pytestmark = pytest.mark.promise(name="equal")


def test_hooks_are_called_in_the_canonical_order(project: Any) -> None:
    assert project.run(metric_every=0) == 0
    steps = ["prepare_batch", "train_step"] * 3
    assert [name for name, _ in project.notes] == ["setup", "configure", *steps, "save_checkpoint", "state_dict"]


def test_each_hook_gets_the_very_objects_of_the_run(project: Any) -> None:
    assert project.run() == 0
    contexts = {id(facts["ctx"]) for name, facts in project.notes if name in ("prepare_batch", "train_step")}
    assert len(contexts) == 1
    assert [facts["raw_batch"] for facts in project.calls("prepare_batch")] == [1, 2, 3]
    assert [facts["batch"] for facts in project.calls("train_step")] == [("prepared", n) for n in (1, 2, 3)]
    states = [facts["state"] for name, facts in project.notes if name in ("prepare_batch", "train_step", "state_dict")]
    assert all(state is states[0] for state in states)


def test_the_context_has_the_fields_of_the_contract_in_every_hook(project: Any) -> None:
    """Also `request_id`, the name of `run_id` in some releases."""
    assert project.run(max_steps=1, hyperparams={"rank": 8}) == 0
    expected = {"device": "cpu", "dtype": "fp32", "rank": 0, "world_size": 1, "model_handles": {}}
    expected |= {"optimizer": None, "scheduler": None}
    for name in ("setup", "configure", "train_step"):
        (facts,) = project.calls(name)
        ctx = facts["ctx"]
        assert {field: getattr(ctx, field) for field in expected} == expected
        assert (ctx.job.run_id, ctx.job.request_id) == ("r", "r")
        assert (ctx.job.max_steps, ctx.job.hyperparams["rank"]) == (1, 8)
        assert ctx.is_canceled() is False


def test_the_dataset_of_the_context_feeds_the_run(project: Any) -> None:
    """It has the batches already when `setup` looks, and a look does not take any away."""
    source = project.source(
        in_setup="assert [list(ctx.dataset), len(ctx.dataset), ctx.dataset[1]] == [[1, 2, 3, 4], 4, 2]"
    )
    assert project.run(source) == 0
    assert [facts["raw_batch"] for facts in project.calls("prepare_batch")] == [1, 2, 3]


def test_the_dataset_of_the_context_has_the_parquet_rows(project: Any) -> None:
    """The feed of this rank: its schema, its rows, a pass over its batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": list(range(8))}), project.folder / "x.parquet")
    facts = "ctx.dataset.rows, ctx.dataset.schema.names, [batch.num_rows for batch in ctx.dataset]"
    source = project.source(in_setup=f"assert [{facts}] == [8, ['x'], [4, 4]]")
    dataset = {"parquet_paths": ["x.parquet"], "batch_size": 4}
    assert project.run(source, dataset=dataset, mock_batches=None) == 0
    fed = [facts["raw_batch"]["x"].to_pylist() for facts in project.calls("prepare_batch")]
    assert fed == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("duck_typed", [False, True])
def test_a_step_returns_metrics_under_their_reported_names(project: Any, duck_typed: bool) -> None:
    """A `StepResult`, or any object with `.metrics`; `train/lr` is looked up in the state."""
    assert project.run(max_steps=2, hyperparams={"duck_typed": duck_typed}) == 0
    metrics = [(e["name"], e["value"], e["step"]) for e in project.events if e.get("name", "").startswith("train/")]
    assert metrics == [
        ("train/loss", 1.0, 1),
        ("train/lr", 0.5, 1),
        ("train/loss", 0.5, 2),
        ("train/lr", 0.5, 2),
    ]
