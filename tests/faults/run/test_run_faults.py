"""Every kind of failure of a run: its category, whether a restart helps, the exit code, and one terminal event.

The event log ends with the one terminal event of the attempt, and the terminal message holds the same text.
"""

import errno
import os
from dataclasses import dataclass, field

import pytest

from genlight.callbacks.checkpoint.selection import newest_valid
from genlight.reporters.uploads import Uploader
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


def fetched(path, **options):
    urls = {"dataset_parquet_urls": [f"SERVER{path}"]}
    return {"mock_batches": ..., "dataset": {"batch_size": 4}, "inputs": urls, **options}


def raises(name, at, text="injected", **more):
    return {"at": at, "raises": name, "text": text, **more}


def startup(words, *, environ=None, **fields):
    return Fault("startup", words, 2, fields=fields, environ=environ or {})


def lightning(words, **arguments):
    return startup(words, lightning={"accelerator": "cpu", **arguments})


def callback(words, class_path, **arguments):
    return lightning(words, callbacks=[{"class_path": class_path, "init_args": arguments}])


def trainer(words, name, **fields):
    return startup(words, trainer=name if ":" in name else f"fault_trainer:{name}", **fields)


CALLBACKS = "lightning.pytorch.callbacks"
MONITORS = {"lightning.pytorch.callbacks": {}, "genlight.callbacks": {"patience": 5}}
WAITING = [{"class_path": f"fault_trainer.{name}"} for name in ("First", "Second")]
RESUMES = {"after": {"max_steps": 3}, "fields": {"resume_from_latest": True}, "allow_changed": True, "resumable": True}
FAULTS = {
    # settings
    "no max_steps": startup("startup.invalid_job_spec", max_steps=...),
    "max_steps of a wrong type": startup("`max_steps`", max_steps="many"),
    "several faults": startup("2 errors", max_steps=0, metric_every=-1),
    "another version": startup("trainer_api_version", trainer_api_version="v2"),
    "no trainer": startup("startup.missing_trainer_import", trainer=...),
    "no token": startup("startup.missing_capability_token", environ={"TRAINER_ORCHESTRATED": "1"}),
    "bad timeout": startup("startup.invalid_timeout", environ={"TRAINER_MAX_RUNTIME_SECONDS": "soon"}),
    "no data": startup("names no data", mock_batches=...),
    "unknown kind of upload target": startup(
        "Invalid upload target 'nothing://x'. Protocol not", uploads={"targets": ["nothing://x"]}
    ),
    "unknown Lightning argument": lightning("no_such", no_such=1),
    "value of a Lightning argument": lightning("cannot be used: `lightning.precision`: Expected ", precision="bf17"),
    "two faults of Lightning arguments": lightning(
        "`lightning.logger`: Problem with ", precision="bf17", logger="no.Such"
    ),
    "value that Lightning refuses in the fit": lightning(
        "cannot be used: `val_check_interval` (9) must ", val_check_interval=9
    ),
    "an accelerator that is not there": lightning("startup.invalid_job_spec", accelerator="tpu"),
    "callback that no trainer class can have": callback(
        "GradientAccumulationScheduler: the trainer class",
        f"{CALLBACKS}.GradientAccumulationScheduler",
        scheduling={"0": 2},
    ),
    "argument that a callback refuses": callback(
        "cannot be used: `mode` can be min, max, got y", f"{CALLBACKS}.EarlyStopping", monitor="train/loss", mode="y"
    ),
    "hook that reads what nobody writes": callback(
        "Reads reads 'nobody_writes', which no hook writes", "fault_trainer.Reads"
    ),
    "hooks that wait for each other": lightning(
        "hooks wait for each other: First, Second, First; each reads what the next one writes", callbacks=WAITING
    ),
    # trainer classes
    "trainer module missing": trainer("no_such_module", "no_such_module:T"),
    "trainer attribute missing": trainer("Missing", "Missing"),
    "trainer import fails": trainer("ZeroDivisionError", "breaks_on_import:T"),
    "trainer import exits": trainer("SystemExit", "exits_on_import:T"),
    "trainer is a function": trainer("function", "function"),
    "trainer lacks hooks": trainer("configure", "LacksHooks"),
    "no hook for a setting": trainer(
        "LacksEvaluate has no `evaluate(state, ctx)`", "LacksEvaluate", validate={"every_n_steps": 1}
    ),
    "constructor raises": Fault("model-load", "'path'", fields={"trainer": "fault_trainer:BreaksInConstructor"}),
    "constructor exits": Fault("model-load", "SystemExit: 3", fields={"trainer": "fault_trainer:ExitsInConstructor"}),
    # inputs
    "file missing": Fault("input", "missing.parquet", fields=data("missing.parquet")),
    "file truncated": Fault("input", "truncated.parquet", fields=data("truncated.parquet")),
    "file corrupt": Fault("input", "corrupt.parquet", fields=data("corrupt.parquet")),
    "column missing": Fault("input", "y", fields=data("x.parquet", columns=["y"])),
    "no batches": Fault("input", "0 mock batches", fields={"mock_batches": []}),
    "401 of an input": Fault("auth", "401", fields=fetched("/refused/401")),
    "403 of an input": Fault("auth", "403", fields=fetched("/refused/403")),
    "404 of an input": Fault("input", "404", fields=fetched("/refused/404")),
    "wrong digest of an input": Fault("input", "sha256", fields=fetched("/files/x.parquet#sha256=" + "0" * 64)),
    "nobody serves the input": Fault(
        "input",
        "could not be fetched",
        fields={**fetched(""), "inputs": {"dataset_parquet_urls": ["http://127.0.0.1:9/x"]}},
    ),
    "named checkpoint missing": Fault("input", "old.json", fields={"resume_checkpoint_path": "old.json"}),
    "named checkpoint broken": Fault("input", "broken", fields={"resume_checkpoint_path": "broken.json"}),
    # model-load
    "setup raises": Fault("model-load", "RuntimeError: no weights", plan=raises("RuntimeError", "setup", "no weights")),
    "setup exits": Fault("model-load", "SystemExit: 4", plan=raises("SystemExit", "setup", "4")),
    "configure raises": Fault("model-load", "KeyError", plan=raises("KeyError", "configure", "rank")),
    "load_state_dict raises": Fault(
        "model-load", "size mismatch", plan=raises("RuntimeError", "load_state_dict", "size mismatch"), **RESUMES
    ),
    "load_checkpoint raises": Fault(
        "model-load", "no adapter", plan=raises("FileNotFoundError", "load_checkpoint", "no adapter"), **RESUMES
    ),
    # train-step
    "prepare_batch raises": Fault(
        "train-step", "bad row", step=1, plan=raises("ValueError", "prepare_batch:1", "bad row")
    ),
    "train_step raises": Fault(
        "train-step", "nan", resumable=True, step=4, plan=raises("ValueError", "train_step:4", "nan")
    ),
    "out of device memory": Fault(
        "train-step",
        "OutOfMemoryError: CUDA out of memory",
        resumable=True,
        step=3,
        plan=raises("OutOfMemoryError", "train_step:3", "CUDA out of memory. Tried to allocate 2 GiB"),
    ),
    "step exits": Fault("train-step", "SystemExit: 0", step=2, plan=raises("SystemExit", "train_step:2", "0")),
    "step raises StopIteration": Fault(
        "train-step", "StopIteration", step=2, plan=raises("StopIteration", "train_step:2")
    ),
    "prepare_batch raises StopIteration": Fault(
        "train-step", "StopIteration", step=1, plan=raises("StopIteration", "prepare_batch:1")
    ),
    "step raises GeneratorExit": Fault(
        "train-step", "GeneratorExit", step=2, plan=raises("GeneratorExit", "train_step:2")
    ),
    "step recurses without end": Fault(
        "train-step", "RecursionError", step=1, plan=raises("RecursionError", "train_step:1")
    ),
    "step returns a dict": Fault("train-step", "return StepResult", step=1, plan={"returns": "dict"}),
    "step returns nothing": Fault("train-step", "StepResult", step=1, plan={"returns": "none"}),
    "metric is a text": Fault("train-step", "loss", plan={"returns": "text"}),
    "interrupted in a step": Fault(
        "canceled", "canceled", 75, resumable=True, step=4, plan=raises("KeyboardInterrupt", "train_step:4", "")
    ),
    **{
        f"monitor that nobody logs, of {package}": Fault(
            "train-step",
            "val/acc",
            resumable=True,
            fields={
                "metric_every": 4,
                "lightning": {
                    "accelerator": "cpu",
                    "callbacks": [
                        {"class_path": f"{package}.EarlyStopping", "init_args": {"monitor": "val/acc", **arguments}}
                    ],
                },
            },
            is_quiet=True,
        )
        for package, arguments in MONITORS.items()
    },
    "state_dict raises": Fault("train-step", "gone", plan=raises("OSError", "state_dict:2", "gone")),
    "state_dict of a list": Fault("train-step", "state_dict returned a list", plan={"saves": "list"}),
    "state that cannot be stored": Fault("train-step", 'state["generator"]["cache"][0]', plan={"saves": "generator"}),
    "save_checkpoint raises": Fault("train-step", "quota", plan=raises("OSError", "save_checkpoint:2", "quota")),
    "second save_checkpoint raises": Fault(
        "train-step", "quota", resumable=True, plan=raises("OSError", "save_checkpoint:4", "quota")
    ),
    "save_checkpoint of a list": Fault("train-step", "save_checkpoint returned a list", plan={"hook_returns": "list"}),
    "final artifact fails": Fault("train-step", "quota", resumable=True, plan=raises("OSError", "save_final", "quota")),
    "sample raises": Fault(
        "train-step",
        "no decoder",
        resumable=True,
        fields={"sample_every": 3, "sample_prompts": ["a cat"]},
        plan=raises("RuntimeError", "generate_sample:3", "no decoder", samples=True),
    ),
    "sample of a list": Fault(
        "train-step",
        "generate_sample returned a list",
        fields={"sample_every": 1, "sample_prompts": ["a cat"]},
        plan={"samples": "list"},
    ),
    # uploads
    "uploads refused with 403": Fault(
        "auth", "403", resumable=True, fields={"uploads": {"checkpoint_url": "SERVER/refused/403"}}
    ),
    "uploads refused with 401": Fault(
        "auth", "401", resumable=True, fields={"uploads": {"checkpoint_url": "SERVER/refused/401"}}
    ),
    "uploads refused with 400": Fault(
        "upload", "400", resumable=True, fields={"uploads": {"checkpoint_url": "SERVER/refused/400"}}
    ),
    "sample upload refused": Fault(
        "upload",
        "sample of step 3",
        resumable=True,
        fields={"uploads": {"sample_url": "SERVER/refused/422"}, "sample_every": 3},
    ),
    "upload endpoint down": Fault(
        "upload",
        "not delivered",
        resumable=True,
        fields={"uploads": {"checkpoint_url": "SERVER/down"}},
        environ={"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.3"},
    ),
    # stops before anything
    "cancelled before it started": Fault("canceled", "canceled", 75, True, 0, environ={"TRAINER_CANCELLED": "yes"}),
    "time is over before it started": Fault(
        "timeout", "timeout", 75, True, 0, environ={"TRAINER_MAX_RUNTIME_SECONDS": "0.001"}
    ),
}


def prepare(job):
    """Make the files and answers that the faults refer to."""
    (job.folder / "breaks_on_import.py").write_text("1 / 0\n")
    (job.folder / "exits_on_import.py").write_text("raise SystemExit(5)\n")
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
    """The event log is still written; ``test_full_disk.py`` and ``test_single_errors.py`` have the other folders."""
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


REMOVES = """
import os, shutil
from fault_trainer import Faulty

class Removes(Faulty):
    def state_dict(self, state):
        how, path = os.environ["REMOVES"].split(":")
        if os.path.exists(path):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            if how == "replace":
                open(path, "w").close()
        return super().state_dict(state)
"""


@pytest.mark.parametrize(
    ("how", "name"), [("remove", "metrics/events.jsonl"), ("replace", "metrics/events.jsonl"), ("remove", "metrics")]
)
def test_a_run_whose_log_is_removed_does_not_complete(job, monkeypatch, caplog, how, name):
    (job.folder / "removes.py").write_text(REMOVES)
    monkeypatch.syspath_prepend(job.folder)
    monkeypatch.setenv("REMOVES", f"{how}:{job.out / name}")
    job.write(trainer="removes:Removes", checkpoint_every=0)
    assert job.run() == 1
    assert "was removed or replaced while the run wrote it" in caplog.text
    assert [posted["status"] for posted in job.server.posted("/terminal")] == ["failed"]

    monkeypatch.setenv("REMOVES", "remove:/nonexistent")
    assert job.run("resume_from_latest=true") == 0  # its final checkpoint was saved
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
    job.write(plan=raises("ValueError", "train_step:3", "bad row"))

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


def test_uploads_and_the_last_message_share_a_deadline_and_the_message_is_always_tried(job, monkeypatch):
    waits = []

    def record(name):
        wait = getattr(Uploader, name)

        def recorded(uploader, *args, deadline_s=None, **kwargs):
            waits.append((name, deadline_s))
            return wait(uploader, *args, deadline_s=deadline_s, **kwargs)

        monkeypatch.setattr(Uploader, name, recorded)

    record("settle")
    record("deliver_terminal")
    monkeypatch.setattr("genlight.adapter.run.session.LAST_TRY_S", 0.2)
    job.server.status["/checkpoint"] = 503
    job.environ = {"TRAINER_UPLOAD_DEADLINE_SECONDS": "0.5"}
    urls = {kind: f"{job.server.url}/{kind.removesuffix('_url')}" for kind in ("checkpoint_url", "terminal_url")}
    job.write(uploads=urls)

    assert job.run() == 1
    assert [name for name, _ in waits] == ["settle", "deliver_terminal"]
    assert 0.0 < waits[0][1] <= 0.5
    assert waits[1][1] == 0.2
    assert job.terminal_event()["category"] == "upload"


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
    plan = raises("OSError", "save_checkpoint", "quota")

    assert cancel(job, plan=plan, checkpoint_every=0) == 1
    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("train-step", False)
    assert "quota" in failed["error"]
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]


@pytest.mark.parametrize("spec", ['{"max_steps": ', "[1]", "null", '{"max_steps": 1e400}', "{}", None])
def test_every_invalid_spec_leaves_one_failed_event_and_one_message(job, spec):
    job.environ = {"TRAINER_UPLOAD_TERMINAL_URL": f"{job.server.url}/terminal"}
    if spec is None:
        job.spec.unlink()
    else:
        job.spec.write_text(spec)

    assert job.run() == 2
    failed = job.terminal_event()
    assert failed["error"].startswith("startup:startup.")
    assert [body["error"] for body in job.server.posted("/terminal")] == [failed["error"]]


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
