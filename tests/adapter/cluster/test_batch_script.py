"""The sbatch script: readable, sound as a shell script, and a requeue where a run can go on."""

import subprocess
from pathlib import Path

import pytest

from genlight.adapter.cluster.batch_script import BatchScript

JOB = {"name": "run", "job": Path("/jobs/run.json"), "artifacts": Path("/jobs/runs/run")}
JOB |= {"events": Path("/jobs/runs/run/metrics/events.jsonl")}


def lines(**fields):
    return BatchScript(**{**JOB, **fields}).text().splitlines()


def test_what_is_asked_for_stands_in_directives():
    said = lines(
        nodes=2, tasks_per_node=8, gpus_per_node="h100:8", cpus_per_task=4, grace_s=90,
        extra=("exclusive", "mail-type=END", "time=1-00:00:00"),
    )  # fmt: skip
    assert said[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH ") for line in said if line.startswith("#SBATCH")} == {
        "--job-name=run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--cpus-per-task=4",
        "--time=1-00:00:00", "--signal=TERM@90",
        "--output=/jobs/run-%j.out", "--open-mode=append", "--requeue", "--exclusive", "--mail-type=END",
    }  # fmt: skip
    assert any("--cpus-per-task=4 " in line for line in said if line.startswith("srun"))


def test_what_is_not_asked_for_is_left_to_slurm():
    names = {line.split("=")[0] for line in lines() if line.startswith("#SBATCH")}
    assert not names & {"#SBATCH --time", "#SBATCH --gpus-per-node", "#SBATCH --partition", "#SBATCH --array"}


def test_a_container_is_started_by_srun_and_the_requeue_stays_outside_of_it():
    said = lines(container="repo+image:1", mounts=("/data:/data", "/jobs:/jobs"), set_up=("module load x",))
    srun = next(line for line in said if line.startswith("srun"))
    assert "--container-image=repo+image:1 --container-mounts=/data:/data,/jobs:/jobs" in srun
    assert (
        said.index("module load x")
        < said.index(srun)
        < next(i for i, line in enumerate(said) if "scontrol requeue" in line)
    )


def test_without_requeue_the_script_ends_as_the_run_did():
    said = lines(requeues=False)
    assert "#SBATCH --no-requeue" in said
    assert not any("scontrol requeue" in line for line in said)


@pytest.mark.parametrize("fields", [{}, {"overrides": ("b='x y'", "a=$(id)")}, {"set_up": ("A='1 2'",)}])
def test_the_script_is_sound(fields):
    script = BatchScript(**{**JOB, "artifacts": Path("/jobs/a b/$HOME"), **fields}).text()
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BAD = [
    ({"mounts": ("/a:/b",)}, "`mounts` has no effect without `container`."),
    (
        {"extra": ("--exclusive",)},
        "Invalid option of sbatch. Expected NAME=VALUE or NAME without blanks, but received ",
    ),
    ({"extra": ("wrap=x\nrm",)}, "Invalid option of sbatch"),
    ({"extra": ("time=1 day",)}, "Invalid option of sbatch"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_what_cannot_be_asked_for_is_told(fields, words):
    with pytest.raises(ValueError, match=r"nvalid|no effect") as caught:
        BatchScript(**{**JOB, **fields})
    assert words in str(caught.value)


def test_every_fault_is_listed():
    with pytest.raises(ValueError, match="sbatch") as caught:
        BatchScript(**{**JOB, "gpus_per_node": "many", "mounts": ("/a:/b",), "extra": ["x y"]})
    assert len(str(caught.value).splitlines()) == 3


SHELL = """
scontrol() { echo "requeued $2"; exit 0; }
srun() { %s; }
squeue() { echo 2030-01-01T00:00:00; }
SLURM_JOB_ID=7
"""

STOPPED = """printf '%s\\n' '{"category":"REASON","event":"failed"}' >> "$events"; return 75"""


@pytest.fixture
def ends(tmp_path):
    """What the script says and its exit code, with srun and scontrol in its own shell."""

    def run(srun, **fields):
        events = tmp_path / "events.jsonl"
        events.touch()
        script = BatchScript(**{**JOB, "artifacts": tmp_path, "events": events, **fields}).text()
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
    assert ends(STOPPED.replace("REASON", "timeout"), requeue_after=("preempted",)) == ("", 75)


def test_the_end_time_and_the_grace_reach_the_tasks(ends):
    said, _ = ends('echo "$SLURM_JOB_END_TIME $TRAINER_STOP_GRACE_SECONDS"', grace_s=33)
    end, grace = said.split()
    assert int(end) == int(subprocess.check_output(["date", "--date=2030-01-01T00:00:00", "+%s"]))
    assert grace == "33"


def test_the_settings_reach_the_tasks_as_they_are(ends, tmp_path):
    said, _ = ends("""printf '%s\\n' "$@" """, overrides=("x=1 2", "y=$(id)"), requeues=False)
    given = said.splitlines()
    assert given[given.index("run") :] == [
        "run", "/jobs/run.json", "--set", "resume_from_latest=true", "--set", "x=1 2", "--set", "y=$(id)",
        "--set", f"artifacts_dir={tmp_path}",
    ]  # fmt: skip
