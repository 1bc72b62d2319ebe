"""`setup`, `configure`, `prepare_batch`, `train_step`: times, arguments, results and errors."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.promise(name="equal")


def test_hooks_are_called_in_the_canonical_order(project: Any) -> None:
    """Once, once, then a pair for every step, and no batch is fetched after the last."""
    assert project.run(metric_every=0) == 0
    steps = ["prepare_batch", "train_step"] * 3
    assert [name for name, _ in project.notes] == ["setup", "configure", *steps, "save_checkpoint", "state_dict"]


def test_each_hook_gets_the_very_objects_of_the_run(project: Any) -> None:
    """The raw batch as the source gave it, what `prepare_batch` made of it, the state, and one context."""
    assert project.run() == 0
    contexts = {id(facts["ctx"]) for name, facts in project.notes if name in ("prepare_batch", "train_step")}
    assert len(contexts) == 1
    assert [facts["raw_batch"] for facts in project.calls("prepare_batch")] == [1, 2, 3]
    assert [facts["batch"] for facts in project.calls("train_step")] == [("prepared", n) for n in (1, 2, 3)]
    states = [facts["state"] for name, facts in project.notes if name in ("prepare_batch", "train_step", "state_dict")]
    assert all(state is states[0] for state in states)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("device", "cpu"),
        ("dtype", "fp32"),
        ("rank", 0),
        ("world_size", 1),
        ("model_handles", {}),
        ("optimizer", None),
        ("scheduler", None),
    ],
)
def test_a_field_of_the_context(project: Any, field: str, expected: Any) -> None:
    """`setup` and every later hook see the same values."""
    assert project.run(max_steps=1) == 0
    for name in ("setup", "configure", "train_step"):
        (facts,) = project.calls(name)
        assert getattr(facts["ctx"], field) == expected


def test_the_context_names_the_job_under_both_of_its_names_and_answers_whether_it_is_canceled(project: Any) -> None:
    """`run_id`; some releases called it `request_id`."""
    assert project.run(max_steps=1, hyperparams={"rank": 8}) == 0
    ctx = project.calls("configure")[0]["ctx"]
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


@pytest.mark.parametrize(
    ("job", "category", "text", "step"),
    [
        ({"hyperparams": {"fails_in": ["setup"]}}, "model-load", "setup broke", 0),
        ({"hyperparams": {"fails_in": ["configure"]}}, "model-load", "configure broke", 0),
        ({"hyperparams": {"fails_in": ["prepare_batch"]}}, "train-step", "prepare_batch broke", 1),
        ({"hyperparams": {"fails_in": ["train_step"]}}, "train-step", "train_step broke", 1),
        ({"hyperparams": {"returns": {"train_step": {"loss": 1.0}}}}, "train-step", "train_step returned a dict", 1),
        ({"hyperparams": {"returns": {"train_step": None}}}, "train-step", "train_step returned a NoneType", 1),
    ],
)
def test_an_error_of_a_hook_ends_the_run_under_its_category(
    project: Any, job: dict[str, Any], category: str, text: str, step: int
) -> None:
    """Exit code 1, one `failed` event, the step that was being executed."""
    assert project.run(**job) == 1
    failed = project.events[-1]
    assert (failed["event"], failed["category"], failed["step"]) == ("failed", category, step)
    assert failed["error"].startswith(f"{category}:")
    assert text in failed["error"]
