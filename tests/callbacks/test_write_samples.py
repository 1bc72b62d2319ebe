"""Samples at their cadence: their files and records, and no effect on training."""

import contextlib
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genlight.adapter.contract.exceptions import ContractError
from genlight.adapter.contract.types import StepControlHints, StepResult, TrainingJobSpec
from genlight.callbacks import Checkpoint, Hook, WriteSamples
from genlight.callbacks.hook.events import run_state_of

JOB = TrainingJobSpec(run_id="run-7", max_steps=4)


@pytest.fixture
def sampling(counting_trainer):
    """Make a trainer class whose state has a generator, as an attribute or under a key."""

    def make(generate, *, as_key=False):
        class Sampling(counting_trainer):
            def configure(self, ctx):
                state = super().configure(ctx)
                if as_key:
                    return {**state, "generate_sample": generate}
                return SimpleNamespace(generate_sample=generate, steps=0, seen=[], lr=0.5)

            def train_step(self, batch, state, ctx):
                skip = batch == getattr(self, "skipped_batch", None)
                return StepResult(metrics={"loss": 0.0}, control=StepControlHints(skip_cadence_emit=skip))

        return Sampling()

    return make


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def record(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("as_key", [False, True])
def test_each_request_gives_one_record_at_each_boundary(fit, sampling, tmp_path, as_key):
    returned = {
        "tensor": torch.tensor([1.5, float("nan")]),
        "array": np.arange(2),
        "number": np.float32(0.5),
        "path": Path("a/b"),
        "infinite": float("inf"),
    }
    generator = sampling(lambda prompt, seed: {"length": len(prompt), **returned}, as_key=as_key)
    requests = [{"prompt": "a cat", "seed": 3}, {"prompt": "a dog"}]

    fit(generator, [WriteSamples(tmp_path, 2, requests=requests, seed=9)], job=JOB)

    assert names(tmp_path) == [f"step-0000000{step}-0{i}.json" for step in (2, 4) for i in (0, 1)]
    assert record(tmp_path, "step-00000004-00.json") == {
        "name": "sample-00",
        "run_id": "run-7",
        "step": 4,
        "task": "t2i",
        "prompt": "a cat",
        "seed": 3,
        "negative_prompt": "",
        "instruction": None,
        "source_image": None,
        "files": [],
        "length": 5,
        "tensor": [1.5, None],
        "array": [0, 1],
        "number": 0.5,
        "path": "a/b",
        "infinite": None,
    }
    assert record(tmp_path, "step-00000002-01.json")["seed"] == 9


def test_a_generator_gets_the_arguments_of_its_signature(fit, sampling, tmp_path):
    calls = []

    def generate(step, ctx, request, prompt, negative_prompt, instruction, source_image, seed, task, output_dir):
        calls.append({name: value for name, value in locals().items() if name != "calls"})

    request = {"prompt": "p", "negative_prompt": "n", "instruction": "i", "source_image": "s.png"}
    request |= {"seed": 0, "task": "t2i", "name": "x"}
    _, module = fit(sampling(generate), [WriteSamples(tmp_path, 4, requests=[request], seed=5)], job=JOB)

    (call,) = calls
    assert call.pop("ctx") is module.ctx
    assert Path(call.pop("output_dir")).parent == tmp_path
    assert call.pop("request") == request
    assert call == {**{name: value for name, value in request.items() if name != "name"}, "step": 4}


def test_files_of_a_sample_are_named_in_its_record_and_in_the_event(fit, sampling, tmp_path):
    written = []

    class Listener(Hook):
        def on_samples_written(self, trainer, pl_module, samples, step):
            paths = [path for record, files in samples.items() for path in (record, *files)]
            written.append((step, [str(path.relative_to(tmp_path)) for path in paths]))

    def generate(output_dir):
        output_dir = Path(output_dir)
        (output_dir / "parts").mkdir()
        (output_dir / "parts" / "b.txt").write_text("b")
        (output_dir / "a.png").write_bytes(b"png")
        assert all(name.startswith(".tmp-step-00000004-00-") for name in names(tmp_path))
        return {"image": output_dir / "a.png", "grid": [str(output_dir / "a.png")], "name": output_dir.name}

    trainer, _ = fit(sampling(generate), [WriteSamples(tmp_path, 4, requests=[{}]), Listener()], job=JOB)

    files = ["step-00000004-00/a.png", "step-00000004-00/parts/b.txt"]
    shown = record(tmp_path, "step-00000004-00.json")
    assert (shown["files"], shown["name"]) == (files, "step-00000004-00")
    assert [shown["image"]] == shown["grid"] == [str(tmp_path / files[0])]
    assert written == [(4, ["step-00000004-00.json", *files])]
    assert run_state_of(trainer).latest_sample_uris == [str(tmp_path / name) for name in written[0][1]]


def test_without_requests_or_a_generator_there_is_one_text(fit, sampling, counting_trainer, tmp_path, caplog):
    fit(sampling(lambda step: {"made_at": step}), [WriteSamples(tmp_path / "with", 4)], job=JOB)
    fit(counting_trainer(), [WriteSamples(tmp_path / "off", 0, requests=[{}])], job=JOB)
    assert "has no `generate_sample`" not in caplog.text
    fit(counting_trainer(), [WriteSamples(tmp_path / "without", 3)], job=JOB)
    assert caplog.text.count("has no `generate_sample`") == 1
    fit(counting_trainer(), [WriteSamples(tmp_path / "requested", 4, requests=[{"prompt": "p"}])], job=JOB)

    assert not (tmp_path / "off").exists()
    assert names(tmp_path / "with") == ["step-00000004.json", "step-00000004.txt"]
    assert record(tmp_path / "with", "step-00000004.json")["made_at"] == 4
    assert names(tmp_path / "without") == ["step-00000003.txt"]
    assert names(tmp_path / "requested") == ["step-00000004-00.json"]
    assert (tmp_path / "without" / "step-00000003.txt").read_text() == "run-7 step 3\n"


class Killed(BaseException):
    """Stands for a SIGKILL."""


class Listener(Hook):
    def __init__(self, *, dies=False):
        self.dies, self.heard = dies, []

    def on_samples_written(self, trainer, pl_module, samples, step):
        if self.dies:
            raise Killed
        files = [path for record, files in samples.items() for path in (record, *files)]
        self.heard.append((step, sorted(path.name for path in files)))


@pytest.mark.parametrize("requests", [[{"prompt": "a"}, {"prompt": "b"}], []])
@pytest.mark.parametrize("dies_at", ["first sample", "last sample", "announcement"])
def test_a_resume_makes_the_samples_of_its_step_that_a_kill_prevented(fit, sampling, tmp_path, requests, dies_at):
    """They get the same random numbers as without the kill."""
    calls = []

    def generate(request, output_dir):
        if len(calls) == dies_after_calls.get(dies_at):
            raise Killed
        calls.append(request)
        (Path(output_dir) / "noise.txt").write_text(str(torch.rand(1).item()))

    def run(name, **options):
        listener = Listener(dies=name == "killed" and dies_at == "announcement")
        samples = WriteSamples(tmp_path / name.replace("killed", "resumed"), 2, requests=requests)
        saver = Checkpoint(tmp_path / f"{name}-checkpoints", every_n_steps=2, save_final=False, asynchronous=False)
        fit(sampling(generate, as_key=True), [saver, listener, samples], job=JOB, enable_checkpointing=True, **options)
        return listener.heard

    dies_after_calls = {}
    torch.manual_seed(1)
    expected = run("uninterrupted")
    calls.clear()
    dies_after_calls = {"first sample": 0, "last sample": max(len(requests) - 1, 0)}
    torch.manual_seed(1)
    with pytest.raises(Killed):
        run("killed")
    dies_after_calls = {}

    heard = run("resumed", ckpt_path=tmp_path / "killed-checkpoints" / "step-00000002.json")

    assert heard == expected
    assert [step for step, _ in heard] == [2, 4]
    for name in names(tmp_path / "uninterrupted"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()


def test_a_resume_does_not_repeat_samples_that_came_before_its_checkpoint(fit, sampling, tmp_path):
    """A step that skipped its samples does not get them later."""
    steps = []

    def run(**options):
        plugin = sampling(lambda step: steps.append(step), as_key=True)
        plugin.skipped_batch = 1
        saver = Checkpoint(tmp_path / "c", every_n_epochs=1, save_final=True)
        options |= {"job": JOB, "enable_checkpointing": True}
        fit(plugin, [saver, WriteSamples(tmp_path / "s", 2, requests=[{}])], **options)

    run()
    assert steps == [4]

    run(ckpt_path=tmp_path / "c" / "final.json")

    assert steps == [4]


def test_random_numbers_of_training_do_not_depend_on_sampling(fit, sampling, tmp_path):
    def draws(every):
        drawn = []

        class Drawing(type(sampling(None))):
            def configure(self, ctx):
                return SimpleNamespace(generate_sample=lambda: (draw(), None)[1])

            def train_step(self, batch, state, ctx):
                drawn.append(draw())
                return StepResult()

        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        fit(Drawing(), [WriteSamples(tmp_path / str(every), every, requests=[{}, {}])])
        return drawn

    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        assert draws(1) == draws(0)
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@pytest.mark.parametrize("critical", [True, False])
def test_a_failing_generator_leaves_no_record_and_ends_the_run_if_it_is_critical(fit, sampling, tmp_path, critical):
    def generate(output_dir):
        Path(output_dir, "half.png").write_bytes(b"half")
        raise RuntimeError("out of memory")

    callback = WriteSamples(tmp_path, 2, requests=[{}], critical=critical)
    with pytest.raises(RuntimeError) if critical else contextlib.nullcontext():
        fit(sampling(generate), [callback])

    assert callback.failures == ({} if critical else {"on_train_batch_end": 2})
    assert list(tmp_path.iterdir()) == []


def test_samples_of_an_earlier_attempt_at_the_step_are_replaced_and_only_debris_is_removed(fit, sampling, tmp_path):
    for name in ("step-00000004-00", "step-00000001-00", ".tmp-step-00000001-00-77-abcdef01"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old.png").touch()
    (tmp_path / "step-00000004-00.json").write_text('{"files": ["step-00000004-00/old.png"]}')
    (tmp_path / ".tmp-step-00000001-00.json-77-abcdef01").touch()
    seen = []

    def generate(output_dir):
        output_dir = Path(output_dir)
        seen.append((list(output_dir.iterdir()), (tmp_path / "step-00000004-00.json").exists()))
        (output_dir / "new.png").touch()

    fit(sampling(generate), [WriteSamples(tmp_path, 4, requests=[{}])])

    assert seen == [([], True)]
    kept = ["step-00000001-00/old.png", "step-00000004-00.json", "step-00000004-00/new.png"]
    assert names(tmp_path) == kept


REFUSED = {
    "a text": (lambda folder: "a path", "generate_sample returned a str; it must be a mapping or None"),
    "an object": (
        lambda folder: {"x": object()},
        "of step-00000002-00 returned a value that is not JSON: object cannot",
    ),
    "a key": (lambda folder: {"x": {(1, 2): 3}}, "returned a value that is not JSON"),
    "a surrogate": (lambda folder: {"x": "\ud800"}, "returned a value that is not JSON"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "created 'pipe', which is not a file"),
    "a link": (lambda folder: (folder / "link").symlink_to("nowhere"), "created 'link', which is not a file"),
    "a name": (lambda folder: Path(os.fsdecode(bytes(folder) + b"/\xff")).touch(), "is not JSON: .*surrogates"),
}


@pytest.mark.parametrize(("generate", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_json_and_no_regular_file_is_refused_without_waiting(fit, sampling, tmp_path, generate, message):
    with pytest.raises(ContractError, match=message):
        fit(sampling(lambda output_dir: generate(Path(output_dir))), [WriteSamples(tmp_path, 2, requests=[{}])])

    assert list(tmp_path.iterdir()) == []
