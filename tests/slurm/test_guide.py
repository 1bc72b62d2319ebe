"""The commands of the page about clusters, on a cluster."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "examples/guides/cluster.md"


def test_a_job_is_submitted_seen_and_cancelled_as_the_page_says(slurm, tmp_path):
    commands = re.findall(r"^genlight (slurm (?:submit|status|cancel) .*)$", PAGE.read_text(), re.MULTILINE)
    submit, status, cancel = (command.split() for command in commands)

    def genlight(*words):
        return slurm.call(sys.executable, "-m", "genlight.adapter.cli", *words, cwd=tmp_path)

    genlight("init", "demo")
    job = genlight(*submit).strip()
    assert re.match(rf"{job} (PENDING|RUNNING|CONFIGURING) ", genlight(*status))
    genlight(*cancel)
    assert slurm.wait(job)[0] == "CANCELLED"
    slurm.until(lambda: "is not in the queue" in genlight(*status), "the job has left the queue")
