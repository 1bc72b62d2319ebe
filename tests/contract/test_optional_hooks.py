"""`generate_sample`: its requests, and the samples of a job whose class has none."""

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
