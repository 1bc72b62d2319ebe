"""`generate_sample`, `rollout`, `evaluate`: times, arguments, results and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
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


@pytest.fixture
def sample(fit: Any, counting_trainer: Any, tmp_path: Path) -> Any:
    """Draws the samples of one step; returns what the generator got, and the JSON of each sample."""

    def draw(requests: Any, returned: Any = None, *, generator: bool = True, **options: Any) -> Any:
        got: list[dict[str, Any]] = []

        class Sampling(counting_trainer):  # type: ignore[misc]
            def configure(self, ctx: Any) -> Any:
                def generate_sample(**given: Any) -> Any:
                    got.append(given)
                    return returned

                return {**super().configure(ctx), **({"generate_sample": generate_sample} if generator else {})}

            def state_dict(self, state: Any) -> dict[str, object]:
                return {}

        fit(Sampling(), [WriteSamples(tmp_path, 2, requests=requests, **options)], steps=2, job=JOB)
        written = sorted(tmp_path.glob("*.json"))
        return SimpleNamespace(got=got, names=[path.name for path in written], json=[read(path) for path in written])

    return draw


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


@pytest.mark.parametrize("field", DEFAULTS)
def test_an_absent_field_of_a_request_has_its_old_default(sample: Any, field: str) -> None:
    """This holds in the request, for the argument, and in the JSON of the sample; that has all fields."""
    drawn = sample([{}])
    request = drawn.got[0]["request"]
    assert getattr(request, field) == request[field] == drawn.json[0][field] == DEFAULTS[field]
    if field != "name":
        assert drawn.got[0][field] == DEFAULTS[field]


def test_a_request_has_attributes_and_reads_as_a_mapping(sample: Any) -> None:
    """The caller's own fields are included; a missing name is a KeyError or an AttributeError."""
    given = {"name": "cat", "prompt": "a cat", "negative_prompt": "blurry", "seed": 3, "style": "ink"}
    request = sample([given]).got[0]["request"]
    assert isinstance(request, Mapping)
    assert (request.name, request.prompt, request.negative_prompt, request.seed) == ("cat", "a cat", "blurry", 3)
    assert (request.task, request.mode, request.style) == ("t2i", "t2i", "ink")
    assert dict(request) == {**DEFAULTS, **given}
    assert {**request}["prompt"] == request.get("prompt") == "a cat"
    with refusal(AttributeError):
        request.promt
    with pytest.raises(KeyError):
        request["promt"]


def test_samples_without_a_name_are_numbered(sample: Any) -> None:
    """`sample-00`, `sample-01`; and so are their files."""
    drawn = sample([{"prompt": "a"}, {"name": "own"}, {"prompt": "b"}])
    assert [facts["name"] for facts in drawn.json] == ["sample-00", "own", "sample-02"]
    assert drawn.names == [f"step-00000002-0{index}.json" for index in range(3)]


def test_the_seed_is_the_requests_else_the_jobs(sample: Any) -> None:
    """This holds for the argument and in the JSON; the request keeps its value."""
    drawn = sample([{"seed": 5}, {}], seed=9)
    assert [call["seed"] for call in drawn.got] == [facts["seed"] for facts in drawn.json] == [5, 9]
    assert [call["request"].seed for call in drawn.got] == [5, None]


def test_a_generator_gets_the_arguments_in_its_signature(fit: Any, counting_trainer: Any, tmp_path: Path) -> None:
    """`mode`, the name of `task` in some releases, too; the folder is a text."""
    got = []

    def generate_sample(
        *, step: int, mode: str, output_dir: str, seed: int = 11, negative_prompt: str = "ugly"
    ) -> None:
        got.append((step, mode, type(output_dir), seed, negative_prompt))

    class Sampling(counting_trainer):  # type: ignore[misc]
        def configure(self, ctx: Any) -> Any:
            return SimpleNamespace(generate_sample=generate_sample, steps=0, seen=[])

        def train_step(self, batch: Any, state: Any, ctx: Any) -> Any:
            return SimpleNamespace(metrics={})

    fit(Sampling(), [WriteSamples(tmp_path, 2, requests=[{}])], steps=2, job=JOB)
    assert got == [(2, "t2i", str, 11, "")]


@pytest.mark.parametrize(
    ("returned", "merged"), [(None, {}), ({}, {}), ({"image": "a.png", "prompt": "as sung"}, {"image": "a.png"})]
)
def test_the_result_of_a_generator_is_merged_into_the_json(sample: Any, returned: Any, merged: dict[str, Any]) -> None:
    """A mapping, whose entries win over the request's; or None."""
    drawn = sample([{"prompt": "a cat"}], returned)
    facts = drawn.json[0]
    assert {name: facts[name] for name in merged} == merged
    assert facts["prompt"] == (returned or {}).get("prompt", "a cat")
    assert (facts["step"], facts["run_id"], facts["files"]) == (2, "r", [])


def test_without_a_generator_each_request_gives_a_file_all_the_same(sample: Any) -> None:
    """The JSON has the request, with null for absent fields."""
    drawn = sample([{"prompt": "a"}, {"seed": 1}], generator=False)
    assert drawn.names == ["step-00000002-00.json", "step-00000002-01.json"]
    own = {"step": 2, "run_id": "r", "files": []}
    assert drawn.json[0] == {**DEFAULTS, "prompt": "a", **own}
    assert drawn.json[1] == {**DEFAULTS, "name": "sample-01", "seed": 1, **own}


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


def test_a_result_that_is_not_a_mapping_is_an_error(sample: Any) -> None:
    """The older runtime dropped it in silence."""
    with refusal(TypeError):
        sample([{}], "a.png")


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


@pytest.mark.parametrize("returned", [[1.0], {"score": "good"}])
def test_scores_that_are_not_a_mapping_of_numbers_are_an_error(project: Any, returned: Any) -> None:
    """Of the contract."""
    job = {"validate": {"every_n_steps": 1, "critical": True}, "hyperparams": {"returns": {"evaluate": returned}}}
    assert project.run(project.source() + EVALUATE, **job) == 1
    assert project.events[-1]["category"] == "train-step"
    assert "evaluate" in project.events[-1]["error"]
