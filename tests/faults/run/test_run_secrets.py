"""A run leaves no secret in a log, event, checkpoint, sample, queue, stack dump, message or repr."""

import logging
import signal
from pathlib import Path

import pytest

CANARIES = {
    "environment": "canary-token-of-the-environment",
    "spec": "canary-token-of-the-spec",
    "user info": "canary-password",
    "query": "canary-signature",
    "variable": "canary-of-another-variable",
    "hyperparameter URL": "canary-of-a-hyperparameter",
}


def url_with_secrets(job, path):
    address = job.server.url.removeprefix("http://")
    return f"http://user:{CANARIES['user info']}@{address}{path}?signature={CANARIES['query']}"


def leaks(job, *texts, apart_from=()):
    """Return each file of the run, or text, that contains a canary, with its name."""
    found = []
    blobs = {str(path): path.read_bytes() for path in job.out.rglob("*") if path.is_file() and not path.is_symlink()}
    blobs |= {f"text {number}": text.encode() for number, text in enumerate(texts)}
    for where, blob in blobs.items():
        found += [(where, name) for name, canary in CANARIES.items() if canary.encode() in blob]
    return [leak for leak in found if leak[1] not in apart_from]


def secret_job(job, *, plan=None, **fields):
    """Write a job that gets a secret in every possible way."""
    (job.folder / "x.parquet").touch()
    urls = {kind: url_with_secrets(job, f"/{kind}") for kind in ("metrics", "checkpoint", "sample", "terminal")}
    secret_fields = {
        "capability_token": CANARIES["spec"],
        "owner": "me",
        "sample_every": 2,
        "uploads": {f"{kind}_url": url for kind, url in urls.items()},
        "mock_batches": ...,
        "dataset": {"batch_size": 4},
        "inputs": {"dataset_parquet_urls": [url_with_secrets(job, "/files/x.parquet")]},
        **fields,
    }
    job.write(plan=plan, **secret_fields)


ENDINGS = {
    "completed": ({}, {}, 0),
    "exception in setup": ({"at": "setup", "raises": "OSError", "text": "{tokens} for {url}"}, {}, 1),
    "input refused": ({}, {"status": {"/files/x.parquet": 403}}, 1),
    "input missing": ({}, {"status": {"/files/x.parquet": 404}}, 1),
    "upload refused": ({}, {"status": {"/checkpoint": 401}}, 1),
    "terminal refused": ({}, {"status": {"/terminal": 422}}, 1),
}


@pytest.mark.parametrize(
    ("ending", "token_of"), [*((ending, "environment") for ending in ENDINGS), ("exception in setup", "spec")]
)
def test_no_byte_of_a_run_holds_a_secret(job, caplog, capfd, ending, token_of):
    """Secrets in the output of a step are tested in ``security/test_secrets_of_a_run.py``."""
    caplog.set_level(logging.DEBUG)
    plan, answers, code = ENDINGS[ending]
    job.server.status.update(answers.get("status", {}))
    job.environ = {"TRAINER_UPLOAD_DEADLINE_SECONDS": "60", "MY_API_KEY": CANARIES["variable"]}
    if token_of == "environment":
        job.environ["TRAINER_CAPABILITY_TOKEN"] = CANARIES["environment"]
    if "text" in plan:
        tokens = " ".join(CANARIES[name] for name in (token_of, "variable"))
        plan = {**plan, "text": plan["text"].format(url=url_with_secrets(job, "/x"), tokens=tokens)}
    secret_job(job, plan=plan)

    assert job.run() == code

    written = capfd.readouterr()
    assert job.terminal_event()
    posts = str(job.server.posts)
    assert leaks(job, caplog.text, written.out, written.err, posts) == []
    authorised = {headers.get("Authorization") for path, headers in job.server.headers if path.startswith("/metrics")}
    assert authorised <= {f"Bearer {CANARIES[token_of]}"}


@pytest.mark.slow
def test_neither_process_title_nor_stack_dump_nor_output_holds_a_secret(job):
    """The run hangs while it holds every secret."""
    callbacks = [{"class_path": "genlight.callbacks.watch_hangs.WatchHangs", "init_args": {"floor_s": 0.5}}]
    secret_job(
        job,
        plan={"at": "train_step:2", "holds": 60.0},
        lightning={"accelerator": "cpu", "callbacks": callbacks},
    )
    job.environ = {"TRAINER_CAPABILITY_TOKEN": CANARIES["environment"], "TRAINER_UPLOAD_DEADLINE_SECONDS": "60"}
    process = job.start()
    job.wait_until(lambda: list((job.out / "hangs").glob("*.txt")), process)
    title = Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/comm").read_text()
    process.send_signal(signal.SIGTERM)
    job.go()

    assert process.wait(120) == 75
    assert leaks(job, title, job.output()) == []


def test_no_character_of_an_error_controls_the_terminal(job):
    """The message of an exception may contain a row of untrusted data."""
    text = "\x1b]0;owned\x07 gnp\x9b31m"
    job.write(plan={"at": "train_step:2", "raises": "ValueError", "text": text})
    process = job.fork_run()

    assert process.wait(120) == 1
    output = job.output()
    assert "ValueError: \\x1b]0;owned\\x07 gnp\\x9b31m" in output
    assert not {"\x1b", "\x07", "\x9b"} & set(output)
    assert text in job.terminal_event()["error"], "the log keeps the original text"
