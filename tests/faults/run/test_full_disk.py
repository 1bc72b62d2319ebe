"""A file system that is really full: writes fail or are cut short, and the next start resumes.

Each part of a run gets its own small file system, and a thread fills it while the trainer waits.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import threading

import pytest

from genlight.callbacks.checkpoint.selection import newest_valid
from genlight.reporters.uploads import QUEUE_DIRECTORY

STEPS = 60


@pytest.fixture
def small_disk():
    """Mount a file system of 4 MB and 100 files."""
    mounted = []

    def mount(folder):
        folder.mkdir(parents=True)
        if shutil.which("mount") is None:
            pytest.skip("there is no mount command here")
        command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=100", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def fill_with_files(folder):
    """Use up all inodes except two; most of the space stays free."""
    made = []
    with contextlib.suppress(OSError):
        while True:
            made.append(folder / f"ballast-{len(made)}")
            made[-1].touch()
    for path in made[-3:-1]:
        path.unlink()


def empty(folder):
    for path in folder.glob("ballast*"):
        path.unlink()


@pytest.fixture
def run_until_full(job):
    """Run a job whose trainer waits at a place until the folder is full; return the exit code.

    The folder is filled when `after` exists: a background save may still write it while the trainer waits.
    """

    def run(folder, at="train_step:3", fill=fill, checkpoint_every=20, after=""):
        job.write(
            plan={"at": at, "holds": 60.0},
            max_steps=STEPS,
            mock_batches=list(range(STEPS)),
            metric_every=1,
            checkpoint_every=checkpoint_every,
            uploads={f"{kind}_url": f"SERVER/{kind}" for kind in ("terminal", "checkpoint")},
            resume_from_latest=True,
        )

        def fill_it():
            job.wait_until(job.reached)
            job.wait_until((folder / after).exists)
            fill(folder)
            job.go()

        filling = threading.Thread(target=fill_it)
        filling.start()
        code = job.run()
        filling.join()
        return code

    return run


def assert_resumes(job, folder):
    """Free the space; the same start completes the run and delivers everything."""
    empty(folder)
    assert job.run() == 0
    assert job.terminal_event()["event"] == "completed"
    assert job.server.posted("/terminal")[-1]["status"] == "completed"
    assert {"step": STEPS, "final": True}.items() <= job.server.posted("/checkpoint")[-1].items()


@pytest.mark.parametrize(
    ("fill", "words"),
    [(fill, "free some space"), (fill_with_files, os.strerror(errno.ENOSPC))],
    ids=["no room", "no room for files"],
)
def test_checkpoints_on_a_full_disk(job, small_disk, run_until_full, fill, words):
    checkpoints = small_disk(job.out / "checkpoints")
    assert run_until_full(checkpoints, "state_dict:40", fill, after="step-00000020.json") == 1

    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("train-step", True)
    assert words in failed["error"]
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]
    record, warnings = newest_valid(checkpoints)
    assert (record.step, warnings) == (20, [])
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".tmp-")]
    assert_resumes(job, checkpoints)


def test_the_event_log_on_a_full_disk(job, small_disk, run_until_full):
    metrics = small_disk(job.out / "metrics")
    assert run_until_full(metrics) == 1

    message = job.server.posted("/terminal")[-1]
    assert message["error"].startswith("train-step:")
    assert os.strerror(errno.ENOSPC) in message["error"]
    assert job.events_path.read_bytes().endswith(b"\n")
    assert job.events()[-1]["event"] not in ("completed", "failed")
    assert_resumes(job, metrics)


def test_the_upload_queue_on_a_full_disk(job, small_disk, run_until_full):
    queue = small_disk(job.out / QUEUE_DIRECTORY)
    assert run_until_full(queue, checkpoint_every=4) == 1

    failed = job.terminal_event()
    assert (failed["category"], failed["resumable"]) == ("upload", True)
    assert os.strerror(errno.ENOSPC) in failed["error"]
    assert job.server.posted("/terminal")[-1]["error"] == failed["error"]
    assert_resumes(job, queue)
