"""``genlight slurm``, as far as it goes without a cluster; ``tests/slurm`` has one."""

import json
import os
import subprocess
import sys

import pytest

from genlight.adapter.cli import main


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


def test_what_is_asked_for_stands_in_directives(job, capsys):
    words = ["--nodes=2", "--tasks-per-node=8", "--gpus-per-node=h100:8", "--cpus-per-task=4", "--grace=90"]
    said = lines(capsys, *words, "--sbatch=exclusive", "--sbatch=mail-type=END", "--sbatch=time=1-00:00:00")
    assert said[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH ") for line in said if line.startswith("#SBATCH")} == {
        "--job-name=a-run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--cpus-per-task=4",
        "--time=1-00:00:00", "--signal=TERM@90",
        f"--output={job.parent}/a-run-%j.out", "--open-mode=append", "--requeue", "--exclusive", "--mail-type=END",
    }  # fmt: skip
    assert any("--cpus-per-task=4 " in line for line in said if line.startswith("srun"))


def test_what_is_not_asked_for_is_left_to_slurm(job, capsys):
    names = {line.split("=")[0] for line in lines(capsys) if line.startswith("#SBATCH")}
    assert not names & {"#SBATCH --time", "#SBATCH --gpus-per-node", "#SBATCH --partition", "#SBATCH --array"}


def test_a_container_is_started_by_srun_and_the_requeue_stays_outside_of_it(job, capsys):
    words = ["--container=repo+image:1", "--mount=/data:/data", "--mount=/jobs:/jobs", "--setup=module load x"]
    said = lines(capsys, *words)
    srun = next(line for line in said if line.startswith("srun"))
    assert "--container-image=repo+image:1 --container-mounts=/data:/data,/jobs:/jobs" in srun
    requeue = next(index for index, line in enumerate(said) if "scontrol requeue" in line)
    assert said.index("module load x") < said.index(srun) < requeue


def test_without_requeue_the_script_ends_as_the_run_did(job, capsys):
    said = lines(capsys, "--no-requeue")
    assert "#SBATCH --no-requeue" in said
    assert not any("scontrol requeue" in line for line in said)


@pytest.mark.parametrize("words", [[], ["--set", "owner='x y'", "--set", "notes=$(id)"], ["--setup", "A='1 2'"]])
def test_the_script_is_sound(job, capsys, monkeypatch, words):
    monkeypatch.setenv("TRAINER_ARTIFACTS_DIR", "/jobs/a b/$HOME")
    _, script, _ = rendered(capsys, *words)
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SHELL = """
scontrol() { echo "requeued $2"; exit 0; }
srun() { %s; }
squeue() { echo 2030-01-01T00:00:00; }
SLURM_JOB_ID=7
"""

STOPPED = """printf '%s\\n' '{"category":"REASON","event":"failed"}' >> "$events"; return 75"""


@pytest.fixture
def ends(job, tmp_path, capsys, monkeypatch):
    """What the script says and its exit code, with srun and scontrol in its own shell."""
    monkeypatch.setenv("TRAINER_ARTIFACTS_DIR", str(tmp_path))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "events.jsonl").touch()

    def run(srun, *words):
        _, script, _ = rendered(capsys, *words)
        done = subprocess.run(
            ["bash"], input=SHELL % srun + script, text=True, capture_output=True, check=False, cwd=tmp_path
        )
        assert done.stderr == ""
        return done.stdout.strip(), done.returncode

    return run


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
def test_a_run_that_can_go_on_is_requeued(ends, srun, requeues):
    said, code = ends(srun)
    assert said == ("requeued 7" if requeues else "")
    if not requeues:
        assert code == int(srun.rpartition(" ")[2])


def test_a_limit_of_the_jobs_own_is_kept(ends):
    assert ends(STOPPED.replace("REASON", "timeout"), "--set", "max_runtime_seconds=60") == ("", 75)


def test_the_end_time_and_the_grace_reach_the_tasks(ends):
    said, _ = ends('echo "$SLURM_JOB_END_TIME $TRAINER_STOP_GRACE_SECONDS"', "--grace=33")
    end, grace = said.split()
    assert int(end) == int(subprocess.check_output(["date", "--date=2030-01-01T00:00:00", "+%s"]))
    assert grace == "33"


def test_the_settings_reach_the_tasks_as_they_are(ends, job, tmp_path):
    said, _ = ends("""printf '%s\\n' "$@" """, "--set", "owner=1 2", "--set", "notes=$(id)", "--no-requeue")
    given = said.splitlines()
    assert given[given.index("run") :] == [
        "run", str(job), "--set", "resume_from_latest=true", "--set", "owner=1 2", "--set", "notes=$(id)",
        "--set", f"artifacts_dir={tmp_path}",
    ]  # fmt: skip


def test_a_script_is_printed_with_a_task_for_each_gpu(job, capsys):
    code, script, errors = rendered(capsys, "--nodes", "2", "--gpus-per-node", "h100:8", "--sbatch", "time=60")

    assert (code, errors) == (0, "")
    for line in ("--job-name=a-run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--time=60"):
        assert f"#SBATCH {line}\n" in script
    assert f"genlight run {job} --set resume_from_latest=true" in script
    assert not (job.parent / "runs").exists()


FAULTS = [
    (["--gpus-per-node", "many"], "Expected a number such as 8 or h100:8, but received 'many'"),
    (["--mount", "/a:/b"], "`--mount` has no effect without `--container`."),
    (
        ["--sbatch=--exclusive"],
        "Invalid option of sbatch. Expected NAME=VALUE or NAME without blanks, but received ",
    ),
    (["--sbatch", "wrap=x\nrm"], "Invalid option of sbatch"),
    (["--set", "max_steps=no"], "startup.invalid_job_spec"),
    (["--set", "resume_checkpoint_path=x.json"], "every start of a requeued job would begin there anew"),
    (["--set", "capability_token=s3cret"], "set TRAINER_CAPABILITY_TOKEN in the environment instead"),
]


@pytest.mark.parametrize(("words", "text"), FAULTS)
def test_what_cannot_be_used_is_told_and_nothing_is_printed(job, capsys, words, text):
    code, script, errors = rendered(capsys, *words)
    assert (code, script) == (2, "")
    assert text in errors
    assert "s3cret" not in errors


def test_all_that_cannot_be_used_is_told_at_once(job, capsys):
    words = ["--gpus-per-node", "-1", "--sbatch", "mem=a lot", "--mount", "/a:/b"]
    code, _, errors = rendered(capsys, *words)
    assert code == 2
    assert len(errors.splitlines()) == 3
    assert all(name in errors for name in ("`--gpus-per-node`", "`--mount`", "'mem=a lot'"))


def test_a_run_id_in_any_script_gives_a_name_that_slurm_takes(job, capsys):
    code, script, errors = rendered(capsys, "--set", "run_id=größe 1")
    assert (code, errors) == (0, "")
    assert "#SBATCH --job-name=gr--e-1\n" in script


def test_an_action_that_is_not_there_offers_the_nearest(job, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["slurm", "submti", "job.json"])
    assert "Did you mean `submit`?" in capsys.readouterr().err


def test_a_machine_without_slurm_is_told(job):
    environ = {**os.environ, "PATH": os.path.dirname(sys.executable)}
    command = [sys.executable, "-m", "genlight.adapter.cli", "slurm", "submit", "job.json"]
    done = subprocess.run(command, cwd=job.parent, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "sbatch is not installed; run this on a login node of the cluster" in done.stderr
