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


def test_a_script_is_printed_with_a_task_for_each_gpu(job, capsys):
    code, script, errors = rendered(capsys, "--nodes", "2", "--gpus-per-node", "h100:8", "--sbatch", "time=60")

    assert (code, errors) == (0, "")
    for line in ("--job-name=a-run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=h100:8", "--time=60"):
        assert f"#SBATCH {line}\n" in script
    assert f"genlight run {job} --set resume_from_latest=true" in script
    assert not (job.parent / "runs").exists()


FAULTS = [
    (["--gpus-per-node", "many"], "Expected a number such as 8 or h100:8, but received 'many'"),
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
    words = ["--gpus-per-node", "-1", "--sbatch", "mem=a lot"]
    code, _, errors = rendered(capsys, *words)
    assert code == 2
    assert len(errors.splitlines()) == 2
    assert "`gpus_per_node`" in errors
    assert "'mem=a lot'" in errors


def test_a_run_id_in_any_script_gives_a_name_that_slurm_takes(job, capsys):
    code, script, errors = rendered(capsys, "--set", "run_id=größe 1")
    assert (code, errors) == (0, "")
    assert "#SBATCH --job-name=gr--e-1\n" in script


def test_a_time_limit_of_the_jobs_own_ends_it(job, capsys):
    assert "(preempted|timeout)" in rendered(capsys)[1]
    assert "(preempted)" in rendered(capsys, "--set", "max_runtime_seconds=60")[1]


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
