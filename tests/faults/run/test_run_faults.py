"""Every kind of failure of a run: its category, whether a restart helps, the exit code, and one terminal event.

The event log ends with the one terminal event of the attempt, and the terminal message holds the same text.
"""

import errno
import os
from dataclasses import dataclass, field

import pytest

from genlight.callbacks.checkpoint.selection import newest_valid
from support import SUPPORT
from support.thread_limit import NO_ROOM_BYTES


@dataclass(frozen=True)
class Fault:
    """A change of the job, and the expected report."""

    category: str
    words: str
    code: int = 1
    resumable: bool = False
    step: int | None = None
    fields: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)
    environ: dict = field(default_factory=dict)
    after: dict | None = None
    """Fields of an earlier run in the same directory."""
    allow_changed: bool = False
    is_quiet: bool = False
    """Whether it is the user's mistake, though noticed late: no traceback shows."""


def data(*paths, **options):
    return {"mock_batches": ..., "dataset": {"parquet_paths": list(paths), "batch_size": 4, **options}}


def fetched(url):
    return {"mock_batches": ..., "dataset": {"batch_size": 4}, "inputs": {"dataset_parquet_urls": [url]}}


def startup(words, **fields):
    return Fault("startup", words, 2, fields=fields)


def lightning(words, **arguments):
    return startup(words, lightning={"accelerator": "cpu", **arguments})


def callback(class_path, **arguments):
    return {"accelerator": "cpu", "callbacks": [{"class_path": class_path, "init_args": arguments}]}


def raises(at, name="OSError", text="quota", *, category="train-step", more=None, **expected):
    """An exception at a place of the trainer class; `more` is the rest of its plan."""
    return Fault(category, f"{name}: {text}", plan={"at": at, "raises": name, "text": text, **(more or {})}, **expected)


def uploads(words, path, *, category="upload", environ=None, kind="checkpoint", **fields):
    fields = {"uploads": {f"{kind}_url": f"SERVER{path}"}, **fields}
    return Fault(category, words, resumable=True, fields=fields, environ=environ or {})


CALLBACKS = "lightning.pytorch.callbacks"
WAITING = [{"class_path": f"fault_trainer.{name}"} for name in ("First", "Second")]
RESUMES = {"after": {"max_steps": 3}, "fields": {"resume_from_latest": True}, "allow_changed": True, "resumable": True}
SAMPLED = {"sample_every": 3, "sample_prompts": ["a cat"]}
FAULTS = {
    # settings
    "several faults": startup("2 errors", max_steps=0, metric_every=-1),
    "no data": startup("names no data", mock_batches=...),
    "unknown kind of upload target": startup(
        "Invalid upload target 'nothing://x'", uploads={"targets": ["nothing://x"]}
    ),
    "faults of Lightning arguments": lightning("`lightning.logger`: Problem with ", precision="bf17", logger="no.Such"),
    "value that Lightning refuses in the fit": lightning("`val_check_interval` (9) must ", val_check_interval=9),
    "an accelerator that is not there": lightning("startup.invalid_job_spec", accelerator="tpu"),
    "callback that no trainer class can have": startup(
        "GradientAccumulationScheduler: the trainer class",
        lightning=callback(f"{CALLBACKS}.GradientAccumulationScheduler", scheduling={"0": 2}),
    ),
    "argument that a callback refuses": startup(
        "`mode` can be min, max, got y", lightning=callback(f"{CALLBACKS}.EarlyStopping", monitor="loss", mode="y")
    ),
    "hook that reads what nobody writes": startup(
        "Reads reads 'nobody_writes', which no hook writes", lightning=callback("fault_trainer.Reads")
    ),
    "hooks that wait for each other": lightning("hooks wait for each other: First, Second, First", callbacks=WAITING),
    # trainer classes
    "trainer import fails": startup("ZeroDivisionError", trainer="breaks_on_import:T"),
    "no hook for a setting": startup(
        "has no `evaluate(state, ctx)`", trainer="fault_trainer:LacksEvaluate", validate={"every_n_steps": 1}
    ),
    "constructor raises": Fault("model-load", "'path'", fields={"trainer": "fault_trainer:BreaksInConstructor"}),
    # inputs
    "file missing": Fault("input", "missing.parquet", fields=data("missing.parquet")),
    "file truncated": Fault("input", "truncated.parquet", fields=data("truncated.parquet")),
    "column missing": Fault("input", "y", fields=data("x.parquet", columns=["y"])),
    "no batches": Fault("input", "0 mock batches", fields={"mock_batches": []}),
    "401 of an input": Fault("auth", "401", fields=fetched("SERVER/refused/401")),
    "404 of an input": Fault("input", "404", fields=fetched("SERVER/refused/404")),
    "wrong digest of an input": Fault("input", "sha256", fields=fetched("SERVER/files/x.parquet#sha256=" + "0" * 64)),
    "nobody serves the input": Fault("input", "could not be fetched", fields=fetched("http://127.0.0.1:9/x")),
    "named checkpoint missing": Fault("input", "old.json", fields={"resume_checkpoint_path": "old.json"}),
    "named checkpoint broken": Fault("input", "broken", fields={"resume_checkpoint_path": "broken.json"}),
    # model-load
    "setup raises": raises("setup", "RuntimeError", "no weights", category="model-load"),
    "setup exits": raises("setup", "SystemExit", "4", category="model-load"),
    "configure raises": raises("configure", "ValueError", "rank", category="model-load"),
    "load_state_dict raises": raises("load_state_dict", "RuntimeError", "size", category="model-load", **RESUMES),
    "load_checkpoint raises": raises("load_checkpoint", "FileNotFoundError", "file", category="model-load", **RESUMES),
    # train-step
    "prepare_batch raises": raises("prepare_batch:1", "ValueError", "bad row", step=1),
    "train_step raises": raises("train_step:4", "ValueError", "nan", resumable=True, step=4),
    "out of device memory": raises("train_step:3", "OutOfMemoryError", "CUDA out of memory", resumable=True, step=3),
    "prepare_batch raises StopIteration": Fault(
        "train-step", "StopIteration", step=1, plan={"at": "prepare_batch:1", "raises": "StopIteration"}
    ),
    "step raises GeneratorExit": raises("train_step:2", "GeneratorExit", step=2),
    "step recurses without end": raises("train_step:1", "RecursionError", step=1),
    "step returns a dict": Fault("train-step", "return StepResult", step=1, plan={"returns": "dict"}),
    "metric is a text": Fault("train-step", "loss", plan={"returns": "text"}),
    "interrupted in a step": Fault(
        "canceled", "canceled", 75, resumable=True, step=4, plan={"at": "train_step:4", "raises": "KeyboardInterrupt"}
    ),
    "monitor that nobody logs": Fault(
        *("train-step", "val/acc"),
        resumable=True,
        fields={"metric_every": 4, "lightning": callback(f"{CALLBACKS}.EarlyStopping", monitor="val/acc")},
        is_quiet=True,
    ),
    "state_dict raises": raises("state_dict:2"),
    "state that cannot be stored": Fault("train-step", 'state["generator"]["cache"][0]', plan={"saves": "generator"}),
    "save_checkpoint raises": raises("save_checkpoint:2"),
    "second save_checkpoint raises": raises("save_checkpoint:4", resumable=True),
    "final artifact fails": raises("save_final", resumable=True),
    "sample raises": raises("generate_sample:3", more={"samples": True}, resumable=True, fields=SAMPLED),
    "sample of a list": Fault(
        "train-step", "generate_sample returned a list", resumable=True, fields=SAMPLED, plan={"samples": "list"}
    ),
    # uploads
    "uploads refused with 403": uploads("403", "/refused/403", category="auth"),
    "uploads refused with 400": uploads("400", "/refused/400"),
    "sample upload refused": uploads("sample of step 3", "/refused/422", kind="sample", sample_every=3),
    "endpoint down": uploads("not delivered", "/down", environ={"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.3"}),
    # stops before anything
    "cancelled before it started": Fault("canceled", "canceled", 75, True, 0, environ={"TRAINER_CANCELLED": "yes"}),
    "time is over before it started": Fault(
        "timeout", "timeout", 75, True, 0, environ={"TRAINER_MAX_RUNTIME_SECONDS": "0.001"}
    ),
}


def prepare(job):
    """Make the files and answers that the faults refer to."""
    (job.folder / "breaks_on_import.py").write_text("1 / 0\n")
    (job.folder / "broken.json").write_text('{"step": 3')
    for code in (400, 401, 403, 404, 422):
        job.server.status[f"/refused/{code}"] = code
    job.server.status["/down"] = 503


@pytest.fixture
def impatient(monkeypatch):
    """Retry downloads without a delay."""
    monkeypatch.setattr("genlight.adapter.plumbing.retry.RetryPolicy.delay_s", lambda *_: 0.0)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("impatient")
def test_a_fault_is_reported_with_its_category_and_ends_the_log(job, caplog, name):
    fault = FAULTS[name]
    prepare(job)
    if fault.after is not None:
        job.write(**fault.after)
        assert job.run() == 0
    job.environ = {"TRAINER_UPLOAD_TERMINAL_URL": f"{job.server.url}/terminal", **fault.environ}
    job.write(plan=fault.plan, **fault.fields)

    code = job.run(allow_changed=fault.allow_changed)

    failed = job.terminal_event()
    assert (failed["event"], failed["category"], code) == ("failed", fault.category, fault.code), failed["error"]
    assert fault.words in failed["error"]
    assert failed["resumable"] is fault.resumable
    assert fault.step in (None, failed["step"])
    if fault.category not in ("canceled", "timeout"):
        assert failed["error"].startswith(f"{fault.category}:")
    assert "Traceback" not in caplog.text or not (code == 2 or fault.is_quiet)
    message = job.server.posted("/terminal")[-1]
    assert (message["status"], message["error"], message["step"]) == ("failed", failed["error"], failed["step"])


# failures that need a patched system call or a prepared folder


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_fails_while_a_checkpoint_is_written(job, monkeypatch, caplog, code):
    """The event log is still written; ``test_single_errors.py`` has the other folders."""
    write = os.write

    def fail(descriptor, data):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/checkpoints/" in target and "probe" not in target:
            raise OSError(code, os.strerror(code))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail)
    assert job.run() == 1
    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("train-step", False)
    assert failed["error"].startswith("train-step:checkpoint step-0000000")
    assert f"could not be written to {job.out / 'checkpoints'}: {os.strerror(code)}" in failed["error"]
    assert "choose another directory" in failed["error"]
    assert "Traceback" not in caplog.text
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]
    assert not list((job.out / "checkpoints").glob("*.json"))


def write_no_log(job):
    job.events_path.parent.mkdir(parents=True)
    job.events_path.write_text("what is this\n")


UNUSABLE = {
    "the events path is a directory": (
        lambda job: job.environ.update(TRAINER_EVENTS_PATH=str(job.folder)),
        "startup.invalid_artifact_paths",
    ),
    "the artifacts directory is a file": (lambda job: job.out.write_text("a file"), "startup.invalid_artifact_paths"),
    "the event log is another file": (write_no_log, "startup.artifacts_in_use"),
}


@pytest.mark.parametrize(("prepare", "code"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_path_that_cannot_be_used_is_reported_by_message(job, prepare, code):
    prepare(job)

    assert job.run() == 2
    assert code in job.server.posted("/terminal")[-1]["error"]
    assert not job.events_path.is_file() or job.events_path.read_text() == "what is this\n"


@pytest.mark.parametrize(
    ("how", "name"), [("remove", "metrics/events.jsonl"), ("replace", "metrics/events.jsonl"), ("remove", "metrics")]
)
def test_a_run_whose_log_is_removed_does_not_complete(job, caplog, how, name):
    job.write(plan={"removes": [str(job.out / name), how == "replace"]}, checkpoint_every=0)
    assert job.run() == 1
    assert "was removed or replaced while the run wrote it" in caplog.text
    assert [posted["status"] for posted in job.server.posted("/terminal")] == ["failed"]

    job.write(checkpoint_every=0, resume_from_latest=True)
    assert job.run(allow_changed=True) == 0  # its final checkpoint was saved
    assert job.terminal_event()["event"] == "completed"


def test_a_terminal_endpoint_that_is_down_fails_a_completed_run(job):
    job.server.status["/terminal"] = 503
    job.environ = {"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.3"}

    assert job.run() == 1
    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("upload", True)
    job.server.status.clear()
    job.write(resume_from_latest=True)
    assert job.run() == 0
    assert job.terminal_event()["event"] == "completed"
    assert [body["status"] for body in job.server.posted("/terminal")] == ["completed"]


def test_a_terminal_endpoint_that_is_down_does_not_hide_the_failure(job):
    job.server.status["/terminal"] = 503
    job.environ = {"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.2"}
    job.write(plan={"at": "train_step:3", "raises": "ValueError", "text": "bad row"})

    assert job.run() == 1
    failed = job.terminal_event()
    assert (failed["category"], failed["step"]) == ("train-step", 3)
    assert "bad row" in failed["error"]


def test_a_finished_run_sends_checkpoints_that_were_never_queued(job):
    """A kill between the last two saves and their queueing leaves such checkpoints."""
    with_url, without = ({"uploads": {f"{kind}_url": f"SERVER/{kind}" for kind in kinds}} for kinds in
                         (("terminal", "checkpoint"), ("terminal",)))  # fmt: skip
    job.write(max_steps=2, resume_from_latest=True, **with_url)
    assert job.run() == 0
    job.write(max_steps=5, resume_from_latest=True, **without)
    assert job.run() == 0
    job.write(max_steps=5, resume_from_latest=True, **with_url)
    assert job.run() == 0
    sent = [(posted["step"], posted["final"]) for posted in job.server.posted("/checkpoint")]
    assert sent == [(2, False), (2, True), (4, False), (5, True)]


# failures of a run that is being stopped


def cancel(job, *, plan=None, **fields):
    """Cancel a run in its second step; it trains on until it notices the request."""
    plan = {"cancels": 2, "step_s": 0.06, **(plan or {})}
    job.write(plan=plan, cancel_file_path="cancel", max_steps=100, mock_batches=list(range(100)), **fields)
    return job.run()


def test_a_failure_after_the_checkpoint_of_a_stop_does_not_hide_the_stop(job, caplog):
    lightning = {"accelerator": "cpu", "callbacks": [{"class_path": "fault_trainer.RaisesWhenItEnds"}]}

    assert cancel(job, lightning=lightning) == 75
    failed = job.terminal_event()
    assert (failed["error"], failed["resumable"]) == ("canceled", True)
    assert (job.out / "checkpoints" / f"step-{failed['step']:08d}.json").exists()
    assert "could not tidy up" in caplog.text


def test_a_stop_whose_checkpoint_fails_is_a_failure(job):
    plan = {"at": "save_checkpoint", "raises": "OSError", "text": "quota"}

    assert cancel(job, plan=plan, checkpoint_every=0) == 1
    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("train-step", False)
    assert "quota" in failed["error"]
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]


WITHOUT_THREADS = str(SUPPORT / "thread_limit.py")


@pytest.mark.parametrize("place", ["the start", "setup"])
def test_a_run_that_cannot_start_a_thread_reports_it(job, place):
    """The terminal message is sent, and the event log gets its last line."""
    plan = {} if place == "the start" else {"at": place, "stack_bytes": NO_ROOM_BYTES}
    job.write(plan=plan, uploads={f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "metrics")})
    process = job.fork("run", job.spec, program=WITHOUT_THREADS if place == "the start" else "genlight.adapter.cli")
    assert process.wait(120) == 1, job.output()

    failed = job.terminal_event()
    assert "ulimit -u" in failed["error"]
    assert [posted["error"] for posted in job.server.posted("/terminal")] == [failed["error"]]
    assert "Traceback" not in job.output()


def test_a_run_saves_checkpoints_and_completes_if_no_more_threads_can_start(job):
    """The limit applies from the first step; threads that started before it suffice."""
    job.write(plan={"at": "train_step:1", "stack_bytes": NO_ROOM_BYTES, "accumulates": 1}, resume_from_latest=True)
    process = job.fork("run", job.spec)
    assert process.wait(120) == 0, job.output()

    assert job.terminal_event()["event"] == "completed"
    assert [posted["status"] for posted in job.server.posted("/terminal")] == ["completed"]
    checkpoints = job.out / "checkpoints"
    assert {path.stem for path in checkpoints.glob("*.json")} == {"step-00000002", "step-00000004", "final"}
    record, warnings = newest_valid(checkpoints)
    assert (record.step, warnings) == (5, [])


def test_no_character_of_an_error_controls_the_terminal(job):
    """The message of an exception may contain a row of untrusted data."""
    text = "\x1b]0;owned\x07 gnp\x9b31m"
    job.write(plan={"at": "train_step:2", "raises": "ValueError", "text": text})
    process = job.fork_run()

    assert process.wait(120) == 1
    assert "ValueError: \\x1b]0;owned\\x07 gnp\\x9b31m" in job.output()
    assert not {"\x1b", "\x07", "\x9b"} & set(job.output())
    assert text in job.terminal_event()["error"], "the log keeps the original text"
