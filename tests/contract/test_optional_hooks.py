"""`generate_sample`, `rollout`, `evaluate`: times, arguments, results and errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from genlight.adapter import TrainingJobSpec
from genlight.callbacks import WriteSamples
from support.messages import refusal

pytestmark = pytest.mark.promise(name="equal")

JOB = TrainingJobSpec("r", max_steps=2)

DEFAULTS = {
    "name": "sample-00",
    "task": "t2i",
    "prompt": "",
    "negative_prompt": "",
    "instruction": None,
    "source_image": None,
    "seed": None,
}


def test_a_request_has_attributes_and_reads_as_a_mapping(fit: Any, counting_trainer: Any, tmp_path: Path) -> None:
    """Absent fields have their old defaults; `mode` is the name of `task` in some releases; the folder is a text."""
    got: list[Any] = []

    def generate_sample(*, request: Any, mode: str, output_dir: str, seed: int = 11, negative_prompt: str = "") -> None:
        got.append((request, mode, type(output_dir), seed, negative_prompt))

    class Sampling(counting_trainer):  # type: ignore[misc]
        def configure(self, ctx: Any) -> Any:
            return {**super().configure(ctx), "generate_sample": generate_sample}

        def state_dict(self, state: Any) -> dict[str, object]:
            return {}

    given = {"name": "cat", "prompt": "a cat", "negative_prompt": "blurry", "seed": 3, "style": "ink"}
    fit(Sampling(), [WriteSamples(tmp_path, 2, requests=[given, {}])], steps=2, job=JOB)

    (request, *facts), (absent, *defaults) = got
    assert facts == ["t2i", str, 3, "blurry"]
    assert defaults == ["t2i", str, 11, ""]
    assert isinstance(request, Mapping)
    assert (request.name, request.prompt, request.negative_prompt, request.seed) == ("cat", "a cat", "blurry", 3)
    assert (request.task, request.mode, request.style) == ("t2i", "t2i", "ink")
    assert dict(request) == {**DEFAULTS, **given}
    assert dict(absent) == {**DEFAULTS, "name": "sample-01"}
    assert {**request}["prompt"] == request.get("prompt") == "a cat"
    with refusal(AttributeError):
        request.promt
    with pytest.raises(KeyError):
        request["promt"]


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def test_a_job_without_a_generator_reports_a_sample_for_each_prompt(project: Any) -> None:
    """Through a job spec, as texts and as objects."""
    assert project.run(sample_every=3, sample_prompts=["a cat", {"prompt": "a dog", "task": "edit"}]) == 0
    reported = [Path(event["path"]) for event in project.events if event["event"] == "sample"]
    assert [path.name for path in reported] == ["step-00000003-00.json", "step-00000003-01.json"]
    facts = [read(path) for path in reported]
    assert [(fact["name"], fact["prompt"], fact["task"]) for fact in facts] == [
        ("sample-00", "a cat", "t2i"),
        ("sample-01", "a dog", "edit"),
    ]
    assert {fact["negative_prompt"] for fact in facts} == {""}
    assert {fact["source_image"] for fact in facts} == {fact["seed"] for fact in facts} == {None}


ROLLOUT = """
    def rollout(self, state, ctx):
        returned = self.act("rollout", state=state, ctx=ctx)
        return [10, 20] if returned is ... else returned
"""

EVALUATE = """
    def evaluate(self, state, ctx):
        returned = self.act("evaluate", state=state, ctx=ctx)
        return {"score": 1.0} if returned is ... else returned
"""


def test_a_rollout_is_called_before_each_training_phase_and_feeds_it(project: Any) -> None:
    """It gets the state and the context; the dataset is None, because nothing else feeds the run."""
    assert project.run(project.source() + ROLLOUT, max_steps=3, mock_batches=None) == 0
    assert [name for name, _ in project.notes if name in ("rollout", "train_step")] == [
        *("rollout", "train_step", "train_step"),
        *("rollout", "train_step"),
    ]
    assert [facts["raw_batch"] for facts in project.calls("prepare_batch")] == [10, 20, 10]
    assert {facts["ctx"].dataset for facts in project.calls("rollout")} == {None}


@pytest.mark.parametrize("returned", [[10], [[10], {"reward": 1.0}], {"x": 1}, 5])
def test_a_rollout_returns_batches_or_a_pair_of_them_and_statistics(project: Any, returned: Any) -> None:
    """Anything else is a `train-step` failure that names what it was."""
    hyperparams = {"returns": {"rollout": returned}}
    source = project.source() + ROLLOUT.replace(
        "else returned", "else tuple(returned) if len(returned) > 1 else returned"
    )
    if isinstance(returned, list):
        assert project.run(source, max_steps=1, mock_batches=None, hyperparams=hyperparams) == 0
        assert project.calls("prepare_batch")[0]["raw_batch"] == 10
        statistics = [event["value"] for event in project.events if event.get("name") == "rollout/reward"]
        assert statistics == ([1.0] if len(returned) > 1 else [])
    else:
        source = project.source() + ROLLOUT
        assert project.run(source, max_steps=1, mock_batches=None, hyperparams=hyperparams) == 1
        text = f"rollout returned a {type(returned).__name__}; it must be an iterable of raw batches"
        assert text in project.events[-1]["error"]


def test_evaluate_is_called_at_its_cadence_and_its_scores_are_metrics(project: Any) -> None:
    """It gets the state and the context; scores are reported at the step that was evaluated."""
    assert project.run(project.source() + EVALUATE, max_steps=4, validate={"every_n_steps": 2}) == 0
    assert [facts["state"]["steps"] for facts in project.calls("evaluate")] == [4, 4]  # one object, at its end by now
    scores = [(event["step"], event["value"]) for event in project.events if event.get("name", "").endswith("score")]
    assert scores == [(2, 1.0), (4, 1.0)]
