"""`run_training_loop`: the contract's canonical order with the caller's own reporter, writer and uploader."""

from collections.abc import Iterator
from typing import Any

import pytest

from genlight.adapter import (
    InputError,
    StepContext,
    StepControlHints,
    StepResult,
    TrainingCanceled,
    TrainingJobSpec,
    run_training_loop,
)
from support.messages import refusal

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


class Journal:
    """Everything that was called, in order; shared by all the parts below."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def names(self) -> list[str]:
        return [line.split()[0] for line in self.lines]


class Trainer:
    """A trainer without torch that records its hooks."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.controls: dict[int, StepControlHints] = {}
        self.steps = 0

    def setup(self, ctx: StepContext) -> None:
        self.journal.lines.append("setup")

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        self.journal.lines.append("configure")
        return {"total": 0}

    def prepare_batch(self, raw: Any, state: Any, ctx: StepContext) -> Any:
        self.journal.lines.append(f"prepare_batch {raw}")
        return raw

    def train_step(self, batch: Any, state: Any, ctx: StepContext) -> Any:
        self.steps += 1
        self.journal.lines.append(f"train_step {batch}")
        state["total"] += batch
        return StepResult(metrics={"loss": float(batch)}, control=self.controls.get(self.steps))

    def state_dict(self, state: Any) -> dict[str, object]:
        self.journal.lines.append("state_dict")
        return dict(state)

    def load_state_dict(self, state: Any, payload: Any, ctx: StepContext) -> None:
        self.journal.lines.append(f"load_state_dict {payload}")
        state.update(payload)


NOTES = {
    "started": "{run_id}",
    "metric": "{name}={value} @{step}",
    "checkpoint": "{path} @{step}",
    "sample": "{path} @{step}",
    "completed": "{final_checkpoint} @{step}",
    "failed": "{error} @{step}",
    "write_checkpoint": "{state_payload} @{step}",
    "finalize": "{state_payload}",
    "upload_metrics": "{metrics} @{step}",
    "upload_checkpoint": "{local_path} @{step}",
    "upload_sample": "{local_path} @{step}",
}
"""The calls of the loop, and how a journal notes their arguments."""
ANSWERS = {"write_checkpoint": "c{step}", "finalize": "final"}


class Caller:
    """Reporter, writer and uploader in one: records every call, names files without writing them, may cancel."""

    def __init__(self, journal: Journal, *, cancel_after: int | None = None, reason: str | None = None) -> None:
        self.journal, self.cancel_after = journal, cancel_after
        if reason is not None:
            self.cancel_reason = reason

    def __getattr__(self, name: str) -> Any:
        if name not in NOTES:
            raise AttributeError(name)

        def call(**facts: Any) -> str | None:
            self.journal.lines.append(f"{name} {NOTES[name].format(**facts)}")
            return ANSWERS[name].format(**facts) if name in ANSWERS else None

        return call

    def write_samples(self, *, step: int, **_: Any) -> list[str]:
        return [f"s{step}a", f"s{step}b"]

    def is_canceled(self) -> bool:
        done = sum(line.startswith("train_step") for line in self.journal.lines)
        return self.cancel_after is not None and done >= self.cancel_after


@pytest.fixture
def journal():
    return Journal()


def run(journal, batches, *, trainer=None, **options):
    """Run a job of four steps, with cadences that `options` may set."""
    limits: dict[str, Any] = {"max_steps": 4, "metric_every": 0}
    limits |= {name: options.pop(name) for name in list(options) if name == "max_steps" or name.endswith("_every")}
    job = TrainingJobSpec("r", **limits)
    options.setdefault("reporter", Caller(journal))
    return run_training_loop(
        job, StepContext(job=job), trainer or Trainer(journal), batches, artifact_writer=Caller(journal), **options
    )


def test_the_canonical_order_of_one_whole_run(journal):
    """Every call of a run, in the contract's order: metrics, then checkpoint, then samples."""
    steps = run(
        journal,
        [1, 2, 3],
        max_steps=2,
        metric_every=2,
        checkpoint_every=2,
        sample_every=2,
        uploader=Caller(journal),
    )
    assert steps == 2
    assert journal.lines == [
        "setup",
        "configure",
        "started r",
        "prepare_batch 1",
        "train_step 1",
        "prepare_batch 2",
        "train_step 2",
        "metric train/loss=2.0 @2",
        "upload_metrics {'train/loss': 2.0} @2",
        "state_dict",
        "write_checkpoint {'total': 3} @2",
        "checkpoint c2 @2",
        "upload_checkpoint c2 @2",
        "sample s2a @2",
        "upload_sample s2a @2",
        "sample s2b @2",
        "upload_sample s2b @2",
        "state_dict",
        "finalize {'total': 3}",
        "completed final @2",
    ]


def test_a_resume_loads_state_before_started_and_skips_no_batch(journal):
    """`start_step` counts as completed; the caller chooses the batches."""
    assert run(journal, [10, 20], start_step=3, resume_state_payload={"total": 5}) == 4
    assert journal.lines[:5] == ["setup", "configure", "load_state_dict {'total': 5}", "started r", "prepare_batch 10"]
    assert journal.lines[-1] == "completed final @4"
    assert "train_step 20" not in journal.lines


@pytest.mark.parametrize("max_steps", [0, 3])
def test_a_run_without_steps_left_starts_and_completes(journal, max_steps):
    """Nothing is fetched and nothing trained."""
    taken: list[int] = []

    def batches():
        taken.append(1)
        yield 1

    assert run(journal, batches(), max_steps=max_steps, start_step=max_steps) == max_steps
    assert journal.names() == ["setup", "configure", "started", "state_dict", "finalize", "completed"]
    assert not taken


def test_cadences_fire_when_a_boundary_is_crossed(journal):
    """Every third step of seven."""
    run(journal, range(1, 9), max_steps=7, checkpoint_every=3)
    assert [line for line in journal.lines if line.startswith("checkpoint")] == ["checkpoint c3 @3", "checkpoint c6 @6"]


def test_a_step_may_suppress_its_cadences(journal):
    """`skip_cadence_emit` suppresses all three, and they are not repeated later."""
    trainer = Trainer(journal)
    trainer.controls[2] = StepControlHints(skip_cadence_emit=True)
    run(journal, [1, 2, 3, 4], trainer=trainer, metric_every=2, checkpoint_every=2, sample_every=2)
    emitted = [line for line in journal.lines if line.split()[0] in ("metric", "checkpoint", "sample")]
    assert [line.rpartition("@")[2] for line in emitted] == ["4"] * 4


def test_batches_may_come_from_iter_batches(journal):
    """An object with `iter_batches()` is a source."""

    class Feeder:
        def iter_batches(self) -> Iterator[int]:
            return iter([1, 2, 3, 4])

    assert run(journal, Feeder()) == 4


def test_batches_that_are_lists_stay_lists(journal):
    """`prepare_batch` gets the same object that the source returned."""
    raw = [[1.0, 2.0], {"x": 1}]
    seen: list[Any] = []

    class Keeps(Trainer):
        def prepare_batch(self, raw: Any, state: Any, ctx: StepContext) -> Any:
            seen.append(raw)
            return 1

    run(journal, [raw], max_steps=1, trainer=Keeps(journal))
    assert seen[0] is raw


def test_a_finite_source_completes_at_the_step_it_reached(journal):
    """Two batches of four."""
    assert run(journal, [1, 2]) == 2
    assert journal.lines[-1] == "completed final @2"


def test_an_empty_source_fails(journal):
    """Nothing was trained, so nothing completes."""
    with refusal(InputError):
        run(journal, [])
    assert journal.names()[-1] == "failed"
    assert "completed" not in journal.names()


def failing(hook: str, error: BaseException) -> type[Trainer]:
    """A trainer with a hook that raises; a hook of a step raises at the third batch."""

    def fails(self: Trainer, *arguments: Any) -> Any:
        if hook == "train_step" and arguments[0] < 3:
            return Trainer.train_step(self, *arguments)
        raise error

    return type("Fails", (Trainer,), {hook: fails})


@pytest.mark.parametrize(
    ("hook", "error", "told"),
    [
        ("train_step", ZeroDivisionError("own text: no prefix"), "failed own text: no prefix @3"),
        ("train_step", KeyboardInterrupt(), "failed KeyboardInterrupt @3"),
        ("configure", RuntimeError("no weights"), "failed no weights @0"),
    ],
)
def test_failed_gets_the_exceptions_own_text_and_step_and_the_root_cause_is_raised(journal, hook, error, told):
    """Also a keyboard interrupt, although Lightning turns it into a SystemExit; before `started` the step is 0."""
    with pytest.raises(type(error)) as raised:
        run(journal, [1, 2, 3], trainer=failing(hook, error)(journal))
    assert raised.value is error
    assert journal.lines[-1] == told
    assert ("started" in journal.names()) == (hook == "train_step")


def test_a_failing_writer_is_reported_at_its_step(journal):
    """The step counts as completed by then."""

    class Full(Caller):
        def write_checkpoint(self, **_: Any) -> str:
            raise OSError("disk full")

    job = TrainingJobSpec("r", 4, metric_every=0, checkpoint_every=2)
    with refusal(OSError):
        run_training_loop(job, StepContext(job=job), Trainer(journal), [1, 2, 3], Caller(journal), Full(journal))
    assert journal.lines[-1] == "failed disk full @2"


def test_a_reporter_that_fails_while_failing_hides_nothing(journal):
    """The failure of training is raised, not the reporter's."""

    class Broken(Caller):
        def failed(self, *, step: int, error: str) -> None:
            raise ConnectionError("reporter is down")

    trainer = failing("configure", ZeroDivisionError("the cause"))(journal)
    with refusal(ZeroDivisionError):
        run(journal, [1], trainer=trainer, reporter=Broken(journal))


@pytest.mark.parametrize(("reason", "expected"), [(None, "canceled"), ("timeout", "timeout")])
@pytest.mark.parametrize("after", [0, 2])
def test_a_stop_is_seen_before_the_first_step_and_after_every_step(journal, reason, expected, after):
    """The reason of the reporter is the reason of the exception."""
    with pytest.raises(TrainingCanceled) as raised:
        run(journal, [1, 2, 3, 4], reporter=Caller(journal, cancel_after=after, reason=reason))
    assert raised.value.reason == expected
    assert journal.lines[-1] == f"failed {expected} @{after}"
    assert journal.names().count("train_step") == after


def test_the_context_names_the_device_that_is_there(journal):
    """The default `cuda:0` becomes the CPU if there is no CUDA; job and dtype stay the caller's."""
    seen: list[StepContext] = []

    class Looks(Trainer):
        def setup(self, ctx: StepContext) -> None:
            seen.append(ctx)

    job = TrainingJobSpec("r", 1, metric_every=0)
    ctx = StepContext(job=job, device="cpu", dtype="fp32", model_handles={"a": 1})
    run_training_loop(job, ctx, Looks(journal), [1], Caller(journal), Caller(journal))
    (given,) = seen
    assert (given.job, given.device, given.dtype, given.model_handles) == (job, "cpu", "fp32", {"a": 1})
    assert (given.rank, given.world_size, given.dataset) == (0, 1, [1])
    assert given.run_state is not None
    assert given.is_canceled is not None
    assert not given.is_canceled()
