"""``genlight slurm``, as far as it goes without a cluster; ``tests/slurm`` has one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from genlight.adapter.cli import main
from genlight.adapter.runner.transport import read_result, write_pickle


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"run_id": "a run", "trainer": "m:T", "max_steps": 3, "mock_batches": [1]}))
    return path


def rendered(capsys, *words):
    code = main(["slurm", "render", "job.json", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def lines(capsys, *words):
    code, script, errors = rendered(capsys, *words)
    assert (code, errors) == (0, "")
    return script.splitlines()


def test_options_become_directives(job, capsys):
    words = ["--nodes=2", "--gpus-per-node=h100:8", "--cpus-per-task=4", "--grace=90"]
    said = lines(capsys, *words, "--sbatch=exclusive", "--sbatch=mail-type=END", "--sbatch=time=1-00:00:00")
    assert said[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH ") for line in said if line.startswith("#SBATCH")} == {
        "--job-name=a-run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--cpus-per-task=4",
        "--time=1-00:00:00", "--signal=TERM@90",
        f"--output={job.parent}/a-run-%j.out", "--open-mode=append", "--requeue", "--exclusive", "--mail-type=END",
    }  # fmt: skip
    assert any("--cpus-per-task=4 " in line for line in said if line.startswith("srun"))
    assert any(f"genlight run {job} --set resume_from_latest=true" in line for line in said)
    assert not (job.parent / "runs").exists()


def test_unset_options_are_left_to_slurm(job, capsys):
    said = lines(capsys, "--no-requeue", "--set", "run_id=größe 1")
    assert {line.split("=")[0] for line in said if line.startswith("#SBATCH")} == {
        f"#SBATCH --{name}"
        for name in ("job-name", "nodes", "ntasks-per-node", "output", "open-mode", "signal", "no-requeue")
    }
    assert "#SBATCH --job-name=gr--e-1" in said
    assert not any("scontrol requeue" in line for line in said)


def test_a_container_is_started_by_srun_and_the_requeue_stays_outside_of_it(job, capsys):
    words = ["--container=repo+image:1", "--mount=/data:/data", "--mount=/jobs:/jobs", "--setup=module load x"]
    said = lines(capsys, *words)
    srun = next(line for line in said if line.startswith("srun"))
    assert "--container-image=repo+image:1 --container-mounts=/data:/data,/jobs:/jobs" in srun
    requeue = next(index for index, line in enumerate(said) if "scontrol requeue" in line)
    assert said.index("module load x") < said.index(srun) < requeue


SHELL = """
scontrol() { echo "requeued $2"; exit 0; }
srun() { %s; }
squeue() { echo 2030-01-01T00:00:00; }
SLURM_JOB_ID=7
"""

STOPPED = """printf '%s\\n' '{"category":"REASON","event":"failed"}' >> "$events"; return 75"""


@pytest.fixture
def run(job, tmp_path, capsys, monkeypatch):
    """Run the script in bash, with srun and scontrol as functions of its shell; `more` are further shell lines."""
    monkeypatch.setenv("TRAINER_ARTIFACTS_DIR", f"{tmp_path}/a b")

    def ended(srun, *words, more=""):
        _, script, _ = rendered(capsys, *words)
        for name in ("a b", "a b-3"):  # of the job, and of a task of an array
            (tmp_path / name / "metrics").mkdir(parents=True, exist_ok=True)
        shell = SHELL % srun + more + script
        return subprocess.run(["bash"], input=shell, text=True, capture_output=True, check=False, cwd=tmp_path)

    return ended


@pytest.mark.parametrize(
    ("srun", "requeues"),
    [
        (STOPPED.replace("REASON", "preempted"), True),
        (STOPPED.replace("REASON", "timeout"), True),
        (STOPPED.replace("REASON", "canceled"), False),  # would only be canceled again
        ("return 0", False),
        ("return 1", False),
        ("return 2", False),
        ("return 137", False),  # it came no further than the last time
        ("""echo '{"event":"checkpoint"}' >> "$events"; return 137""", True),
    ],
)
def test_a_run_that_can_continue_is_requeued(run, srun, requeues):
    done = run(srun)
    assert done.stdout == ("requeued 7\n" if requeues else "")
    if not requeues:
        assert done.returncode == int(srun.rpartition(" ")[2])


ARRAY = "SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=3\n"
PREEMPTED = STOPPED.replace("REASON", "preempted")


@pytest.mark.parametrize("python", ["", "PY_EXEC=/env/python\n"])
def test_a_task_of_an_array_is_a_separate_run_and_is_requeued_without_the_others(run, tmp_path, python):
    done = run("""printf '%s\\n' "$@" >&2; """ + PREEMPTED, more=ARRAY + python)
    assert done.stdout == "requeued 5_3\n"
    given = done.stderr.splitlines()
    assert given[-4:] == ["--set", f"artifacts_dir={tmp_path}/a b-3", "--set", "run_id=a run-3"]
    assert (tmp_path / "a b-3/metrics/events.jsonl").exists()
    assert ("/env/python" in given) == (given[given.index("run") - 2 : given.index("run")] == ["-m", "genlight"])
    assert bool(python) == ("/env/python" in given)


def test_a_task_of_an_array_does_not_start_if_all_would_share_a_folder(run, tmp_path):
    done = run("echo started", "--set", f"events_path={tmp_path}/events.jsonl", more=ARRAY)
    assert (done.returncode, done.stdout) == (2, "")
    assert "would share events_path" in done.stderr


def test_a_requeue_that_the_controller_does_not_answer_is_tried_again(run):
    fails_once = 'sleep() { :; }; scontrol() { [ -e asked ] && echo "requeued $2" && exit 0; touch asked; return 1; }\n'
    assert run(PREEMPTED, more=fails_once).stdout == "requeued 7\n"


def test_the_time_limit_of_a_job_is_kept(run):
    done = run(STOPPED.replace("REASON", "timeout"), "--set", "max_runtime_seconds=60")
    assert (done.stdout, done.returncode) == ("", 75)


def test_settings_end_time_and_grace_reach_the_tasks_as_they_are(run, job, tmp_path):
    words = ("--set", "owner=1 2", "--set", "notes=$(id)", "--no-requeue", "--grace=33")
    done = run("""printf '%s\\n' "$SLURM_JOB_END_TIME" "$TRAINER_STOP_GRACE_SECONDS" "$@" """, *words)
    assert done.stderr == ""
    end, grace, *given = done.stdout.splitlines()
    assert int(end) == int(subprocess.check_output(["date", "--date=2030-01-01T00:00:00", "+%s"]))
    assert grace == "33"
    assert given[given.index("run") :] == [
        "run", str(job), "--set", "resume_from_latest=true", "--set", "owner=1 2", "--set", "notes=$(id)",
        "--set", f"artifacts_dir={tmp_path}/a b",
    ]  # fmt: skip


FAULTS = [
    (["--set", "max_steps=no"], "startup.invalid_job_spec"),
    (["--set", "resume_checkpoint_path=x.json"], "every start of a requeued job would begin there again"),
    (["--sbatch=array=0-3", "--set", "checkpoints_dir=/x"], "the tasks of an array would share checkpoints_dir"),
    (["--args", "1"], "`--args` has no effect on a job"),
    (["--set", "capability_token=s3cret"], "set TRAINER_CAPABILITY_TOKEN in the environment instead"),
]


@pytest.mark.parametrize(("words", "text"), FAULTS)
def test_an_unusable_argument_is_named_and_nothing_is_printed(job, capsys, words, text):
    code, script, errors = rendered(capsys, *words)
    assert (code, script) == (2, "")
    assert text in errors
    assert "s3cret" not in errors


@pytest.mark.parametrize("gpus", ["many", "-1", "h100:", "8:h100"])
def test_a_number_of_gpus_is_checked(job, capsys, gpus):
    with pytest.raises(SystemExit, match="2"):
        main(["slurm", "render", "job.json", f"--gpus-per-node={gpus}"])
    assert f"expected a number such as 8 or h100:8, but received '{gpus}'" in capsys.readouterr().err


TASK_MODULE = """
import os
from pathlib import Path
class Note:
    requires_runner_transport = True
    def on_completed_ctx(self, context):
        about = f"{context.status} {context.exit_code} {context.error_type}"
        Path(f"completed-{context.emitted_by}").write_text(about)
def describe(text, count=1, *, job):
    return [text, count, str(job.output_dir)]
def fails(text):
    raise ValueError("no such thing")
def dies(text):
    os._exit(9)
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An ``sbatch`` that runs the script at once, as one task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASK_MODULE)
    for name, line in (("sbatch", 'echo 7; shift; bash "$1" >job.out 2>&1'), ("srun", 'shift 2; exec "$@"')):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("words", "task", "result"),
    [
        (["--args", "hello", "3"], "", ["hello", 3]),
        (["--args", '"5"', "--set", "count=[1, 2]", "--result=json"], "", ["5", [1, 2]]),
        (["--set", "text=a b", "--result=json"], "-2", ["a b", 1]),
    ],
)
def test_a_function_is_submitted_with_its_arguments_and_its_result_is_read(
    sbatch, tmp_path, capfd, monkeypatch, words, task, result
):
    if task:
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task[1:])
    assert main(["slurm", "submit", "tasks:describe", *words]) == 0
    said = capfd.readouterr()
    assert said.out == "7\n"
    (folder,) = tmp_path.glob("describe-*")
    path = folder / f"result{task}.{'json' if '--result=json' in words else 'pickle'}"
    assert task or f"result: {path}" in said.err
    assert read_result(path) == [*result, str(folder)]
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [("describe", 0, "success 0 None"), ("fails", 1, "failure 1 ValueError"), ("dies", 1, "failure 9 None")],
)
def test_a_submit_that_waits_shows_and_reports_how_the_function_ended(
    sbatch, tmp_path, capfd, monkeypatch, function, code, said
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    write_pickle("callbacks", [importlib.import_module("tasks").Note()])
    words = ["--args", "x", "--callbacks-file", "callbacks"]
    assert main(["slurm", "submit", f"tasks:{function}", *words, "--sbatch", "wait"]) == code
    shown = capfd.readouterr()
    assert shown.out == "7\n"
    assert ("in fails" in shown.err) == (function == "fails")
    assert Path("completed-client").read_text() == said
    Path("completed-client").unlink()
    assert main(["slurm", "submit", f"tasks:{function}", *words]) == code
    assert not Path("completed-client").exists()
    assert "in fails" not in capfd.readouterr().err


def test_the_python_of_a_prepared_environment_calls_a_function(sbatch, tmp_path, capsys):
    prepare = f"export PY_EXEC={tmp_path}/py"
    (tmp_path / "py").write_text(f'#!/bin/bash\ntouch used\nexec {sys.executable} "$@"\n')
    (tmp_path / "py").chmod(0o700)
    assert main(["slurm", "submit", "tasks:describe", "--args", "x", "--setup", prepare]) == 0
    assert (tmp_path / "used").exists()
    assert main(["slurm", "render", "tasks:describe", "--args", "x", "--container", "image"]) == 0
    assert '--container-image=image "${PY_EXEC:-python}" -m genlight.adapter.runner' in capsys.readouterr().out


def test_a_keyword_argument_without_a_value_is_refused(sbatch, capsys):
    assert main(["slurm", "submit", "tasks:describe", "--set", "text"]) == 2
    assert "Expected --set NAME=VALUE, but received 'text'" in capsys.readouterr().err


def test_a_missing_sbatch_is_reported_without_a_traceback(job):
    environ = {**os.environ, "PATH": os.path.dirname(sys.executable)}
    command = [sys.executable, "-m", "genlight.adapter.cli", "slurm", "submit", "job.json"]
    done = subprocess.run(command, cwd=job.parent, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "sbatch is not installed; run this on a login node of the cluster" in done.stderr
