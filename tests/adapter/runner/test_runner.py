"""The runner as a job script starts it: a process that calls one function and reports the outcome."""

import grp
import importlib
import json
import os
import pickle
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genlight.adapter.runner.transport import (
    FunctionFailedError,
    callbacks_for_runner,
    failure_file,
    prepare_output,
    read_pickle,
    read_result,
    write_pickle,
)

TASKS = """
import json, os, signal, sys, time
from pathlib import Path
from genlight.adapter import JobContext

def add(a, b=0):
    return a + b

def place(factor, *, job):
    return [factor * job.rank, list(job.hostnames), str(job.output_dir)]

def fail(secret):
    raise ValueError("no such thing")

def fail_with_a_secret():
    raise ValueError("bad token " + os.environ["HF_TOKEN"])

def remove_folder(path):
    os.rmdir(path)
    return "done"

def leave(code):
    sys.exit(code)

def wait(started):
    Path(started).write_text("")
    try:
        time.sleep(600)
    except Exception:
        pass

def ignores_exceptions(started):
    try:
        wait(started)
    finally:
        Path(started + ".cleaned").write_text("")

def a_set():
    return {1}

def endless():
    return float("inf")

class Group:
    @staticmethod
    def static():
        return "static"

value = 3
"""

CALLBACKS = """
import dataclasses, json, os, sys
from pathlib import Path

class Record:
    requires_runner_transport = True

    def __init__(self, path):
        self.path = path

    def note(self, event, context):
        fields = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
        fields["rank"] = context.job_context.rank if context.job_context else None
        fields["result_there"] = Path("result").exists()
        with open(self.path, "a") as file:
            file.write(json.dumps({"event": event, **fields}, default=str) + "\\n")

    def on_begin_run_job_ctx(self, context):
        self.note("begin", context)

    def on_end_run_job_ctx(self, context):
        self.note("end", context)

    def on_completed_ctx(self, context):
        self.note("completed", context)

class Fails:
    requires_runner_transport = True

    def on_begin_run_job_ctx(self, context):
        raise RuntimeError("callback is broken")

    def on_end_run_job_ctx(self, context):
        sys.exit(0)

class StaysHere(Fails):
    requires_runner_transport = False
"""


class Submitter:
    """Writes the files of a submitter and starts the runner."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "tasks.py").write_text(TASKS)
        (folder / "hooks.py").write_text(CALLBACKS)
        (folder / "bad_module.py").write_text("raise ImportError('library is missing')\n")
        (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
        self.result = folder / "result"

    def start(
        self,
        module,
        function,
        *options,
        args=None,
        kwargs=None,
        callbacks=(("Record", "records"),),
        runner="genlight.adapter.runner",
        **environ,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(self.folder)
            hooks = importlib.import_module("hooks")
            write_pickle(self.folder / "callbacks", [getattr(hooks, name)(*args) for name, *args in callbacks])
            del sys.modules["hooks"]
        command = [sys.executable, "-m", runner, "--module", module, "--function", function]
        command += ["--output-file", "result", "--callbacks-file", "callbacks", *options]
        for name, value in (("args", args), ("kwargs", kwargs)):
            if value is not None:
                write_pickle(self.folder / name, value)
                command += [f"--{name}-file", name]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=dict(os.environ) | environ, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def records(self):
        path = self.folder / "records"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def submitter(tmp_path):
    return Submitter(tmp_path)


def test_a_function_is_called_and_its_result_and_end_are_reported_in_order(submitter):
    code, errors = submitter.run(
        "tasks", "add", "--pre-submission-id", "s1", "--stdout-path", "o.txt", args=(1,), kwargs={"b": 41}
    )

    assert (code, errors) == (0, "")
    assert pickle.loads(submitter.result.read_bytes()) == 42
    begin, end, completed = submitter.records()
    assert [each["event"] for each in (begin, end, completed)] == ["begin", "end", "completed"]
    assert [each["result_there"] for each in (begin, end, completed)] == [False, True, True]
    assert (begin["module"], begin["function"], begin["pre_submission_id"]) == ("tasks", "add", "s1")
    assert begin["stdout_path"] == "o.txt"
    assert (end["status"], end["error_type"], end["exit_code"], end["output_file"]) == ("success", None, 0, "result")
    assert end["duration"] >= 0
    assert (completed["emitted_by"], completed["status"], completed["pre_submission_id"]) == ("runner", "success", "s1")


def test_the_context_is_injected_and_only_rank_0_writes_the_result(submitter):
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n9"}
    for rank in ("1", "0"):
        code, errors = submitter.run(
            "tasks", "place", "--result", "json", "--job-dir", "/scratch/j", args=(10,), SLURM_PROCID=rank, **task
        )
        assert (code, errors) == (0, "")
        assert submitter.result.exists() is (rank == "0")
    assert json.loads(submitter.result.read_text()) == [0, ["n9"], "/scratch/j"]
    assert {each["rank"] for each in submitter.records()} == {0, 1}


def test_a_function_that_fails_is_reported_with_its_traceback_and_no_argument_is_logged(submitter):
    submitter.result.write_text("of an earlier attempt")
    code, errors = submitter.run("tasks", "fail", "--loglevel", "debug", args=("s3cret-argument",))

    assert code == 1
    assert not submitter.result.exists()
    assert "ValueError: no such thing" in errors
    assert "s3cret" not in errors
    _, end, completed = submitter.records()
    assert (end["status"], end["error_type"], end["error_message"]) == ("failure", "ValueError", "no such thing")
    assert 'raise ValueError("no such thing")' in end["traceback"]
    assert end["output_file"] is None
    assert (completed["status"], completed["error_type"], completed["exit_code"]) == ("failure", "ValueError", 1)
    assert "s3cret" not in (submitter.folder / "records").read_text()


ENDS = {
    "exit 0": ("leave", {"args": (0,)}, 0, None, ""),
    "exit None": ("leave", {"args": (None,)}, 0, None, ""),
    "exit 3": ("leave", {"args": (3,)}, 3, "SystemExit", "3"),
    "exit 256": ("leave", {"args": (256,)}, 1, "SystemExit", "256"),
    "exit with a text": ("leave", {"args": ("a text",)}, 1, "SystemExit", "a text"),
    "function of a class": ("Group.static", {}, 0, None, ""),
    "failing import": ("bad_module:f", {}, 1, "ImportError", "library is missing"),
    "import that exits": ("exits:f", {}, 1, "SystemExit", "0"),
    "no module": ("no_such_module:f", {}, 1, "ModuleNotFoundError", "no_such_module"),
    "no function": ("missing", {}, 1, "AttributeError", "missing"),
    "no callable": ("value", {}, 1, "TypeError", "tasks:value is not a function"),
    "bad context": ("add", {"SLURM_NODELIST": "n["}, 1, "ValueError", "Invalid hostlist 'n['"),
}


@pytest.mark.parametrize(("function", "options", "code", "kind", "words"), ENDS.values(), ids=ENDS)
def test_every_end_is_reported_and_its_result_or_failure_can_be_read(submitter, function, options, code, kind, words):
    module, _, name = function.rpartition(":")
    ended, errors = submitter.run(module or "tasks", name, **options)

    assert ended == code
    assert words in errors
    assert [each["event"] for each in submitter.records()] == ["begin", "end", "completed"]
    end = submitter.records()[1]
    assert (end["status"], end["error_type"]) == ("failure" if code else "success", kind)
    if kind is None:
        assert read_result(submitter.result) in (None, "static")
        return
    assert words in end["error_message"]
    with pytest.raises(FunctionFailedError) as failure:
        read_result(submitter.result)
    assert failure.value.error_type == kind
    assert words in failure.value.error_message


def assert_terminated(submitter):
    _, end, completed = submitter.records()
    assert (end["status"], end["error_type"], end["exit_code"]) == ("failure", "Terminated", 143)
    assert "SIGTERM" in end["error_message"]
    assert completed["exit_code"] == 143


def test_sigterm_ends_the_function_and_is_reported(submitter):
    process = submitter.start("tasks", "ignores_exceptions", args=("started",))
    while not (submitter.folder / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)

    assert process.returncode == 143
    assert (submitter.folder / "started.cleaned").exists()
    assert_terminated(submitter)


SIGTERM_IN_AN_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "genlight.adapter.runner.transport":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("runner", ["genlight.adapter.runner", "slurm.runner"])
def test_sigterm_during_the_imports_of_the_runner_is_reported(submitter, runner):
    (submitter.folder / "sitecustomize.py").write_text(SIGTERM_IN_AN_IMPORT)
    path = os.pathsep.join([str(submitter.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert submitter.run("tasks", "add", args=(1,), runner=runner, PYTHONPATH=path)[0] == 143

    assert not submitter.result.exists()
    assert_terminated(submitter)


def test_the_begin_context_has_the_redacted_environment_and_the_argument_files(submitter):
    task = {"SLURM_JOB_ID": "7", "HF_TOKEN": "hf_0123456789abcdef", "PLAIN": "yes"}
    assert submitter.run("bad_module", "f", args=(1,), kwargs={}, **task)[0] == 1
    begin, end, _ = submitter.records()

    assert (begin["job_id"], begin["args_file"], begin["kwargs_file"]) == ("7", "args", "kwargs")
    assert begin["environment_snapshot"]["PLAIN"] == "yes"
    assert begin["environment_snapshot"]["HF_TOKEN"] != task["HF_TOKEN"]
    assert begin["start_time"] == end["start_time"] > 0
    assert task["HF_TOKEN"] not in (submitter.folder / "records").read_text()


def test_a_failure_is_stored_without_secrets_and_removed_by_the_next_attempt(submitter):
    token = "hf_0123456789abcdef"
    assert submitter.run("tasks", "fail_with_a_secret", HF_TOKEN=token)[0] == 1
    kept = failure_file(submitter.result)
    assert kept.stat().st_mode & 0o777 == 0o600
    facts = json.loads(kept.read_text())
    assert (facts["error_type"], facts["exit_code"]) == ("ValueError", 1)
    assert "fail_with_a_secret" in facts["traceback"]
    assert token not in kept.read_text()

    assert submitter.run("tasks", "add", args=(1,))[0] == 0
    assert not kept.exists()
    assert read_result(submitter.result) == 1


def test_each_rank_stores_its_failure_and_the_client_reads_the_first(submitter):
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n9"}
    assert submitter.run("tasks", "fail", args=(1,), SLURM_PROCID="1", **task)[0] == 1
    assert submitter.run("tasks", "add", args=(1,), SLURM_PROCID="0", **task)[0] == 0
    with pytest.raises(FunctionFailedError) as failure:
        read_result(submitter.result)
    assert (failure.value.error_type, failure.value.error_message) == ("ValueError", "no such thing")

    prepare_output(submitter.result)  # now one rank instead of two
    with pytest.raises(FileNotFoundError):
        read_result(submitter.result)


def break_folder(path, how):
    if how == "is_a_file":
        path.parent.write_text("")
    elif how == "result_is_a_folder":
        path.mkdir(parents=True)
    elif how == "read_only":
        path.parent.mkdir()
        path.parent.chmod(0o500)


@pytest.mark.parametrize("how", ["is_a_file", "result_is_a_folder", "read_only"])
def test_an_unusable_place_for_the_result_is_refused_before_the_call(submitter, how):
    if how == "read_only" and not os.geteuid():
        pytest.skip("root writes everywhere")
    break_folder(submitter.folder / "no" / "result", how)
    assert submitter.run("tasks", "wait", "--output-file", "no/result", args=("started",))[0] == 1
    assert not (submitter.folder / "started").exists()
    assert [each["event"] for each in submitter.records()] == ["begin", "end", "completed"]


def test_a_missing_folder_for_the_result_is_made_before_and_after_the_call(submitter):
    for function, args, result in (("add", (1,), 1), ("remove_folder", ("no/such",), "done")):
        assert submitter.run("tasks", function, "--output-file", "no/such/result", args=args) == (0, "")
        assert read_result(submitter.folder / "no/such/result") == result
        (submitter.folder / "no/such/result").unlink()
    assert (submitter.folder / "no/such").stat().st_mode & 0o777 == 0o700


def test_a_failing_callback_is_logged_and_hides_nothing(submitter):
    callbacks = (("Fails",), ("Record", "records"), ("StaysHere",))
    code, errors = submitter.run("tasks", "fail", args=(1,), callbacks=callbacks)

    assert code == 1
    assert "Fails.on_begin_run_job_ctx failed" in errors
    assert "callback is broken" in errors
    assert "Fails.on_end_run_job_ctx failed" in errors
    assert "StaysHere" not in errors
    assert [each["event"] for each in submitter.records()] == ["begin", "end", "completed"]


@pytest.mark.parametrize(
    ("function", "form", "words"),
    [("a_set", "json", "choose --result pickle"), ("endless", "json", "JSON compliant"), ("endless", "pickle", None)],
)
def test_a_result_that_cannot_be_written_is_a_failure(submitter, function, form, words):
    code, errors = submitter.run("tasks", function, "--result", form)

    assert code == (0 if words is None else 1)
    assert submitter.result.exists() is (words is None)
    assert words is None or words in errors
    if words is not None:  # the computed value is not lost
        assert read_result(submitter.folder / "result.pickle") in ({1}, float("inf"))


def test_wrong_usage_is_explained_and_ends_with_2(submitter):
    done = subprocess.run(
        [sys.executable, "-m", "genlight.adapter.runner", "--module", "m"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the following arguments are required: --function, --output-file, --callbacks-file" in done.stderr


class Runs:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("loaded"),)


def make_unsafe(path, how):
    if how == "link":
        path.rename(path.with_name("target"))
        path.symlink_to("target")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how in ("owner", "group"):
        os.chown(path, *((12345, -1) if how == "owner" else (-1, 12345)))
        path.chmod(0o620)
    elif how == "world":
        path.chmod(0o602)
    elif how == "text":
        path.write_text("no base64!")


@pytest.mark.parametrize("how", ["link", "pipe", "group", "world", "owner", "text"])
def test_no_pickle_is_loaded_from_a_file_that_another_user_could_have_written(tmp_path, monkeypatch, how):
    if how in ("owner", "group") and os.geteuid():
        pytest.skip("only root gives files away")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "args"
    write_pickle(path, Runs())
    make_unsafe(path, how)

    with pytest.raises((OSError, ValueError)):
        read_pickle(path)
    assert not (tmp_path / "loaded").exists()


def test_files_of_a_submitter_are_private_and_readable(tmp_path):
    path = tmp_path / "args"
    write_pickle(path, ((1, "two"), {"three": 3.0}))
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_pickle(path) == ((1, "two"), {"three": 3.0})
    path.write_bytes(b"\n".join(path.read_bytes()[i : i + 8] for i in range(0, 999, 8)))  # like base64 of the shell
    assert read_pickle(path) == ((1, "two"), {"three": 3.0})


def test_a_file_of_the_user_s_own_group_and_a_pickle_that_is_no_base64_are_read(tmp_path):
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getegid())
    if (group.gr_name, group.gr_gid) != (user.pw_name, user.pw_gid):
        pytest.skip("this user has no private group")
    path = tmp_path / "args"
    path.write_bytes(pickle.dumps(("hello", 2)))
    os.chown(path, -1, group.gr_gid)
    path.chmod(0o664)  # the permissions under a umask of 002

    assert read_pickle(path) == ("hello", 2)


def test_the_command_of_older_scripts_is_this_runner_unless_another_package_has_it(submitter):
    write_pickle(submitter.folder / "args", (1,))
    write_pickle(submitter.folder / "callbacks", [])
    command = [sys.executable, "-m", "slurm.runner", "--module", "tasks", "--function", "add", "--args-file", "args"]
    command += ["--callbacks-file", "callbacks", "--output-file", "result", "--result", "json"]

    assert subprocess.run(command, cwd=submitter.folder, check=False).returncode == 0
    assert json.loads(submitter.result.read_text()) == 1

    (submitter.folder / "slurm").mkdir()
    (submitter.folder / "slurm" / "__init__.py").write_text("")
    (submitter.folder / "slurm" / "runner.py").write_text("import sys; sys.exit(17)")
    assert subprocess.run(command, cwd=submitter.folder, check=False).returncode == 17


def test_only_callbacks_that_request_it_are_transported():
    class Here:
        pass

    class There:
        requires_runner_transport = True

    class Answers:
        def __init__(self, answer):
            self.answer = answer

        def requires_runner_transport(self):
            return self.answer

    there, requests = There(), Answers(True)
    assert callbacks_for_runner([Here(), there, requests, Answers(False)]) == [there, requests]
